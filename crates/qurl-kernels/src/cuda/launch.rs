//! What a device runs: kernels loaded from their files and launched, and matrices described to the TMA.

use super::compile::{self, SOURCES};
use super::context::{Context, error_text};
use super::ffi::{DevicePtr, Driver, Handle, LaunchAttribute, LaunchConfig, TensorMap};
use super::kernels::{Arguments, Kernel, KernelId, MAX_ARGUMENTS};
use super::queue::CudaQueue;
use crate::types::DeviceError;
use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The oldest architecture on which launches can overlap.
const OVERLAPS: u32 = 90;
const FUNCTION_DYNAMIC_SHARED: c_int = 8;
/// Descriptions of matrices that are kept.
const MAX_MAPS: usize = 1 << 12;
/// Dynamic shared memory that a block may have without asking: 48 KB with what it has anyway.
pub(super) const PLAIN_SHARED: u32 = 32 << 10;

/// What a matrix that the TMA reads or writes is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Byte,
    Bf16,
    F32,
}

impl Element {
    /// The driver's number of it, and its bytes.
    fn kind_and_size(self) -> (c_int, usize) {
        match self {
            Element::Byte => (0, 1),
            Element::Bf16 => (9, 2),
            Element::F32 => (7, 4),
        }
    }
}

/// The shape of a launch. An empty grid launches nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Launch {
    /// A grid of blocks.
    pub fn grid(grid: [usize; 3], threads: usize) -> Launch {
        Launch { grid, threads, shared: 0 }
    }

    /// A row of blocks.
    pub fn blocks(blocks: usize, threads: usize) -> Launch {
        Launch::grid([blocks, 1, 1], threads)
    }

    /// A thread for each element.
    pub fn elements(elements: usize) -> Launch {
        Launch::blocks(elements.div_ceil(256), 256)
    }

    /// With dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Launch {
        Launch { shared: bytes as u32, ..self }
    }
}

struct Function {
    handle: Handle,
    /// Dynamic shared memory that it may have.
    shared: AtomicU32,
}

/// What has been loaded and asked.
pub(super) struct Kernels {
    /// By [`KernelId`].
    functions: Box<[OnceLock<Function>]>,
    /// Held while a function is loaded or given more shared memory.
    modules: Mutex<HashMap<&'static str, Handle>>,
    /// Machine code that was compiled in this process and not loaded yet: there may be no cache.
    compiled: Mutex<HashMap<&'static str, Vec<u8>>>,
    /// Blocks that run at the same time: by kernel, threads and shared memory.
    at_once: Mutex<HashMap<(KernelId, usize, u32), usize>>,
}

impl Default for Kernels {
    fn default() -> Self {
        Kernels {
            functions: KernelId::ALL.iter().map(|_| OnceLock::new()).collect(),
            modules: Mutex::default(),
            compiled: Mutex::default(),
            at_once: Mutex::default(),
        }
    }
}

