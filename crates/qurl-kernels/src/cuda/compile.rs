//! Kernels: sources in the binary, compiled by NVRTC for the device at hand, kept on disk.
//!
//! A compiled file is found again by a hash of everything that makes it: source, headers, architecture,
//! options and the compiler's version. A cache that cannot be read or written costs time, nothing else. What
//! it does not have is compiled on all cores before the device is used (half a minute to a minute for one
//! core), so that no step of a run waits for it.

use super::constants;
use super::ffi::Nvrtc;
use super::kernels::KernelId;
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name without ending; what launches refer to.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Whether it uses instructions of exactly one architecture (wgmma), where the device has them.
    pub specific: bool,
}

/// Headers that sources may include: name and text.
pub(super) const HEADERS: &[(&str, &str)] = &[
    ("bits4.cuh", include_str!("../../cu/bits4.cuh")),
    ("common.cuh", include_str!("../../cu/common.cuh")),
    ("flash.cuh", include_str!("../../cu/flash.cuh")),
    ("flash_hopper.cuh", include_str!("../../cu/flash_hopper.cuh")),
    ("flash_tile.cuh", include_str!("../../cu/flash_tile.cuh")),
    ("mma.cuh", include_str!("../../cu/mma.cuh")),
    ("gemm_sums.cuh", include_str!("../../cu/gemm_sums.cuh")),
    ("gemm_store.cuh", include_str!("../../cu/gemm_store.cuh")),
    ("gemm_split_k.cuh", include_str!("../../cu/gemm_split_k.cuh")),
    ("gemm_bits4.cuh", include_str!("../../cu/gemm_bits4.cuh")),
    ("gemm_bulk.cuh", include_str!("../../cu/gemm_bulk.cuh")),
    ("gemm_gated.cuh", include_str!("../../cu/gemm_gated.cuh")),
    ("gemm_hopper.cuh", include_str!("../../cu/gemm_hopper.cuh")),
    ("hopper.cuh", include_str!("../../cu/hopper.cuh")),
];

macro_rules! source {
    ($name:literal, $specific:literal) => {
        Source { name: $name, text: include_str!(concat!("../../cu/", $name, ".cu")), specific: $specific }
    };
}

/// All files of kernels.
pub const SOURCES: &[Source] = &[
    source!("attention_plain", false),
    source!("checksum", false),
    source!("elementwise", false),
    source!("flash_backward", false),
    source!("flash_backward_hopper", true),
    source!("flash_decode", false),
    source!("flash_prefill", false),
    source!("flash_prefill_hopper", true),
    source!("flash_stream", false),
    source!("gemm_bf16", true),
    source!("gemm_fp8", true),
    source!("gemm_int4", true),
    source!("gemm_int8", true),
    source!("gemm_mma", false),
    source!("gemm_mma_bits4", false),
    source!("gemm_nvfp4", true),
    source!("gemm_pack", false),
    source!("gemm_plain", false),
    source!("head", false),
    source!("kv", false),
    source!("norm", false),
    source!("optim", false),
    source!("pack_bits4", false),
    source!("quantize", false),
    source!("sample", false),
];

/// A device's architecture, such as 90 for compute capability 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture(pub u32);

impl Architecture {
    /// The compiler's name for it. Hopper's own instructions need the `a`.
    pub fn target(self, source: &Source) -> String {
        let suffix = if source.specific && self.0 == 90 { "a" } else { "" };
        format!("sm_{}{suffix}", self.0)
    }
}

/// A compiled file and what the compiler said.
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// Warnings, and with [`compile`]'s `verbose` registers and spills of every kernel.
    pub log: String,
}

/// Compiles one file. The error is the compiler's log.
pub fn compile(
    nvrtc: &Nvrtc,
    source: &Source,
    architecture: Architecture,
    verbose: bool,
) -> Result<Compiled, String> {
    let text = c_string(source.text)?;
    let name = c_string(&format!("{}.cu", source.name))?;
    let headers = HEADERS.iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>, _>>()?;
    let names = HEADERS.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>, _>>()?;
    let header_pointers: Vec<*const c_char> = headers.iter().map(|h| h.as_ptr()).collect();
    let name_pointers: Vec<*const c_char> = names.iter().map(|n| n.as_ptr()).collect();
    let mut options = options(source, architecture);
    if verbose {
        options.push("--ptxas-options=-v".to_string());
    }
    let options = options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>, _>>()?;
    let option_pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with a zero and outlive the calls; sizes come from the library itself.
    unsafe {
        let status = (nvrtc.create)(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as c_int,
            header_pointers.as_ptr(),
            name_pointers.as_ptr(),
        );
        if status != 0 {
            return Err(format!("NVRTC refused {}.cu with status {status}", source.name));
        }
        let status = (nvrtc.compile)(program, option_pointers.len() as c_int, option_pointers.as_ptr());
        let mut size = 0;
        (nvrtc.log_size)(program, &mut size);
        let mut log = vec![0u8; size];
        (nvrtc.log)(program, log.as_mut_ptr().cast());
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        let mut size = 0;
        let mut cubin = Vec::new();
        let got = if status == 0 { (nvrtc.cubin_size)(program, &mut size) } else { status };
        if got == 0 {
            cubin = vec![0u8; size];
            (nvrtc.cubin)(program, cubin.as_mut_ptr().cast());
        }
        (nvrtc.destroy)(&mut program);
        match got {
            0 if cubin.is_empty() => Err(format!("NVRTC made no code of {}.cu", source.name)),
            0 => Ok(Compiled { cubin, log }),
            status => {
                let target = architecture.target(source);
                Err(format!(
                    "{}.cu does not compile for {target} (NVRTC status {status}):\n{log}",
                    source.name
                ))
            }
        }
    }
}

