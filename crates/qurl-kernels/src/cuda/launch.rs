//! What a device runs: kernels found in their files, launched, and matrices described to the TMA.

use super::compile::{self, SOURCES};
use super::context::{Context, error_text};
use super::ffi::{DevicePtr, Driver, Handle, LaunchAttribute, LaunchConfig, TensorMap};
use super::queue::CudaQueue;
use crate::types::DeviceError;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

/// The oldest architecture on which launches can overlap.
const OVERLAPS: u32 = 90;
const FUNCTION_DYNAMIC_SHARED: c_int = 8;
/// Descriptions of matrices that are kept.
const MAX_MAPS: usize = 1 << 12;
/// Dynamic shared memory that a block may have without asking: 48 KB with what it has anyway.
pub(super) const PLAIN_SHARED: u32 = 32 << 10;

/// A kernel's argument.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A number of at most eight bytes.
    Word(u64),
    /// A matrix for the TMA, by value.
    Map(&'a TensorMap),
}

macro_rules! arg_from {
    ($($ty:ty => |$x:ident| $bits:expr;)*) => {
        $(impl From<$ty> for Arg<'_> {
            fn from($x: $ty) -> Self {
                Arg::Word($bits)
            }
        })*
    };
}

arg_from! {
    u64 => |x| x;
    u32 => |x| u64::from(x);
    i32 => |x| u64::from(x.cast_unsigned());
    f32 => |x| u64::from(x.to_bits());
    f64 => |x| x.to_bits();
    usize => |x| x as u64;
    bool => |x| u64::from(x);
}

impl<'a> From<&'a TensorMap> for Arg<'a> {
    fn from(map: &'a TensorMap) -> Self {
        Arg::Map(map)
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Whether it may begin before the kernel before it has ended; such a kernel waits by itself.
    pub overlap: bool,
}

/// The arguments of a launch: `args![pointer, rows as u32, eps]`.
macro_rules! args {
    ($($x:expr),* $(,)?) => { &[$($crate::cuda::launch::Arg::from($x)),*] };
}
pub(crate) use args;

/// Mixes addresses and sizes.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|&word| self.write_usize(u64::from_le_bytes(word) as usize));
        rest.iter().for_each(|&byte| self.write_usize(byte.into()));
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = (self.0.rotate_left(5) ^ address as u64).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Clone, Copy)]
struct Function {
    handle: Handle,
    /// Dynamic shared memory that it may have.
    shared: u32,
}

/// What has been loaded and asked.
#[derive(Default)]
pub(super) struct Kernels {
    functions: Mutex<HashMap<(usize, usize), Function, BuildHasherDefault<AddressHasher>>>,
    modules: Mutex<HashMap<&'static str, Handle>>,
    /// Machine code that was compiled in this process and not loaded yet: there may be no cache.
    compiled: Mutex<HashMap<&'static str, Vec<u8>>>,
    /// Blocks that run at the same time: by kernel, threads and shared memory.
    at_once: Mutex<HashMap<(usize, u32, u32), usize>>,
}

/// Matrices that have been described to the TMA: by address, height, width and box.
pub(super) type TensorMaps = HashMap<[u64; 5], TensorMap, BuildHasherDefault<AddressHasher>>;