/// Matrices that have been described to the TMA: by address, height, width and box.
pub(super) type TensorMaps = HashMap<[u64; 6], TensorMap>;

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
        let Some(nvrtc) = &self.nvrtc else { return Ok(()) };
        let architecture = self.architecture;
        let missing: Vec<_> =
            SOURCES.iter().filter(|s| !compile::is_cached(nvrtc, s, architecture)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        say(missing.len());
        let cubins = compile::on_all_cores(&missing, |source| compile::cubin(nvrtc, source, architecture));
        let mut compiled = self.kernels.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        for (source, cubin) in missing.into_iter().zip(cubins) {
            let unavailable =
                |reason| DeviceError::Unavailable { device: format!("cuda:{}", self.ordinal), reason };
            compiled.insert(source.name, cubin.map_err(unavailable)?);
        }
        Ok(())
    }

    /// A kernel, with so much dynamic shared memory at least.
    fn function(&self, kernel: KernelId, shared: u32) -> Result<Handle, String> {
        if self.only_counts() {
            return match shared as usize <= self.shared {
                true => Ok(std::ptr::null_mut()),
                false => Err(format!("{shared} bytes of shared memory for {}: too many", kernel.name())),
            };
        }
        let place = &self.kernels.functions[kernel as usize];
        if let Some(function) = place.get().filter(|f| f.shared.load(Ordering::Acquire) >= shared) {
            return Ok(function.handle);
        }
        self.bind().map_err(|error| error.to_string())?;
        let mut modules = self.kernels.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match place.get() {
            Some(function) => function,
            None => {
                let (file, name) = (kernel.file(), kernel.name());
                let module = self.module(&mut modules, file)?;
                let symbol = CString::new(name).map_err(|e| e.to_string())?;
                let mut handle = std::ptr::null_mut();
                // SAFETY: the name ends with a zero; the module is loaded.
                let status = unsafe { (self.driver.module_function)(&mut handle, module, symbol.as_ptr()) };
                if status != 0 {
                    return Err(format!("kernel {name} of {file}.cu: {}", error_text(&self.driver, status)));
                }
                place.get_or_init(|| Function { handle, shared: AtomicU32::new(PLAIN_SHARED) })
            }
        };
        if function.shared.load(Ordering::Acquire) < shared {
            // SAFETY: the function is loaded; nobody else sets it, since the modules are locked.
            let status = unsafe {
                (self.driver.function_set)(function.handle, FUNCTION_DYNAMIC_SHARED, shared as c_int)
            };
            if status != 0 {
                let text = error_text(&self.driver, status);
                return Err(format!("{shared} bytes of shared memory for {}: {text}", kernel.name()));
            }
            function.shared.store(shared, Ordering::Release);
        }
        Ok(function.handle)
    }

    /// Blocks of a kernel that run on the whole device at the same time, in clusters of so many; none if it
    /// cannot be launched (a launch of it would say why).
    pub fn blocks_at_once(&self, kernel: KernelId, threads: usize, shared: u32, cluster: usize) -> usize {
        let mut known = self.kernels.at_once.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry((kernel, threads, shared)).or_insert_with(|| {
            let Ok(handle) = self.function(kernel, shared) else { return 0 };
            let attributes = [LaunchAttribute::cluster(cluster as u32)];
            let config = LaunchConfig {
                grid: [(cluster * self.sms) as u32, 1, 1],
                block: [threads as u32, 1, 1],
                shared,
                stream: std::ptr::null_mut(),
                attributes: attributes.as_ptr(),
                count: 1,
            };
            let mut count = 0;
            // SAFETY: the place is valid, the function is loaded, the configuration outlives the call.
            let status = unsafe {
                match cluster {
                    1 => (self.driver.blocks_at_once)(&mut count, handle, threads as c_int, shared as usize),
                    _ => (self.driver.clusters_at_once)(&mut count, handle, &config),
                }
            };
            let each = if cluster == 1 { self.sms } else { cluster };
            if status == 0 { count.unsigned_abs() as usize * each } else { 0 }
        })
    }

    fn module(
        &self,
        modules: &mut HashMap<&'static str, Handle>,
        file: &'static str,
    ) -> Result<Handle, String> {
        if let Some(&module) = modules.get(file) {
            return Ok(module);
        }
        let Some(source) = SOURCES.iter().find(|s| s.name == file) else {
            return Err(format!("there is no kernel file {file}.cu"));
        };
        let Some(nvrtc) = &self.nvrtc else { return Err("there is no compiler".to_string()) };
        let mut module = std::ptr::null_mut();
        let mut status = 0;
        // A cached file that the driver does not take is compiled anew.
        for _ in 0..2 {
            let compiled = self.kernels.compiled.lock().unwrap_or_else(PoisonError::into_inner).remove(file);
            let cubin = compiled.map_or_else(|| compile::cubin(nvrtc, source, self.architecture), Ok)?;
            // SAFETY: a compiled file, whose header has its length.
            status = unsafe { (self.driver.module_load)(&mut module, cubin.as_ptr().cast()) };
            if status == 0 {
                modules.insert(file, module);
                return Ok(module);
            }
            compile::forget(nvrtc, source, self.architecture);
        }
        Err(format!("loading {file}.cu: {}", error_text(&self.driver, status)))
    }
}

