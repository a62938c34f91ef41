//! Memory of the CPU backend: cache-line aligned arrays, and a store of scratch arrays that are used again.
//!
//! Large arrays (weights, keys and values) are mapped on their own and ask for huge pages: streaming them
//! walks the page tables five hundred times less often, and filling them takes that many fewer page faults.
//! They begin at a huge page. Packed weights, of which a decode step reads every byte, share mappings of
//! their own ([`Arena`](super::arena)).

use crate::types::DeviceError;
use memmap2::{Advice, MmapMut};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

const ALIGN: usize = 64;
/// The size of a huge page; from this size on an array is mapped on its own.
const HUGE: usize = 2 << 20;

/// From so many huge pages on an array has no others: at most an eighth of its memory is wasted.
const MANY: usize = 8;

/// Numbers that may fill an [`Aligned`] array: any bit pattern is a value and all zero bits are zero.
pub trait Number: Copy + Send + Sync + 'static {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u16 {}
impl Number for i8 {}
impl Number for u8 {}
impl Number for i32 {}

/// A fixed-size array aligned to a cache line, zero at first.
pub struct Aligned<T: Number> {
    data: *mut T,
    len: usize,
    /// Owns the memory of a mapped array; that of others comes from the allocator.
    map: Option<Arc<MmapMut>>,
}

// SAFETY: owns its memory like a Vec.
unsafe impl<T: Number> Send for Aligned<T> {}
// SAFETY: shared access is read-only, as for a Vec.
unsafe impl<T: Number> Sync for Aligned<T> {}

/// The system does not give the memory for something.
pub(super) fn out_of_memory(need: usize, what: &str) -> DeviceError {
    DeviceError::OutOfMemory { device: "cpu".to_string(), need, what: what.to_string() }
}

impl<T: Number> Aligned<T> {
    fn layout(len: usize) -> Layout {
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        // No system has as much: the allocation fails.
        let bytes = bytes.min(isize::MAX as usize & !(ALIGN - 1));
        Layout::from_size_align(bytes, ALIGN)
            .unwrap_or_else(|_| panic!("array of {len} numbers is too large"))
    }

    /// An array of `len` zeros; without the memory for it the program ends.
    pub fn zeros(len: usize) -> Self {
        Self::try_zeros(len).unwrap_or_else(|| handle_alloc_error(Self::layout(len)))
    }

    /// An array of `len` zeros, if the system gives the memory for it.
    pub fn try_zeros(len: usize) -> Option<Self> {
        let layout = Self::layout(len);
        if layout.size() >= HUGE {
            let (map, data) = map_huge(layout.size())?;
            return Some(Aligned { data: data.cast(), len, map: Some(map) });
        }
        // SAFETY: the layout is not empty.
        let data = unsafe { alloc_zeroed(layout) }.cast::<T>();
        (!data.is_null()).then_some(Aligned { data, len, map: None })
    }

    /// An array of `len` zeros in a part of a mapping.
    ///
    /// # Safety
    /// `data` is aligned to a cache line and lies in the mapping with all `len` numbers, which are zero and
    /// nobody else's.
    pub(super) unsafe fn in_mapping(data: *mut T, len: usize, map: Arc<MmapMut>) -> Self {
        Aligned { data, len, map: Some(map) }
    }

    /// A copy of the values.
    pub fn from_slice(values: &[T]) -> Self {
        let mut array = Self::zeros(values.len());
        array.copy_from_slice(values);
        array
    }
}

/// Maps at least `bytes` zeros from a huge page on. The last page is huge, too, if the array fills half of it
/// or has many: small pages may come from anywhere, and on a virtual machine each of them can cost as much as
/// a huge one.
pub(super) fn map_huge(bytes: usize) -> Option<(Arc<MmapMut>, *mut u8)> {
    // One page more, so that the array can begin at one; what is never touched takes no memory.
    let mut map = MmapMut::map_anon(bytes.checked_next_multiple_of(HUGE)?.checked_add(HUGE)?).ok()?;
    let lead = map.as_ptr().align_offset(HUGE);
    #[cfg(target_os = "linux")]
    {
        let huge =
            if bytes < MANY * HUGE { (bytes + HUGE / 2) / HUGE * HUGE } else { bytes.next_multiple_of(HUGE) };
        let _ = map.advise_range(Advice::HugePage, lead, huge); // a wish: small pages serve, too
    }
    let data = map[lead..].as_mut_ptr();
    Some((Arc::new(map), data))
}

impl<T: Number> Drop for Aligned<T> {
    fn drop(&mut self) {
        if self.map.is_none() {
            // SAFETY: allocated in `try_zeros` with the same layout.
            unsafe { dealloc(self.data.cast(), Self::layout(self.len)) }
        }
    }
}

