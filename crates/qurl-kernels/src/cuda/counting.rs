//! A GPU that is not there: what is allocated on it is counted, and nothing is computed.
//!
//! The real constructors and the real operations run on it over a driver of our own, which gives out
//! addresses that nobody uses, launches nothing and answers every question with bytes of all ones. So the
//! memory that a run will take is known without a second description of who allocates what.

use super::context::{Context, shared_of};
use super::device::Cuda;
use super::ffi::{DevicePtr, Driver, Handle, LaunchConfig, Status, TensorMap};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProfile {
    /// Its name.
    pub name: String,
    /// Its compute capability times ten: 90 for 9.0.
    pub architecture: u32,
    /// Its SMs.
    pub sms: usize,
    /// Bytes of shared memory that a block may have.
    pub shared: usize,
    /// Bytes of its memory.
    pub memory: usize,
}

/// Kinds that plans can be made for, with a short name each: compute capability, SMs, and the MiB that
/// `nvidia-smi` reports, which are fewer than the name says where the device keeps some for itself or for
/// error correction.
const KINDS: [(&str, &str, u32, usize, usize); 10] = [
    ("h200", "NVIDIA H200", 90, 132, 143_771),
    ("h100", "NVIDIA H100 80GB HBM3", 90, 132, 81_559),
    ("a100-80", "NVIDIA A100-SXM4-80GB", 80, 108, 81_920),
    ("a100-40", "NVIDIA A100-SXM4-40GB", 80, 108, 40_960),
    ("l40s", "NVIDIA L40S", 89, 142, 46_068),
    ("l4", "NVIDIA L4", 89, 58, 23_034),
    ("a10", "NVIDIA A10", 86, 72, 23_028),
    ("rtx3090", "NVIDIA GeForce RTX 3090", 86, 82, 24_576),
    ("rtx4090", "NVIDIA GeForce RTX 4090", 89, 128, 24_564),
    ("rtx5090", "NVIDIA GeForce RTX 5090", 120, 170, 32_607),
];

impl GpuProfile {
    /// Short names of the kinds that are known.
    pub fn names() -> [&'static str; KINDS.len()] {
        KINDS.map(|(short, ..)| short)
    }

    /// The kind with this short name, if it is known.
    pub fn named(name: &str) -> Option<GpuProfile> {
        KINDS.iter().find(|(short, ..)| *short == name).map(|&(_, name, architecture, sms, mib)| GpuProfile {
            name: name.to_string(),
            architecture,
            sms,
            shared: shared_of(architecture),
            memory: mib << 20,
        })
    }

    /// NVIDIA H200.
    pub fn h200() -> GpuProfile {
        GpuProfile::named(KINDS[0].0).unwrap_or_else(|| panic!("the first of all kinds has a name"))
    }
}

impl Cuda {
    /// A GPU on which nothing is computed: [`Device::memory`](crate::Device::memory) tells what was allocated
    /// on it. It holds more than its memory, so that a plan can say how much is missing.
    pub fn counting_as(gpu: &GpuProfile) -> Cuda {
        Cuda::of(Arc::new(Context::counting(driver(), gpu)))
    }

    /// What kind of GPU this is.
    pub fn profile(&self) -> GpuProfile {
        let Context { name, generation, sms, shared, .. } = &**self.context();
        let memory = self.context().memory_info().map_or(0, |(_, total)| total);
        GpuProfile { name: name.clone(), architecture: *generation, sms: *sms, shared: *shared, memory }
    }
}

/// Blocks of a kernel that run on an SM at the same time: as few as there are of the kernels that ask.
const BLOCKS_PER_SM: c_int = 2;
/// Bytes before page-locked memory, which hold its size.
const HEADER: usize = 64;

/// Its driver.
pub(super) fn driver() -> Driver {
    Driver {
        init,
        device_count,
        device_get,
        device_name,
        device_attribute,
        context_retain,
        context_release,
        context_set: one_handle,
        memory_info,
        alloc,
        free,
        host_alloc,
        host_free,
        copy_in,
        copy_out,
        copy,
        fill8,
        stream_create,
        stream_destroy: one_handle,
        stream_wait: one_handle,
        stream_wait_event,
        module_load,
        module_unload: one_handle,
        module_function,
        function_set,
        blocks_at_once,
        clusters_at_once,
        launch,
        tensor_map,
        capture_begin,
        capture_end,
        graph_instantiate,
        graph_launch: two_handles,
        graph_exec_destroy: one_handle,
        graph_destroy: one_handle,
        event_create: stream_create,
        event_record: two_handles,
        event_query: one_handle,
        event_wait: one_handle,
        event_destroy: one_handle,
        error_text,
        library: None,
    }
}