impl CudaQueue {
    /// Launches a kernel.
    pub(super) fn launch<A: Arguments>(&mut self, kernel: Kernel<A>, launch: Launch, args: A) {
        let Launch { grid, threads, shared } = launch;
        if grid.contains(&0) || self.has_failed() {
            return;
        }
        let function = match self.context.function(kernel.id, shared) {
            Ok(function) => function,
            Err(what) => return self.fail(what),
        };
        let mut pointers = [std::ptr::null_mut(); MAX_ARGUMENTS];
        args.pointers(&mut pointers);
        // GEMMs read weights before they wait for earlier kernels, which orders nothing after what wrote the
        // weights. So the kernel after a pack begins when all before it has ended, and those after it later
        // than that. What is recorded packs nothing, and as a whole begins after what was issued before.
        let ordered = self.recording.is_none() && std::mem::take(&mut self.packed);
        let overlaps = A::OVERLAPS && self.context.generation >= OVERLAPS && !ordered;
        let attributes = [LaunchAttribute::overlap()];
        let config = LaunchConfig {
            grid: grid.map(|n| n as u32),
            block: [threads as u32, 1, 1],
            shared,
            stream: self.stream,
            attributes: attributes.as_ptr(),
            count: u32::from(overlaps),
        };
        self.bind();
        // SAFETY: the arguments are those of the kernel, in its order; the driver copies them before it
        // returns. That addresses among them have what the kernel reads and writes is what every operation
        // asserts of its shapes.
        let status = unsafe {
            let launch = self.context.driver.launch;
            launch(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        if status != 0 {
            let text = error_text(&self.context.driver, status);
            self.fail(format!("launching {kernel:?} on {grid:?}: {text}"));
        }
    }

    /// Describes a row-major matrix of bytes to the TMA: boxes of `rows` by `bytes`, those of 128 bytes
    /// swizzled. Columns must be multiples of 16 bytes. Reads beyond the matrix give zeros.
    pub(super) fn tensor_map(
        &mut self,
        at: DevicePtr,
        height: usize,
        width: usize,
        rows: usize,
        bytes: usize,
    ) -> TensorMap {
        self.tensor_map_of(Element::Byte, at, height, width, rows, bytes)
    }

    /// The same of a matrix of other elements, which coordinates of boxes count. Sizes are in bytes. Stores
    /// beyond the matrix are left out.
    pub(super) fn tensor_map_of(
        &mut self,
        element: Element,
        at: DevicePtr,
        height: usize,
        width: usize,
        rows: usize,
        bytes: usize,
    ) -> TensorMap {
        const PLAIN: c_int = 0;
        const SWIZZLE_128: c_int = 3;
        const PROMOTE_256: c_int = 3;
        let (kind, size) = element.kind_and_size();
        let key = [at, height as u64, width as u64, rows as u64, bytes as u64, kind as u64];
        if let Some(map) = self.maps.get(&key) {
            return *map;
        }
        if self.maps.len() >= MAX_MAPS {
            self.maps.clear();
        }
        let mut map = TensorMap([0; 16]);
        let (sizes, strides) = ([(width / size) as u64, height as u64], [width as u64]);
        let (boxes, steps) = ([(bytes / size) as u32, rows as u32], [1, 1]);
        let swizzle = if bytes == 128 { SWIZZLE_128 } else { PLAIN };
        // SAFETY: all places are valid; the address is only stored.
        let status = unsafe {
            let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
            let (boxes, steps) = (boxes.as_ptr(), steps.as_ptr());
            let make = self.context.driver.tensor_map;
            make(&mut map, kind, 2, at, sizes, strides, boxes, steps, 0, swizzle, PROMOTE_256, 0)
        };
        self.check("describing a matrix", status);
        if status == 0 {
            self.maps.insert(key, map);
        }
        map
    }
}

#[cfg(test)]
mod tests {
    use super::super::counting::{self, GpuProfile};
    use super::super::device::Cuda;
    use super::*;
    use crate::ops::{Linear, Output, Pack};
    use crate::types::{Format, Rounding, WeightShape};
    use crate::{Device, Queue};
    use std::cell::RefCell;
    use std::ffi::c_void;
    use std::sync::Arc;

    thread_local! {
        /// How many attributes the launches had.
        static ATTRIBUTES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn launch(
        config: *const LaunchConfig,
        _: Handle,
        _: *mut *mut c_void,
        _: *mut *mut c_void,
    ) -> c_int {
        // SAFETY: the caller gives a configuration.
        ATTRIBUTES.with_borrow_mut(|counts| counts.push(unsafe { (*config).count }));
        0
    }

    /// Nothing that reads weights early runs beside what packs them.
    #[test]
    fn the_kernel_after_a_pack_waits_for_it() {
        let driver = Driver { launch, ..counting::driver() };
        let cuda = Arc::new(Cuda::of(Arc::new(Context::counting(driver, &GpuProfile::h200()))));
        let mut queue = cuda.queue().expect("a queue");
        let (n, k, format) = (128, 256, Format::Bf16);
        let mut w = cuda.weight(WeightShape { n, k, format, trained: false }).expect("weights");
        let [from, x] = [n * k, k].map(|len| cuda.zeros(len).expect("a tensor"));
        let mut out = cuda.zeros(n).expect("a tensor");
        let mut linear = |queue: &mut CudaQueue, w: &_| {
            ATTRIBUTES.take();
            let (rows, output, out) = (1, Output::Store, &mut out);
            queue.linear(Linear { adapter: None, x: &x, rows, norm: None, w, bias: None, output, out });
            ATTRIBUTES.take()
        };
        for packed in [true, false, true] {
            if packed {
                let (rounding, copy, to) = (Rounding::Nearest, None, &mut w);
                queue.pack(Pack { from: &from, rounding, copy, to }).expect("packed");
            }
            // The rows are rounded, then multiplied.
            assert_eq!(linear(&mut queue, &w), [u32::from(!packed), 1], "packed: {packed}");
        }
    }
}