impl<T: Number> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised values are owned by self.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

impl<T: Number> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }
}

impl<T: Number> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        Self::from_slice(self)
    }
}

impl<T: Number + std::fmt::Debug> std::fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Aligned({} values)", self.len)
    }
}

/// Arrays for the inside of one kernel call, kept for the next call: fresh memory would cost a page fault per
/// page.
#[derive(Default)]
pub struct Scratch {
    free: Mutex<Vec<Aligned<u32>>>,
}

impl Scratch {
    /// An array of at least `len` words; its content is whatever was left there.
    pub fn take(&self, len: usize) -> Borrowed<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fit =
            free.iter().enumerate().filter(|(_, a)| a.len >= len).min_by_key(|(_, a)| a.len).map(|(i, _)| i);
        let array = match fit {
            Some(i) => free.swap_remove(i),
            None => {
                // The largest array is too small: let it go, so that growing requests do not pile up memory.
                if let Some(i) = free.iter().enumerate().max_by_key(|(_, a)| a.len).map(|(i, _)| i) {
                    free.swap_remove(i);
                }
                drop(free);
                Aligned::zeros(len)
            }
        };
        Borrowed { store: self, array: Some(array), len }
    }
}

/// A scratch array, given back when dropped.
pub struct Borrowed<'a> {
    store: &'a Scratch,
    array: Option<Aligned<u32>>,
    len: usize,
}

impl Borrowed<'_> {
    /// The same memory as floats.
    pub fn floats(&mut self) -> &mut [f32] {
        let words: &mut [u32] = self;
        // SAFETY: both types have the same size and alignment, and every pattern of bits is a float.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
    }
}

impl Deref for Borrowed<'_> {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        self.array.as_ref().map_or(&[], |a| &a[..self.len])
    }
}

impl DerefMut for Borrowed<'_> {
    fn deref_mut(&mut self) -> &mut [u32] {
        let len = self.len;
        self.array.as_mut().map_or(&mut [], |a| &mut a[..len])
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if let Some(array) = self.array.take() {
            self.store.free.lock().unwrap_or_else(PoisonError::into_inner).push(array);
        }
    }
}

/// A pointer that tasks of one parallel region share, each writing its own part.
pub(crate) struct Parts<T>(*mut T);

impl<T> Clone for Parts<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Parts<T> {}

// SAFETY: users promise in `Parts::new` callers' code that tasks touch disjoint parts.
unsafe impl<T> Send for Parts<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Parts<T> {}

impl<T> Parts<T> {
    /// Shares the array among tasks.
    pub(crate) fn new(array: &mut [T]) -> Self {
        Parts(array.as_mut_ptr())
    }

    /// An array that tasks only read.
    pub(crate) fn reading(array: *const T) -> Self {
        Parts(array.cast_mut())
    }

    /// The address of the first element, for reading when no task writes.
    pub(crate) fn first(&self) -> *const T {
        self.0
    }

    /// The address of element `offset`.
    ///
    /// # Safety
    /// The offset lies inside the array, and no other task uses the part that is accessed through the result.
    pub(crate) unsafe fn at(&self, offset: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(offset) }
    }

    /// The elements `offset..offset + len`.
    ///
    /// # Safety
    /// The range lies inside the array, and no other task uses it while the slice lives.
    #[allow(clippy::mut_from_ref)] // that is the purpose: disjoint parts of one array, one per task
    pub(crate) unsafe fn slice(&self, offset: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_and_zero() {
        let a = Aligned::<f32>::zeros(37);
        assert_eq!(a.as_ptr() as usize % ALIGN, 0);
        assert!(a.len() == 37 && a.iter().all(|&x| x == 0.0));
        assert_eq!(Aligned::<f32>::zeros(0).len(), 0);
    }

    #[test]
    fn large_arrays_are_mapped_and_zero() {
        let mut a = Aligned::<u8>::zeros(HUGE + 5);
        assert!(a.map.is_some() && (a.as_ptr() as usize).is_multiple_of(HUGE));
        assert!(a.len() == HUGE + 5 && a.iter().all(|&x| x == 0));
        a[HUGE + 4] = 7;
        assert_eq!(a.clone()[HUGE + 4], 7);
    }

    #[test]
    fn memory_that_is_not_there() {
        assert!(Aligned::<f32>::try_zeros(1 << 50).is_none());
    }

    #[test]
    fn scratch_is_used_again() {
        let store = Scratch::default();
        let first = store.take(100).as_ptr();
        assert_eq!(store.take(60).as_ptr(), first);
        let two = (store.take(50), store.take(50));
        assert_ne!(two.0.as_ptr(), two.1.as_ptr());
        assert_eq!(two.0.len(), 50);
    }
}
