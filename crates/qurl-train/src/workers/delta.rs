//! Weights on their way: whole, or as what changed since the version that the reader has.
//!
//! A change is the XOR of the bytes of both versions, compressed with zstd: most quantized values stay the
//! same between two steps, and zeros cost next to nothing. It knows nothing of number formats. Both forms are
//! cut into chunks that are made and read on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use twox_hash::XxHash3_128;

/// Bytes of weights in a chunk.
const CHUNK: usize = 4 << 20;
/// Level of zstd: higher ones gain a few percent in several times the time.
const LEVEL: i32 = 1;
/// What a delta and a whole begin with.
const DELTA: &[u8; 8] = b"qurlXOR1";
const WHOLE: &[u8; 8] = b"qurlALL1";

/// Bytes that are not the weights they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// Cut off, or no weights at all.
    #[error("the bytes are no weights, whole or changed")]
    Torn,
    /// Not those that were asked for.
    #[error("the weights have hash {found:032x}, expected {expected:032x}")]
    Hash {
        /// What came.
        found: u128,
        /// What should have come.
        expected: u128,
    },
}

/// Tells the bytes of a version from all others.
pub fn hash(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// A version as it is sent to a reader who has `base`, or nothing.
pub fn encode(base: Option<&[u8]>, bytes: &[u8], threads: usize) -> Vec<u8> {
    let base = base.filter(|base| base.len() == bytes.len());
    let Some(base) = base else { return [WHOLE, bytes].concat() };
    let chunks: Vec<(&[u8], &[u8])> = base.chunks(CHUNK).zip(bytes.chunks(CHUNK)).collect();
    let packed = parallel(chunks.len(), threads, |i| {
        let (old, new) = chunks[i];
        let changed: Vec<u8> = old.iter().zip(new).map(|(a, b)| a ^ b).collect();
        // Compressing into memory of the library's own bound cannot fail; as it is, it would be sent whole.
        zstd::bulk::compress(&changed, LEVEL).ok()
    });
    let Some(packed) = packed.into_iter().collect::<Option<Vec<Vec<u8>>>>() else {
        return [WHOLE, bytes].concat();
    };
    let mut to = DELTA.to_vec();
    to.extend((bytes.len() as u64).to_le_bytes());
    to.extend(packed.iter().flat_map(|chunk| (chunk.len() as u32).to_le_bytes()));
    packed.iter().for_each(|chunk| to.extend_from_slice(chunk));
    to
}

/// Whether bytes of [`encode`] need the version before.
pub fn is_delta(bytes: &[u8]) -> bool {
    bytes.starts_with(DELTA)
}

/// The version that was sent, if it has this hash; `have` is what the reader has, and becomes the version
/// itself where only changes came, so that both are never there at once.
pub fn decode(
    have: Option<Vec<u8>>,
    sent: &[u8],
    expected: u128,
    threads: usize,
) -> Result<Vec<u8>, DeltaError> {
    let (kind, rest) = sent.split_first_chunk::<8>().ok_or(DeltaError::Torn)?;
    let bytes = match kind {
        WHOLE => rest.to_vec(),
        DELTA => apply(have.ok_or(DeltaError::Torn)?, rest, threads).ok_or(DeltaError::Torn)?,
        _ => return Err(DeltaError::Torn),
    };
    let found = hash(&bytes);
    if found == expected { Ok(bytes) } else { Err(DeltaError::Hash { found, expected }) }
}

/// XORs the changes into the version before.
fn apply(mut bytes: Vec<u8>, sent: &[u8], threads: usize) -> Option<Vec<u8>> {
    let (len, rest) = sent.split_first_chunk::<8>()?;
    let count = bytes.len().div_ceil(CHUNK);
    if u64::from_le_bytes(*len) != bytes.len() as u64 {
        return None;
    }
    let (lengths, mut rest) = rest.split_at_checked(4 * count)?;
    let mut packed = Vec::with_capacity(count);
    for len in lengths.as_chunks::<4>().0 {
        let (chunk, after) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        packed.push(chunk);
        rest = after;
    }
    let places: Vec<Mutex<&mut [u8]>> = bytes.chunks_mut(CHUNK).map(Mutex::new).collect();
    let done = parallel(count, threads, |i| {
        let mut place = places[i].lock().unwrap_or_else(PoisonError::into_inner);
        let changed = zstd::bulk::decompress(packed[i], place.len()).ok()?;
        (changed.len() == place.len()).then(|| place.iter_mut().zip(&changed).for_each(|(a, b)| *a ^= b))
    });
    drop(places);
    (rest.is_empty() && done.iter().all(Option::is_some)).then_some(bytes)
}

/// The results of `work` for 0, 1, ..., in order.
fn parallel<T: Send>(count: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(place) = results.get(i) else { break };
                    let result = work(i);
                    *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                }
            });
        }
    });
    results
        .into_iter()
        .filter_map(|place| place.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_make_the_new_version_of_the_old_one() {
        for len in [0, 1, 1000, CHUNK, 2 * CHUNK + 77] {
            let old: Vec<u8> = (0..len).map(|i| ((i * i) >> 7) as u8).collect();
            let mut new = old.clone();
            new.iter_mut().step_by(97).for_each(|byte| *byte = byte.wrapping_add(1));
            let (whole, delta) = (encode(None, &new, 2), encode(Some(&old), &new, 2));
            assert!(is_delta(&delta) && !is_delta(&whole));
            assert_eq!(decode(None, &whole, hash(&new), 1), Ok(new.clone()));
            assert_eq!(decode(Some(old.clone()), &delta, hash(&new), 3), Ok(new.clone()));
            assert!(len < 1000 || delta.len() < len / 2, "{} of {len} bytes", delta.len());
            assert_eq!(delta, encode(Some(&old), &new, 1), "threads");

            // To another version, from none, cut off, of another hash: errors, never other weights.
            if len > 0 {
                let wrong = decode(Some(new.clone()), &delta, hash(&new), 1);
                assert!(matches!(wrong, Err(DeltaError::Hash { .. })), "{wrong:?}");
            }
            assert_eq!(decode(None, &delta, hash(&new), 1), Err(DeltaError::Torn));
            for cut in [0, 7, 8, 15, delta.len() - 1] {
                assert!(decode(Some(old.clone()), &delta[..cut], hash(&new), 1).is_err(), "cut at {cut}");
            }
        }
        assert_eq!(encode(Some(&[1]), &[1, 2], 1), encode(None, &[1, 2], 1), "of another length: whole");
    }
}
