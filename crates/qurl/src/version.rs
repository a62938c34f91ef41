//! What `qurl -V` and `qurl --version` print: one line, and the same with what this machine has to compute
//! on.
//!
//! The long form opens the libraries of CUDA, which takes a while, so it is made only when it is asked for.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda;
use std::fmt::Write;

/// Version and commit, what `-V` prints after the name.
pub const SHORT: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("QURL_COMMIT"), ")");

/// Version and commit, the level of the CPU kernels, and the CUDA that was found.
pub fn long() -> String {
    let mut text = format!("qurl {SHORT}\n");
    let cpu = match Level::from_env() {
        Ok(level) => level.to_string(),
        Err(error) => error.to_string(),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    _ = writeln!(text, "cpu:  {cpu}, {threads} threads, {}-{}", std::env::consts::ARCH, std::env::consts::OS);
    match cuda::found() {
        Err(reason) => _ = writeln!(text, "cuda: {reason}"),
        Ok(found) => describe(&found, &mut text),
    }
    text
}

fn describe(found: &cuda::Found, text: &mut String) {
    let (major, minor) = found.driver;
    let nvrtc = match &found.nvrtc {
        Ok((major, minor)) => format!("NVRTC {major}.{minor}"),
        Err(reason) => reason.clone(),
    };
    let cublas_lt = match &found.cublas_lt {
        Ok(()) => "cuBLASLt",
        Err(_) => "no cuBLASLt",
    };
    _ = writeln!(text, "cuda: driver of CUDA {major}.{minor}, {nvrtc}, {cublas_lt}");
    if found.gpus.is_empty() {
        _ = writeln!(text, "gpu:  the driver sees no device");
    }
    for (number, gpu) in found.gpus.iter().enumerate() {
        let (major, minor) = gpu.capability;
        _ = writeln!(text, "gpu:  {number}: {}, compute capability {major}.{minor}", gpu.name);
    }
}
