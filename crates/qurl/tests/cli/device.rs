//! `--device` where there is no GPU, or one that will not do. The driver is a small library made here: what
//! it says of itself is all that a refusal needs.

use crate::common::{Run, qurl_with};
use crate::models::{TempDir, saved};
use qurl_model::Family;
use std::process::Command;

/// A driver of this version (1000 times its major number), with one device that has 1 of 2 GiB free, and a
/// compiler that ends with this status. Nothing computes.
const LIBRARY: &str = r#"
#include <stddef.h>
#include <string.h>
#define EMPTY(name) int name() { return 0; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
#if VERSION >= 12000
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
    strncpy(name, "a device of the tests", length); return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 227 << 10 : 132; return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)1; return 0; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
    *free = (size_t)1 << 30; *total = (size_t)2 << 30; return 0;
}
EMPTY(cuInit) EMPTY(cuDeviceGet) EMPTY(cuDevicePrimaryCtxRelease_v2) EMPTY(cuCtxSetCurrent)
EMPTY(cuMemAlloc_v2) EMPTY(cuMemFree_v2) EMPTY(cuMemHostAlloc) EMPTY(cuMemFreeHost)
EMPTY(cuMemcpyHtoDAsync_v2) EMPTY(cuMemcpyDtoHAsync_v2) EMPTY(cuMemcpyDtoDAsync_v2) EMPTY(cuMemsetD8Async)
EMPTY(cuMemsetD8_v2) EMPTY(cuStreamCreate) EMPTY(cuStreamDestroy_v2) EMPTY(cuStreamSynchronize)
EMPTY(cuModuleLoadData) EMPTY(cuModuleUnload) EMPTY(cuModuleGetFunction) EMPTY(cuFuncSetAttribute)
EMPTY(cuFuncGetAttribute) EMPTY(cuOccupancyMaxActiveBlocksPerMultiprocessor)
EMPTY(cuOccupancyMaxActiveClusters) EMPTY(cuLaunchKernelEx) EMPTY(cuTensorMapEncodeTiled)
EMPTY(cuStreamBeginCapture_v2) EMPTY(cuStreamEndCapture) EMPTY(cuGraphInstantiateWithFlags)
EMPTY(cuGraphLaunch) EMPTY(cuGraphExecDestroy) EMPTY(cuGraphDestroy) EMPTY(cuEventCreate)
EMPTY(cuEventRecord) EMPTY(cuEventSynchronize) EMPTY(cuEventElapsedTime) EMPTY(cuEventDestroy_v2)
EMPTY(cuStreamWaitEvent) EMPTY(cuEventQuery)
EMPTY(cuGetErrorString)
int nvrtcCompileProgram() { return COMPILED; }
int nvrtcGetProgramLogSize(void* program, size_t* size) { *size = 9; return 0; }
int nvrtcGetProgramLog(void* program, char* log) { strcpy(log, "too hard"); return 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { *size = 1; return 0; }
int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 8; return 0; }
EMPTY(nvrtcCreateProgram) EMPTY(nvrtcGetCUBIN) EMPTY(nvrtcDestroyProgram)
#endif
"#;

/// Builds the library with the compiler that Rust links with.
fn driver(dir: &TempDir, version: u32, compiled: u32) -> String {
    let (source, library) = (dir.path().join("driver.c"), dir.path().join("driver.so"));
    std::fs::write(&source, LIBRARY).expect("written");
    let built = Command::new("cc")
        .args([
            "-shared",
            "-fPIC",
            "-w",
            &format!("-DVERSION={version}"),
            &format!("-DCOMPILED={compiled}"),
            "-o",
        ])
        .args([&library, &source])
        .status()
        .expect("cc, with which Rust links");
    assert!(built.success(), "the driver of the tests does not build");
    library.to_str().expect("a path in UTF-8").to_string()
}

/// Runs a command with this file as the driver and the compiler.
fn with_driver(dir: &TempDir, driver: &str, args: &[&str], stdin: &str) -> Run {
    let cache = dir.path().join("cache");
    let cache = cache.to_str().expect("a path in UTF-8");
    qurl_with(
        dir.path(),
        args,
        &[("QURL_CUDA", driver), ("QURL_NVRTC", driver), ("XDG_CACHE_HOME", cache)],
        stdin,
    )
}

