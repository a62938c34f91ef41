//! What a device runs: kernels found in their files, launched, and matrices described to the copy engine.
//!
//! In the dry mode of [`super::replay`] launches, copies and clearings are only added to a hash.

use super::compile::{self, SOURCES};
use super::ffi::{DevicePtr, Driver, Handle, LaunchAttribute, LaunchConfig, TensorMap};
use super::gpu::{Gpu, Mode, error_text};
use crate::DeviceError;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

/// The oldest architecture on which launches can overlap.
const OVERLAPS: u32 = 90;
const FUNCTION_DYNAMIC_SHARED: c_int = 8;
/// Descriptions of matrices that are kept.
const MOST_MAPS: usize = 1 << 12;
/// Dynamic shared memory that a block may have without asking: 48 KB with what it has anyway.
pub(super) const PLAIN_SHARED: u32 = 32 << 10;

/// A kernel's argument.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A number of at most eight bytes.
    Word(u64),
    /// A matrix for the copy engine, by value.
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
    /// Whether it may begin before the kernel in front of it has ended; such a kernel waits by itself.
    pub overlap: bool,
}

/// The arguments of a launch: `args![pointer, rows as u32, eps]`.
macro_rules! args {
    ($($x:expr),* $(,)?) => { &[$($crate::cuda::launch::Arg::from($x)),*] };
}
pub(crate) use args;

/// Mixes addresses and sizes.
#[derive(Default)]
struct AddressHasher(u64);

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
    /// Matrices that have been described to the copy engine.
    maps: Mutex<HashMap<[u64; 5], TensorMap, BuildHasherDefault<AddressHasher>>>,
}

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

impl Gpu {
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

    /// Launches a kernel of a file. An empty grid launches nothing.
    pub(super) fn launch(
        &self,
        file: &'static str,
        kernel: &'static str,
        grid: [usize; 3],
        block: u32,
        shared: u32,
        args: &[Arg],
    ) {
        self.launch_as(file, kernel, Launch { grid, block, shared, overlap: false }, args);
    }

    /// [`Gpu::launch`] of a kernel that begins with `wait_for_previous`: its launching overlaps with what is in front.
    pub(super) fn launch_next(
        &self,
        file: &'static str,
        kernel: &'static str,
        grid: [usize; 3],
        block: u32,
        shared: u32,
        args: &[Arg],
    ) {
        self.launch_as(file, kernel, Launch { grid, block, shared, overlap: true }, args);
    }

