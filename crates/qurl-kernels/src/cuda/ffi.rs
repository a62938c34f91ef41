//! The few functions of the CUDA driver and of NVRTC that are used, found at run time.
//!
//! Tables of function pointers over `dlopen`: nothing of CUDA is needed where the binary is built, a missing
//! library is an ordinary error, and any major version from CUDA 12 on will do. Handles are opaque pointers,
//! device addresses plain numbers.

use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// An address in device memory.
pub type DevicePtr = u64;
/// An opaque handle of the driver: context, stream, module, function, graph, event.
pub type Handle = *mut c_void;
/// What driver functions return; 0 is success.
pub type Status = c_int;

/// Declares a table of functions of one library.
macro_rules! table {
    ($(#[$meta:meta])* $name:ident { $($function:ident as $symbol:literal ($($arg:ty),*);)* }) => {
        $(#[$meta])*
        pub struct $name {
            $(#[doc = concat!("`", $symbol, "`")] pub $function: unsafe extern "C" fn($($arg),*) -> Status,)*
            /// Where the functions are; none where they are our own.
            pub library: Option<Library>,
        }

        impl $name {
            fn load(library: Library) -> Result<Self, String> {
                // SAFETY: the signatures are those of the library's documentation; the library lives in the
                // table.
                unsafe {
                    $(let $function = *library
                        .get::<unsafe extern "C" fn($($arg),*) -> Status>(concat!($symbol, "\0").as_bytes())
                        .map_err(|e| e.to_string())?;)*
                    Ok($name { $($function,)* library: Some(library) })
                }
            }
        }
    };
}

table! {
    /// The driver, `libcuda`.
    Driver {
        init as "cuInit" (c_uint);
        device_count as "cuDeviceGetCount" (*mut c_int);
        device_get as "cuDeviceGet" (*mut c_int, c_int);
        device_name as "cuDeviceGetName" (*mut c_char, c_int, c_int);
        device_attribute as "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        context_retain as "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        context_release as "cuDevicePrimaryCtxRelease_v2" (c_int);
        context_set as "cuCtxSetCurrent" (Handle);
        memory_info as "cuMemGetInfo_v2" (*mut usize, *mut usize);
        alloc as "cuMemAlloc_v2" (*mut DevicePtr, usize);
        free as "cuMemFree_v2" (DevicePtr);
        host_alloc as "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_free as "cuMemFreeHost" (*mut c_void);
        copy_in as "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Handle);
        copy_out as "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Handle);
        copy as "cuMemcpyDtoDAsync_v2" (DevicePtr, DevicePtr, usize, Handle);
        fill8 as "cuMemsetD8Async" (DevicePtr, u8, usize, Handle);
        stream_create as "cuStreamCreate" (*mut Handle, c_uint);
        stream_destroy as "cuStreamDestroy_v2" (Handle);
        stream_wait as "cuStreamSynchronize" (Handle);
        stream_wait_event as "cuStreamWaitEvent" (Handle, Handle, c_uint);
        module_load as "cuModuleLoadData" (*mut Handle, *const c_void);
        module_unload as "cuModuleUnload" (Handle);
        module_function as "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        function_set as "cuFuncSetAttribute" (Handle, c_int, c_int);
        blocks_at_once as "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, Handle, c_int, usize);
        clusters_at_once as "cuOccupancyMaxActiveClusters" (*mut c_int, Handle, *const LaunchConfig);
        launch as "cuLaunchKernelEx" (*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
        tensor_map as "cuTensorMapEncodeTiled" (
            *mut TensorMap, c_int, c_uint, DevicePtr, *const u64, *const u64, *const c_uint, *const c_uint,
            c_int, c_int, c_int, c_int
        );
        capture_begin as "cuStreamBeginCapture_v2" (Handle, c_int);
        capture_end as "cuStreamEndCapture" (Handle, *mut Handle);
        graph_instantiate as "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
        graph_launch as "cuGraphLaunch" (Handle, Handle);
        graph_exec_destroy as "cuGraphExecDestroy" (Handle);
        graph_destroy as "cuGraphDestroy" (Handle);
        event_create as "cuEventCreate" (*mut Handle, c_uint);
        event_record as "cuEventRecord" (Handle, Handle);
        event_query as "cuEventQuery" (Handle);
        event_wait as "cuEventSynchronize" (Handle);
        event_destroy as "cuEventDestroy_v2" (Handle);
        error_text as "cuGetErrorString" (c_int, *mut *const c_char);
    }
}

table! {
    /// The run-time compiler, `libnvrtc`.
    Nvrtc {
        version as "nvrtcVersion" (*mut c_int, *mut c_int);
        create as "nvrtcCreateProgram" (
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        compile as "nvrtcCompileProgram" (Handle, c_int, *const *const c_char);
        log_size as "nvrtcGetProgramLogSize" (Handle, *mut usize);
        log as "nvrtcGetProgramLog" (Handle, *mut c_char);
        cubin_size as "nvrtcGetCUBINSize" (Handle, *mut usize);
        cubin as "nvrtcGetCUBIN" (Handle, *mut c_char);
        destroy as "nvrtcDestroyProgram" (*mut Handle);
    }
}

table! {
    /// The library of large GEMMs, `libcublasLt`.
    CublasLt {
        create as "cublasLtCreate" (*mut Handle);
        destroy as "cublasLtDestroy" (Handle);
        desc_create as "cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int);
        desc_destroy as "cublasLtMatmulDescDestroy" (Handle);
        desc_set as "cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize);
        layout_create as "cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64);
        layout_destroy as "cublasLtMatrixLayoutDestroy" (Handle);
        preference_create as "cublasLtMatmulPreferenceCreate" (*mut Handle);
        preference_destroy as "cublasLtMatmulPreferenceDestroy" (Handle);
        preference_set as "cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize);
        heuristic as "cublasLtMatmulAlgoGetHeuristic" (
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut LtHeuristic, *mut c_int
        );
        matmul as "cublasLtMatmul" (
            Handle, Handle, *const c_void, DevicePtr, Handle, DevicePtr, Handle, *const c_void, DevicePtr,
            Handle, DevicePtr, Handle, *const LtAlgorithm, DevicePtr, usize, Handle
        );
    }
}

/// `CUlaunchConfig`
#[repr(C)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
    /// Bytes of dynamic shared memory.
    pub shared: c_uint,
    /// Where it runs.
    pub stream: Handle,
    /// First of the attributes.
    pub attributes: *const LaunchAttribute,
    /// Number of attributes.
    pub count: c_uint,
}

/// `CUlaunchAttribute`
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    /// What it says.
    pub id: c_int,
    /// Its value, after padding.
    pub value: [u32; 17],
}

impl LaunchAttribute {
    /// May begin before the kernel before it has ended; it waits by itself.
    pub fn overlap() -> Self {
        let mut value = [0; 17];
        value[1] = 1;
        LaunchAttribute { id: 6, value }
    }

    /// So many neighbouring blocks are a cluster.
    pub fn cluster(blocks: u32) -> Self {
        let mut value = [0; 17];
        value[1..4].copy_from_slice(&[blocks, 1, 1]);
        LaunchAttribute { id: 4, value }
    }
}

/// `CUtensorMap`: how the TMA sees a matrix.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(pub [u64; 16]);

/// `cublasLtMatmulAlgo_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LtAlgorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LtHeuristic {
    /// The algorithm.
    pub algorithm: LtAlgorithm,
    /// Workspace it needs.
    pub workspace: usize,
    /// 0 if it can be used.
    pub state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl LtHeuristic {
    /// A place for an answer.
    pub const EMPTY: LtHeuristic = LtHeuristic {
        algorithm: LtAlgorithm { data: [0; 8] },
        workspace: 0,
        state: 0,
        waves: 0.0,
        reserved: [0; 4],
    };
}

/// The variable that names the driver's file.
const DRIVER_FILE: &str = "QURL_CUDA";
/// The oldest driver that will do, as drivers tell it: of CUDA 12.0.
const OLDEST_DRIVER: c_int = 12_000;

/// The driver library, if the machine has one that is new enough, with the CUDA version that it is made for.
pub fn driver() -> Result<(Driver, (u32, u32)), String> {
    let library = driver_library()?;
    let mut version = 0;
    // SAFETY: the signature is that of the documentation, the place is valid; it may be asked before anything
    // else.
    unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> Status>(b"cuDriverGetVersion\0");
        (ask.map_err(|e| e.to_string())?)(&mut version);
    }
    let (major, minor) = (version.unsigned_abs() / 1000, version.unsigned_abs() % 1000 / 10);
    if version < OLDEST_DRIVER {
        return Err(format!(
            "the driver is too old: it is made for CUDA {major}.{minor}, expected 12.0 or newer"
        ));
    }
    Ok((Driver::load(library)?, (major, minor)))
}

/// Whether the machine has a driver, usable or not, or is said to have one.
pub fn has_driver() -> bool {
    std::env::var(DRIVER_FILE).is_ok_and(|path| !path.is_empty()) || driver_library().is_ok()
}

fn driver_library() -> Result<Library, String> {
    open("the CUDA driver", DRIVER_FILE, &["libcuda.so.1", "libcuda.so"])
}

/// The run-time compiler, if the machine has one.
pub fn nvrtc() -> Result<Nvrtc, String> {
    let names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"];
    open("NVRTC, the CUDA run-time compiler", "QURL_NVRTC", &names).and_then(Nvrtc::load)
}

/// The run-time compiler in a given file.
pub fn nvrtc_at(path: &str) -> Result<Nvrtc, String> {
    // SAFETY: NVIDIA's libraries may be loaded and unloaded at any time.
    unsafe { Library::new(path) }.map_err(|e| format!("{path}: {e}")).and_then(Nvrtc::load)
}

/// cuBLASLt, if the machine has it.
pub fn cublas_lt() -> Result<CublasLt, String> {
    let names = ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"];
    open("cuBLASLt", "QURL_CUBLASLT", &names).and_then(CublasLt::load)
}

/// Opens the file that the variable names, or the first library found under the names: where the loader
/// looks, then in the toolkit's usual folders.
fn open(what: &str, variable: &str, names: &[&str]) -> Result<Library, String> {
    // SAFETY: NVIDIA's libraries may be loaded and unloaded at any time.
    let load = |path: &str| unsafe { Library::new(path) };
    if let Some(path) = std::env::var(variable).ok().filter(|path| !path.is_empty()) {
        return load(&path).map_err(|e| format!("{variable}={path}: {e}"));
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| std::env::var(name).ok());
    let folders: Vec<String> =
        homes.chain(["/usr/local/cuda".to_string()]).map(|home| format!("{home}/lib64")).collect();
    let paths = folders.iter().flat_map(|folder| names.iter().map(move |name| format!("{folder}/{name}")));
    let mut first_error = None;
    for path in names.iter().map(|name| name.to_string()).chain(paths) {
        match load(&path) {
            Ok(library) => return Ok(library),
            Err(e) => first_error = first_error.or(Some(e.to_string())),
        }
    }
    let reason = first_error.unwrap_or_default();
    Err(format!("{what} was not found ({reason}); {variable} may name the library's file"))
}