impl Kernels {
    /// Unloads all files.
    ///
    /// # Safety
    /// Nothing uses a kernel any more, and the context is current.
    pub unsafe fn release(&self, driver: &Driver) {
        let modules = std::mem::take(&mut *self.modules.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: what the caller says.
        modules.values().for_each(|&module| unsafe {
            (driver.module_unload)(module);
        });
    }
}

impl Context {
    /// Compiles the files that the cache does not have, on all cores; `say` hears before how many those are.
    pub fn compile_kernels(&self, say: impl FnOnce(usize)) -> Result<(), DeviceError> {
        // Whoever opens the device at the same time waits, and finds the files in the cache.
        static COMPILING: Mutex<()> = Mutex::new(());
        let _compiling = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
        let (nvrtc, architecture) = (&self.nvrtc, self.architecture);
        let missing: Vec<_> =
            SOURCES.iter().filter(|s| !compile::is_cached(nvrtc, s, architecture)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        say(missing.len());
        let cubins = compile::on_all_cores(&missing, |source| compile::cubin(nvrtc, source, architecture));
        let mut compiled = self.kernels.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        for (source, cubin) in missing.into_iter().zip(cubins) {
            let unavailable = |reason| DeviceError::Unavailable { device: "cuda".to_string(), reason };
            compiled.insert(source.name, cubin.map_err(unavailable)?);
        }
        Ok(())
    }

    fn function(&self, file: &'static str, kernel: &'static str, shared: u32) -> Result<Function, String> {
        let mut functions = self.kernels.functions.lock().unwrap_or_else(PoisonError::into_inner);
        // Names are literals: their addresses are found faster than their texts. A literal that has several addresses
        // only means several entries.
        let key = (file.as_ptr() as usize, kernel.as_ptr() as usize);
        if let Some(&function) = functions.get(&key).filter(|f| f.shared >= shared) {
            return Ok(function);
        }
        self.bind().map_err(|error| error.to_string())?;
        let module = self.module(file)?;
        let name = CString::new(kernel).map_err(|e| e.to_string())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the name ends with a zero; the module is loaded.
        unsafe {
            let status = (self.driver.module_function)(&mut handle, module, name.as_ptr());
            if status != 0 {
                return Err(format!("kernel {kernel} of {file}.cu: {}", error_text(&self.driver, status)));
            }
            if shared > PLAIN_SHARED {
                let status = (self.driver.function_set)(handle, FUNCTION_DYNAMIC_SHARED, shared as c_int);
                if status != 0 {
                    let text = error_text(&self.driver, status);
                    return Err(format!("{shared} bytes of shared memory for {kernel}: {text}"));
                }
            }
        }
        let function = Function { handle, shared: shared.max(PLAIN_SHARED) };
        functions.insert(key, function);
        Ok(function)
    }

    /// Blocks of a kernel that run on the whole device at the same time, in clusters of so many; none if it cannot be
    /// launched (a launch of it would say why).
    pub fn blocks_at_once(
        &self,
        file: &'static str,
        kernel: &'static str,
        block: u32,
        shared: u32,
        cluster: u32,
    ) -> usize {
        let key = (kernel.as_ptr() as usize, block, shared);
        let mut known = self.kernels.at_once.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(key).or_insert_with(|| {
            let Ok(function) = self.function(file, kernel, shared) else { return 0 };
            let attributes = [LaunchAttribute::cluster(cluster)];
            let config = LaunchConfig {
                grid: [cluster * self.sms as u32, 1, 1],
                block: [block, 1, 1],
                shared,
                stream: std::ptr::null_mut(),
                attributes: attributes.as_ptr(),
                count: 1,
            };
            let (mut count, handle) = (0, function.handle);
            // SAFETY: the place is valid, the function is loaded, the configuration outlives the call.
            let status = unsafe {
                match cluster {
                    1 => (self.driver.blocks_at_once)(&mut count, handle, block as c_int, shared as usize),
                    _ => (self.driver.clusters_at_once)(&mut count, handle, &config),
                }
            };
            let each = if cluster == 1 { self.sms } else { cluster as usize };
            if status == 0 { count.unsigned_abs() as usize * each } else { 0 }
        })
    }

    fn module(&self, file: &'static str) -> Result<Handle, String> {
        let mut modules = self.kernels.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&module) = modules.get(file) {
            return Ok(module);
        }
        let Some(source) = SOURCES.iter().find(|s| s.name == file) else {
            return Err(format!("there is no kernel file {file}.cu"));
        };
        let mut module = std::ptr::null_mut();
        let mut status = 0;
        // A cached file that the driver does not take is compiled anew.
        for _ in 0..2 {
            let compiled = self.kernels.compiled.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
            let cubin =
                compiled.map_or_else(|| compile::cubin(&self.nvrtc, source, self.architecture), Ok)?;
            // SAFETY: a compiled file, whose header has its length.
            status = unsafe { (self.driver.module_load)(&mut module, cubin.as_ptr().cast()) };
            if status == 0 {
                modules.insert(file, module);
                return Ok(module);
            }
            compile::forget(&self.nvrtc, source, self.architecture);
        }
        Err(format!("loading {file}.cu: {}", error_text(&self.driver, status)))
    }
}

impl CudaQueue {
    /// Launches a kernel of a file. An empty grid launches nothing.
    pub(super) fn launch(
        &mut self,
        file: &'static str,
        kernel: &'static str,
        grid: [usize; 3],
        block: u32,
        shared: u32,
        args: &[Arg],
    ) {
        self.launch_as(file, kernel, Launch { grid, block, shared, overlap: false }, args);
    }