/// `cuda` is refused for this reason; `auto` says it and computes on the CPU.
fn check_refused(dir: &TempDir, driver: &str, reasons: &[&str]) {
    let model = saved(Family::Qwen2);
    let score = |device: &str| {
        let args = ["score", "--model", model.text(), "--device", device];
        with_driver(dir, driver, &args, "{\"ids\":[3,9,14]}\n")
    };
    let refused = score("cuda");
    refused.assert_bad(&["device cuda:0 cannot be used"]);
    refused.assert_bad(reasons);
    assert_eq!(refused.stdout, "");
    let (fallen_back, cpu) = (score("auto"), score("cpu"));
    assert_eq!((fallen_back.status, &fallen_back.stdout), (0, &cpu.stdout), "{}", fallen_back.stderr);
    for text in reasons.iter().chain(&["computing on the CPU"]) {
        assert!(fallen_back.stderr.contains(text), "expected {text:?} in {}", fallen_back.stderr);
    }
}

#[test]
fn a_missing_driver() {
    let dir = TempDir::new();
    check_refused(&dir, "/there/is/no/libcuda.so", &["QURL_CUDA=/there/is/no/libcuda.so"]);
}

#[test]
fn a_driver_that_is_too_old() {
    let dir = TempDir::new();
    let old = driver(&dir, 11_040, 0);
    check_refused(&dir, &old, &["the driver is too old", "CUDA 11.4", "expected 12.0 or newer"]);
}

#[test]
fn a_compiler_that_fails() {
    let dir = TempDir::new();
    let driver = driver(&dir, 12_000, 6);
    check_refused(&dir, &driver, &["does not compile for sm_90", "NVRTC status 6", "too hard"]);
}

/// What goes where is said before a run starts, and a run that does not fit leaves nothing behind.
#[test]
fn memory_that_does_not_suffice() {
    let dir = TempDir::new();
    let driver = driver(&dir, 12_000, 0);
    let parts = [
        "workspace",
        "for the driver",
        "actor: weights in f32",
        "actor: moments",
        "rollout: keys and values",
        "together",
    ];
    let refused = with_driver(&dir, &driver, &["train", "--device", "cuda", "--run", "refused"], "");
    refused.assert_bad(&parts);
    refused.assert_bad(&["memory: ", "1024 of 2048 MiB free", "trainer.micro_tokens"]);
    assert!(!dir.path().join("refused").exists(), "a refused run has left its directory");
    assert!(refused.stderr.contains("compiling"), "{}", refused.stderr);

    let refused = with_driver(&dir, &driver, &["bench", "train", "--device", "cuda", "--shape", "5m"], "");
    refused.assert_bad(&["1024 of 2048 MiB free", "packed weights", "for the driver"]);
    assert!(!refused.stderr.contains("compiling"), "the kernels are in the cache: {}", refused.stderr);
}

#[test]
fn the_long_version_names_commit_cpu_level_and_the_cuda_it_found() {
    let dir = TempDir::new();
    let at = |environment: &[(&str, &str)], flag: &str| {
        let run = qurl_with(dir.path(), &[flag], environment, "");
        assert_eq!((run.status, run.stderr.as_str()), (0, ""), "{flag}");
        run.stdout
    };
    let short = at(&[], "-V");
    let commit = short.strip_prefix(concat!("qurl ", env!("CARGO_PKG_VERSION"), " (")).expect(&short);
    let commit = commit.strip_suffix(")\n").expect(&short);
    assert!(commit == "unknown" || commit.len() >= 12, "{short}");

    let none = at(&[("QURL_CPU", "scalar"), ("QURL_CUDA", "/nowhere/libcuda.so.1")], "--version");
    assert!(none.starts_with(&short) && none.contains("\ncpu:  scalar, "), "{none}");
    assert!(none.contains("\ncuda: QURL_CUDA=/nowhere/libcuda.so.1: "), "{none}");

    let library = driver(&dir, 13000, 0);
    let found = at(&[("QURL_CUDA", &library), ("QURL_NVRTC", &library)], "--version");
    for line in [
        "cuda: driver of CUDA 13.0, NVRTC 12.8, ",
        "gpu:  0: a device of the tests, compute capability 9.0\n",
    ] {
        assert!(found.contains(line), "expected {line:?} in {found}");
    }
    let old = driver(&dir, 11080, 0);
    let found = at(&[("QURL_CUDA", &old)], "--version");
    assert!(found.contains("cuda: the driver is too old: it is made for CUDA 11.8"), "{found}");
}
