//! Memory for packed weights: many arrays in few mappings of huge pages.
//!
//! A decode step of one sequence does little else than read weights, and a megabyte in small pages was seen
//! to be read at half the speed of one in huge pages. Giving every matrix huge pages of its own would waste
//! most of a page for each. So they lie side by side in mappings that live as long as one of their arrays:
//! the weights of a network come and go together.

use super::buf::{Aligned, Number, map_huge, out_of_memory};
use crate::types::DeviceError;
use memmap2::MmapMut;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a mapping; arrays of more than half of it have one of their own.
const CHUNK: usize = 32 << 20;
const CACHE_LINE: usize = 64;

/// Gives out arrays.
#[derive(Default)]
pub struct Arena {
    chunk: Mutex<Option<Chunk>>,
}

/// The mapping that the next arrays come from.
struct Chunk {
    map: Arc<MmapMut>,
    /// The bytes that are left.
    next: *mut u8,
    left: usize,
}

// SAFETY: it owns the bytes that are left like a Vec.
unsafe impl Send for Chunk {}

impl Arena {
    /// An array of `len` zeros.
    pub fn zeros<T: Number>(&self, len: usize) -> Result<Aligned<T>, DeviceError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let missing = |need: usize| out_of_memory(need, "packed weights");
        if bytes > CHUNK / 2 {
            return Aligned::try_zeros(len).ok_or_else(|| missing(bytes));
        }
        let bytes = bytes.next_multiple_of(CACHE_LINE);
        let mut chunk = self.chunk.lock().unwrap_or_else(PoisonError::into_inner);
        // A mapping whose arrays are all gone is given back.
        let usable = chunk.take().filter(|chunk| chunk.left >= bytes && Arc::strong_count(&chunk.map) > 1);
        let mut place = match usable {
            Some(place) => place,
            None => {
                let (map, next) = map_huge(CHUNK).ok_or_else(|| missing(CHUNK))?;
                Chunk { map, next, left: CHUNK }
            }
        };
        let data = place.next;
        place.left -= bytes;
        // SAFETY: the bytes are left of the mapping, fresh and so zero, and from now on this array's; all
        // arrays are whole cache lines, the mapping begins with one.
        let array = unsafe {
            place.next = data.add(bytes);
            Aligned::in_mapping(data.cast(), len, place.map.clone())
        };
        *chunk = Some(place);
        Ok(array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_lie_side_by_side_and_are_their_own() {
        let arena = Arena::default();
        let mut arrays: Vec<Aligned<u32>> =
            (0..40).map(|i| arena.zeros(1000 * i + 1).expect("memory")).collect();
        for (i, array) in arrays.iter_mut().enumerate() {
            assert!(array.len() == 1000 * i + 1 && array.iter().all(|&x| x == 0));
            assert!((array.as_ptr() as usize).is_multiple_of(CACHE_LINE));
            array.fill(i as u32 + 1);
        }
        assert!(arrays.iter().enumerate().all(|(i, array)| array.iter().all(|&x| x == i as u32 + 1)));
        assert!(arrays[39].as_ptr() as usize - (arrays[0].as_ptr() as usize) < CHUNK);
    }

    #[test]
    fn memory_that_was_used_is_not_given_out_again() {
        let arena = Arena::default();
        arena.zeros::<u32>(100).expect("memory").fill(7);
        assert!(arena.zeros::<u32>(100).expect("memory").iter().all(|&x| x == 0));
        let large =
            [CHUNK / 2, CHUNK / 2, CHUNK / 2, CHUNK].map(|len| arena.zeros::<u8>(len).expect("memory"));
        assert!(large.iter().all(|array| array.iter().all(|&x| x == 0)));
        assert_eq!(arena.zeros::<f32>(0).expect("memory").len(), 0);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let error = Arena::default().zeros::<u32>(1 << 60).map(|array| array.len());
        let expected = "out of memory on cpu: 4611686018427387904 bytes requested for packed weights";
        assert_eq!(error.expect_err("nobody has as much").to_string(), expected);
    }
}