/// A kernel that is launched from a file, and that its machine code does not have. Files for exactly one
/// architecture are empty for others.
pub fn missing_kernel(source: &Source, architecture: Architecture, cubin: &[u8]) -> Option<&'static str> {
    let has = |name: &str| {
        let symbol = format!("{name}\0");
        cubin.windows(symbol.len()).any(|window| window == symbol.as_bytes())
    };
    let own = KernelId::ALL.iter().filter(|kernel| kernel.file() == source.name).map(|kernel| kernel.name());
    own.filter(|_| !source.specific || architecture.0 == 90).find(|name| !has(name))
}

fn options(source: &Source, architecture: Architecture) -> Vec<String> {
    // Multiplications and additions are written as they are meant: contraction into fused operations would
    // change bits.
    let arch = format!("--gpu-architecture={}", architecture.target(source));
    let fixed = [arch, "--std=c++17".to_string(), "--fmad=false".to_string(), "-default-device".to_string()];
    fixed.into_iter().chain(constants::options()).collect()
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "a source text has a zero byte".to_string())
}

/// Does every job, on all cores; results in the order of the jobs.
pub fn on_all_cores<J: Sync, R: Send>(jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let next = AtomicUsize::new(0);
    let turn = || {
        let taken = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        taken.map_while(|at| Some((at, work(jobs.get(at)?)))).collect::<Vec<_>>()
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(turn)).collect();
        let joined =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        joined.flatten().collect()
    });
    results.sort_by_key(|&(at, _)| at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Whether the cache has the machine code of a file.
pub fn is_cached(nvrtc: &Nvrtc, source: &Source, architecture: Architecture) -> bool {
    let path = cache_path(nvrtc, source, architecture);
    path.and_then(|path| std::fs::metadata(path).ok()).is_some_and(|found| found.len() > 0)
}

/// The machine code of a file: from the cache or compiled now.
pub fn cubin(nvrtc: &Nvrtc, source: &Source, architecture: Architecture) -> Result<Vec<u8>, String> {
    let path = cache_path(nvrtc, source, architecture);
    if let Some(cubin) =
        path.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|cubin| !cubin.is_empty())
    {
        return Ok(cubin);
    }
    let Compiled { cubin, .. } = compile(nvrtc, source, architecture, false)?;
    if let Some(path) = path {
        // Written beside and renamed, so that nobody else reads half a file. Failure costs time next time.
        static WRITTEN: AtomicUsize = AtomicUsize::new(0);
        let nth = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_extension(format!("{}-{nth}.part", std::process::id()));
        let written = path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok())
            && std::fs::write(&beside, &cubin).is_ok();
        if !written || std::fs::rename(&beside, &path).is_err() {
            let _ = std::fs::remove_file(&beside);
        }
    }
    Ok(cubin)
}

/// Forgets a cached file, for one that the driver does not take.
pub fn forget(nvrtc: &Nvrtc, source: &Source, architecture: Architecture) {
    if let Some(path) = cache_path(nvrtc, source, architecture) {
        let _ = std::fs::remove_file(path);
    }
}

fn cache_path(nvrtc: &Nvrtc, source: &Source, architecture: Architecture) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both places are valid.
    unsafe { (nvrtc.version)(&mut major, &mut minor) };
    let mut hash = Hash::default();
    let parts = [source.text, &options(source, architecture).join(" "), &format!("{major}.{minor}")];
    for part in parts.into_iter().chain(HEADERS.iter().map(|(_, text)| *text)) {
        hash.add(part.as_bytes());
    }
    Some(folder.join("qurl").join("kernels").join(format!("{}-{:032x}.cubin", source.name, hash.0)))
}

/// FNV-1a in 128 bits: names cache files; nobody attacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(pub u128);

impl Default for Hash {
    fn default() -> Self {
        Hash(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Hash {
    /// Adds bytes and an end mark.
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        self.0 = (self.0 ^ bytes.len() as u128).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
}