unsafe extern "C" fn init(_: c_uint) -> Status {
    0
}
unsafe extern "C" fn device_count(_: *mut c_int) -> Status {
    0
}
unsafe extern "C" fn device_get(_: *mut c_int, _: c_int) -> Status {
    0
}
unsafe extern "C" fn device_name(_: *mut c_char, _: c_int, _: c_int) -> Status {
    0
}
unsafe extern "C" fn device_attribute(_: *mut c_int, _: c_int, _: c_int) -> Status {
    0
}
unsafe extern "C" fn context_retain(_: *mut Handle, _: c_int) -> Status {
    0
}
unsafe extern "C" fn context_release(_: c_int) -> Status {
    0
}
unsafe extern "C" fn one_handle(_: Handle) -> Status {
    0
}
unsafe extern "C" fn two_handles(_: Handle, _: Handle) -> Status {
    0
}
unsafe extern "C" fn memory_info(_: *mut usize, _: *mut usize) -> Status {
    0
}

/// Addresses that nothing was ever at.
unsafe extern "C" fn alloc(at: *mut DevicePtr, bytes: usize) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
    let size = bytes.next_multiple_of(1 << 16) as u64;
    // SAFETY: the caller gives a valid place.
    unsafe { *at = NEXT.fetch_add(size, Ordering::Relaxed) };
    0
}
unsafe extern "C" fn free(_: DevicePtr) -> Status {
    0
}

/// The host writes what it would send, so this memory is real.
unsafe extern "C" fn host_alloc(at: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
    let Ok(layout) = Layout::from_size_align(bytes + HEADER, HEADER) else { return 1 };
    // SAFETY: the layout is not empty; the caller gives a valid place.
    unsafe {
        let memory = alloc_zeroed(layout);
        if memory.is_null() {
            return 1;
        }
        memory.cast::<usize>().write(layout.size());
        *at = memory.add(HEADER).cast();
    }
    0
}
unsafe extern "C" fn host_free(at: *mut c_void) -> Status {
    // SAFETY: given out by `host_alloc`, which wrote its size before it.
    unsafe {
        let memory = at.cast::<u8>().sub(HEADER);
        let size = memory.cast::<usize>().read();
        dealloc(memory, Layout::from_size_align_unchecked(size, HEADER));
    }
    0
}
unsafe extern "C" fn copy_in(_: DevicePtr, _: *const c_void, _: usize, _: Handle) -> Status {
    0
}