    /// [`CudaQueue::launch`] of a kernel that begins with `wait_for_previous`: its launching overlaps with what is before
    /// it.
    pub(super) fn launch_next(
        &mut self,
        file: &'static str,
        kernel: &'static str,
        grid: [usize; 3],
        block: u32,
        shared: u32,
        args: &[Arg],
    ) {
        self.launch_as(file, kernel, Launch { grid, block, shared, overlap: true }, args);
    }

    /// [`CudaQueue::launch`] with a choice of overlap.
    pub(super) fn launch_as(
        &mut self,
        file: &'static str,
        kernel: &'static str,
        launch: Launch,
        args: &[Arg],
    ) {
        let Launch { grid, block, shared, overlap } = launch;
        if grid.contains(&0) {
            return;
        }
        let function = match self.context.function(file, kernel, shared) {
            Ok(function) => function,
            Err(what) => return self.fail(what),
        };
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        assert!(args.len() <= pointers.len(), "{kernel}: {} arguments", args.len());
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = match arg {
                Arg::Word(word) => (&raw const *word).cast_mut().cast(),
                Arg::Map(map) => (&raw const **map).cast_mut().cast(),
            };
        }
        let attributes = [LaunchAttribute::overlap()];
        let count = u32::from(overlap && self.context.generation >= OVERLAPS);
        let config = LaunchConfig {
            grid: grid.map(|n| n as u32),
            block: [block, 1, 1],
            shared,
            stream: self.stream,
            attributes: attributes.as_ptr(),
            count,
        };
        self.bind();
        // SAFETY: the arguments are those of the kernel, in its order; the driver copies them before it returns.
        let status = unsafe {
            let launch = self.context.driver.launch;
            launch(&config, function.handle, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        if status != 0 {
            let text = error_text(&self.context.driver, status);
            self.fail(format!("launching {kernel} on {grid:?}: {text}"));
        }
    }

    /// Describes a row-major matrix of bytes to the TMA: boxes of `rows` by `bytes`, those of 128 bytes swizzled. Columns
    /// must be multiples of 16 bytes. Reads beyond the matrix give zeros.
    pub(super) fn tensor_map(
        &mut self,
        at: DevicePtr,
        height: usize,
        width: usize,
        rows: u32,
        bytes: u32,
    ) -> TensorMap {
        const BYTES: c_int = 0;
        const PLAIN: c_int = 0;
        const SWIZZLE_128: c_int = 3;
        const PROMOTE_256: c_int = 3;
        let key = [at, height as u64, width as u64, rows.into(), bytes.into()];
        if let Some(map) = self.maps.get(&key) {
            return *map;
        }
        if self.maps.len() >= MAX_MAPS {
            self.maps.clear();
        }
        let mut map = TensorMap([0; 16]);
        let (sizes, strides) = ([width as u64, height as u64], [width as u64]);
        let (boxes, steps) = ([bytes, rows], [1, 1]);
        let swizzle = if bytes == 128 { SWIZZLE_128 } else { PLAIN };
        // SAFETY: all places are valid; the address is only stored.
        let status = unsafe {
            let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
            let (boxes, steps) = (boxes.as_ptr(), steps.as_ptr());
            let make = self.context.driver.tensor_map;
            make(&mut map, BYTES, 2, at, sizes, strides, boxes, steps, 0, swizzle, PROMOTE_256, 0)
        };
        self.check("describing a matrix", status);
        if status == 0 {
            self.maps.insert(key, map);
        }
        map
    }
}