    /// [`Gpu::launch`] with a choice of overlap.
    pub(super) fn launch_as(&self, file: &'static str, kernel: &'static str, launch: Launch, args: &[Arg]) {
        let Launch { grid, block, shared, overlap } = launch;
        if grid.contains(&0) {
            return;
        }
        let function = match self.function(file, kernel, shared) {
            Ok(function) => function,
            Err(what) => return self.fail(what),
        };
        if self.hash_launch(function, launch, args) {
            return;
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        assert!(args.len() <= pointers.len(), "{kernel}: {} arguments", args.len());
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = match arg {
                Arg::Word(word) => (&raw const *word).cast_mut().cast(),
                Arg::Map(map) => (&raw const **map).cast_mut().cast(),
            };
        }
        let attributes = [LaunchAttribute::overlap()];
        let count = u32::from(overlap && self.generation >= OVERLAPS);
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
            (self.driver.launch)(&config, function.handle, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        if status != 0 {
            self.fail(format!("launching {kernel} on {grid:?}: {}", error_text(&self.driver, status)));
        }
    }

    /// In dry mode adds a launch to the hash; whether that was all.
    fn hash_launch(&self, function: Function, launch: Launch, args: &[Arg]) -> bool {
        let mut state = self.lock_state();
        if state.mode != Mode::Dry {
            return false;
        }
        let Launch { grid: [x, y, z], block, shared, overlap } = launch;
        let shape = [x as u64, y as u64, z as u64, block.into(), shared.into(), overlap.into()];
        state.hash.word(function.handle as u64);
        shape.into_iter().for_each(|word| state.hash.word(word));
        for arg in args {
            match arg {
                Arg::Word(word) => state.hash.word(*word),
                Arg::Map(map) => map.0.iter().for_each(|&word| state.hash.word(word)),
            }
        }
        true
    }

    /// Describes a row-major matrix of bytes to the copy engine: boxes of `rows` by `bytes`, those of 128 bytes swizzled.
    /// Columns must be multiples of 16 bytes. Reads beyond the matrix give zeros.
    pub(super) fn tensor_map(
        &self,
        at: DevicePtr,
        height: usize,
        width: usize,
        rows: u32,
        bytes: u32,
    ) -> TensorMap {
        let key = [at, height as u64, width as u64, rows.into(), bytes.into()];
        let mut maps = self.kernels.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(&key) {
            return *map;
        }
        if maps.len() >= MOST_MAPS {
            maps.clear();
        }
        let mut map = TensorMap([0; 16]);
        let (sizes, strides) = ([width as u64, height as u64], [width as u64]);
        let (boxes, steps) = ([bytes, rows], [1, 1]);
        const BYTES: c_int = 0;
        const PLAIN: c_int = 0;
        const SWIZZLE_128: c_int = 3;
        const PROMOTE_256: c_int = 3;
        let swizzle = if bytes == 128 { SWIZZLE_128 } else { PLAIN };
        // SAFETY: all places are valid; the address is only stored.
        let status = unsafe {
            let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
            let (boxes, steps) = (boxes.as_ptr(), steps.as_ptr());
            let make = self.driver.tensor_map;
            make(&mut map, BYTES, 2, at, sizes, strides, boxes, steps, 0, swizzle, PROMOTE_256, 0)
        };
        self.check("describing a matrix", status);
        if status == 0 {
            maps.insert(key, map);
        }
        map
    }

    /// A copy inside the device's memory.
    pub(super) fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) {
        if bytes == 0 || self.hashed(&[1, from, to, bytes as u64]) {
            return;
        }
        self.bind();
        // SAFETY: the caller gives addresses of at least so many bytes.
        let status = unsafe { (self.driver.copy)(to, from, bytes, self.stream) };
        self.check("copying", status);
    }

    /// Sets bytes.
    pub(super) fn fill(&self, to: DevicePtr, byte: u8, bytes: usize) {
        if bytes == 0 || self.hashed(&[2, to, u64::from(byte), bytes as u64]) {
            return;
        }
        self.bind();
        // SAFETY: the caller gives an address of at least so many bytes.
        let status = unsafe { (self.driver.fill8)(to, byte, bytes, self.stream) };
        self.check("clearing", status);
    }

    /// In dry mode adds the numbers to the hash; whether that was all.
    pub(super) fn hashed(&self, words: &[u64]) -> bool {
        let mut state = self.lock_state();
        if state.mode == Mode::Dry {
            words.iter().for_each(|&word| state.hash.word(word));
        }
        state.mode == Mode::Dry
    }

    fn function(&self, file: &'static str, kernel: &'static str, shared: u32) -> Result<Function, String> {
        let mut functions = self.kernels.functions.lock().unwrap_or_else(PoisonError::into_inner);
        // Names are literals: their addresses are found faster than their texts. A literal that has several addresses
        // only means several entries.
        let key = (file.as_ptr() as usize, kernel.as_ptr() as usize);
        if let Some(&function) = functions.get(&key).filter(|f| f.shared >= shared) {
            return Ok(function);
        }
        self.bind();
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
    /// launched.
    pub(super) fn blocks_at_once(
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
            let function = match self.function(file, kernel, shared) {
                Ok(function) => function,
                Err(what) => {
                    self.fail(what);
                    return 0;
                }
            };
            let attributes = [LaunchAttribute::cluster(cluster)];
            let config = LaunchConfig {
                grid: [cluster * self.multiprocessors, 1, 1],
                block: [block, 1, 1],
                shared,
                stream: self.stream,
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
            self.check("asking how many blocks run at once", status);
            let each = if cluster == 1 { self.multiprocessors } else { cluster };
            (count.unsigned_abs() * each) as usize
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