/// All ones: the mark of weights without a row that is not finite, and NaN of everything else.
unsafe extern "C" fn copy_out(to: *mut c_void, _: DevicePtr, bytes: usize, _: Handle) -> Status {
    // SAFETY: the caller gives a place of so many bytes.
    unsafe { std::ptr::write_bytes(to.cast::<u8>(), 0xff, bytes) };
    0
}
unsafe extern "C" fn copy(_: DevicePtr, _: DevicePtr, _: usize, _: Handle) -> Status {
    0
}
unsafe extern "C" fn fill8(_: DevicePtr, _: u8, _: usize, _: Handle) -> Status {
    0
}
unsafe extern "C" fn stream_create(_: *mut Handle, _: c_uint) -> Status {
    0
}
unsafe extern "C" fn stream_wait_event(_: Handle, _: Handle, _: c_uint) -> Status {
    0
}
unsafe extern "C" fn module_load(_: *mut Handle, _: *const c_void) -> Status {
    0
}
unsafe extern "C" fn module_function(_: *mut Handle, _: Handle, _: *const c_char) -> Status {
    0
}
unsafe extern "C" fn function_set(_: Handle, _: c_int, _: c_int) -> Status {
    0
}
unsafe extern "C" fn blocks_at_once(count: *mut c_int, _: Handle, _: c_int, _: usize) -> Status {
    // SAFETY: the caller gives a valid place.
    unsafe { *count = BLOCKS_PER_SM };
    0
}
unsafe extern "C" fn clusters_at_once(count: *mut c_int, _: Handle, _: *const LaunchConfig) -> Status {
    // SAFETY: the caller gives a valid place.
    unsafe { *count = BLOCKS_PER_SM };
    0
}
unsafe extern "C" fn launch(
    _: *const LaunchConfig,
    _: Handle,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    0
}
unsafe extern "C" fn tensor_map(
    _: *mut TensorMap,
    _: c_int,
    _: c_uint,
    _: DevicePtr,
    _: *const u64,
    _: *const u64,
    _: *const c_uint,
    _: *const c_uint,
    _: c_int,
    _: c_int,
    _: c_int,
    _: c_int,
) -> Status {
    0
}
unsafe extern "C" fn capture_begin(_: Handle, _: c_int) -> Status {
    0
}
unsafe extern "C" fn capture_end(_: Handle, _: *mut Handle) -> Status {
    0
}
unsafe extern "C" fn graph_instantiate(_: *mut Handle, _: Handle, _: u64) -> Status {
    0
}
unsafe extern "C" fn error_text(_: c_int, _: *mut *const c_char) -> Status {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::MemoryLimit;
    use crate::ops::{Linear, Output, Pack};
    use crate::types::{Format, Rounding, WeightShape};
    use crate::{Device, Queue};

    fn allocated(gpu: &Cuda) -> usize {
        gpu.memory().expect("its memory").allocated
    }

    #[test]
    fn allocations_are_counted_and_given_back() {
        let gpu = Arc::new(Cuda::counting_as(&GpuProfile::h200()));
        let mut queue = gpu.queue().expect("a queue");
        let fixed = allocated(&gpu);
        let x = gpu.zeros(1000 * 512).expect("a tensor");
        let mut out = gpu.zeros(1000 * 256).expect("a tensor");
        let shape = WeightShape { n: 256, k: 512, format: Format::Int8, trained: false };
        let mut w = gpu.weight(shape).expect("weights");
        let before = allocated(&gpu) - fixed;
        assert!(before >= 4 * 1000 * (512 + 256) + 256 * 512);
        let from = gpu.zeros(256 * 512).expect("a tensor");
        queue
            .pack(Pack { from: &from, rounding: Rounding::Nearest, copy: None, to: &mut w })
            .expect("packed");
        let (output, rows) = (Output::Store, 1000);
        queue.linear(Linear {
            adapter: None,
            x: &x,
            rows,
            norm: None,
            w: &w,
            bias: None,
            output,
            out: &mut out,
        });
        queue.synchronize().expect("nothing fails");
        // The rows in int8 are made in the workspace.
        let workspace = allocated(&gpu) - fixed - before - 4 * 256 * 512;
        assert!(workspace >= 1000 * 512, "{workspace}");
        let memory = gpu.memory().expect("its memory");
        assert_eq!((memory.total - memory.free, memory.peak), (allocated(&gpu), allocated(&gpu)));
        drop((x, out, w, from, queue));
        assert_eq!(allocated(&gpu), 0);
    }

    #[test]
    fn what_a_limit_does_not_leave_is_refused_by_the_name_of_what_set_it() {
        let gpu = Cuda::counting_as(&GpuProfile::h200());
        gpu.limit_memory(Some(MemoryLimit { bytes: 3 << 20, set_by: "the.key" }));
        let kept = gpu.zeros(2 << 18).expect("within the limit");
        let refused = gpu.zeros((1 << 18) + 1).err().map(|error| error.to_string()).expect("refused");
        assert!(refused.contains("2 of the 3 MiB that the.key leaves are taken"), "{refused}");
        assert_eq!(allocated(&gpu), 2 << 20, "what was refused is not counted");
        let rest = gpu.zeros(1 << 18).expect("all that the limit leaves");
        drop((kept, rest));
        // A plan is no run: what it counts has no limit.
        assert!(gpu.counting().zeros(1 << 20).is_ok() && gpu.zeros(1 << 20).is_err());
        gpu.limit_memory(None);
        assert!(gpu.zeros(1 << 20).is_ok());
    }

    #[test]
    fn kinds_of_gpus_are_found_by_their_short_names() {
        let kinds = GpuProfile::names().map(|name| GpuProfile::named(name).expect("a kind"));
        assert_eq!(kinds[0], GpuProfile::h200());
        assert_eq!(GpuProfile::named("h2000"), None);
        let found = GpuProfile::named("rtx4090").expect("a kind");
        assert_eq!((found.architecture, found.shared >> 10, found.memory >> 20), (89, 99, 24_564));
        // An H200 has more than the 141 GB of its name, and an RTX 4090 less than 24 GiB.
        assert!(kinds[0].memory > 141_000_000_000 && found.memory < 24 << 30);
    }
}
