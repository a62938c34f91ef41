//! Weights on their way: whole, or as what changed since the version that the reader has.
//!
//! Most quantized values stay the same between two steps: the XOR of the bytes of both versions is nearly all
//! zeros, and costs next to nothing once it is compressed with zstd. Values in f32 (embedding, norms, biases,
//! scales) nearly all change, but by little: the difference of their bits as whole numbers is small, and its
//! bytes, all first ones, then all second ones, and so on, are half zeros. A chunk is sent in whichever form
//! is smaller on a sample of it, so this knows nothing of number formats and of where matrices begin. Chunks
//! are made and read on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use twox_hash::XxHash3_128;

/// Bytes of weights in a chunk.
const CHUNK: usize = 4 << 20;
/// Level of zstd: higher ones gain a few percent in several times the time.
const LEVEL: i32 = 1;
/// Bytes of a chunk that are tried in both forms.
const SAMPLE: usize = 64 << 10;
/// What a delta and a whole begin with.
const DELTA: &[u8; 8] = b"qurlDEL2";
const WHOLE: &[u8; 8] = b"qurlALL1";

/// The form in which the changes of a chunk are written; the first byte of what is sent of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// The XOR of its bytes.
    Bytes = 0,
    /// Differences of its 32-bit words, the sign in the lowest bit; byte by byte of all words. What is left
    /// at the end is XORed.
    Words = 1,
}

impl Form {
    /// What turns a chunk into another one.
    fn changes(self, old: &[u8], new: &[u8]) -> Vec<u8> {
        let xor = |old: &[u8], new: &[u8]| -> Vec<u8> { old.iter().zip(new).map(|(a, b)| a ^ b).collect() };
        if self == Form::Bytes {
            return xor(old, new);
        }
        let ((old, old_rest), (new, new_rest)) = (old.as_chunks::<4>(), new.as_chunks::<4>());
        let words = new.len();
        let mut changes = vec![0; 4 * words];
        for (i, (old, new)) in old.iter().zip(new).enumerate() {
            let moved = u32::from_le_bytes(*new).wrapping_sub(u32::from_le_bytes(*old)).cast_signed();
            let folded = (moved << 1) ^ (moved >> 31);
            for (plane, byte) in folded.to_le_bytes().into_iter().enumerate() {
                changes[plane * words + i] = byte;
            }
        }
        changes.extend(xor(old_rest, new_rest));
        changes
    }

    /// Turns a chunk into the one that these changes, as many bytes, lead to.
    fn apply(self, chunk: &mut [u8], changes: &[u8]) {
        let xor = |chunk: &mut [u8], changes: &[u8]| {
            chunk.iter_mut().zip(changes).for_each(|(byte, change)| *byte ^= change);
        };
        if self == Form::Bytes {
            return xor(chunk, changes);
        }
        let (words, rest) = chunk.as_chunks_mut::<4>();
        let count = words.len();
        for (i, word) in words.iter_mut().enumerate() {
            let folded = u32::from_le_bytes([0, 1, 2, 3].map(|plane| changes[plane * count + i]));
            let moved = (folded >> 1) ^ (folded & 1).wrapping_neg();
            *word = u32::from_le_bytes(*word).wrapping_add(moved).to_le_bytes();
        }
        xor(rest, &changes[4 * count..]);
    }

    /// The form in which a chunk is sent.
    fn best(old: &[u8], new: &[u8]) -> Form {
        let first = old.len().saturating_sub(SAMPLE) / 2 / 4 * 4;
        let sample = first..old.len().min(first + SAMPLE);
        let len = |form: Form| {
            let changes = form.changes(&old[sample.clone()], &new[sample.clone()]);
            zstd::bulk::compress(&changes, LEVEL).map_or(usize::MAX, |packed| packed.len())
        };
        if len(Form::Words) < len(Form::Bytes) { Form::Words } else { Form::Bytes }
    }
}

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
        let form = Form::best(old, new);
        // Compressing into memory of the library's own bound cannot fail; as it is, it would be sent whole.
        let packed = zstd::bulk::compress(&form.changes(old, new), LEVEL).ok()?;
        Some([&[form as u8], packed.as_slice()].concat())
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

/// Makes the changes to the version before.
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
        let (form, packed) = packed[i].split_first()?;
        let form = [Form::Bytes, Form::Words].into_iter().find(|own| *own as u8 == *form)?;
        let changes = zstd::bulk::decompress(packed, place.len()).ok()?;
        (changes.len() == place.len()).then(|| form.apply(&mut place, &changes))
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
    use qurl_model::rng::CounterRng;

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

    /// Numbers that all move a little are sent as differences, and those of which a few change as bytes.
    #[test]
    fn each_kind_of_number_has_its_form() {
        let random = CounterRng::new(&[5]);
        let f32s = |lr: f32| -> Vec<u8> {
            let value = |i: u64| 0.02 * (random.uniform_f64_at(2 * i) as f32 - 0.5);
            let moved = |i: u64| value(i) + lr * (random.uniform_f64_at(2 * i + 1) as f32 - 0.5);
            (0..100_001).flat_map(|i| moved(i).to_le_bytes()).collect()
        };
        let (old, new) = (f32s(0.0), f32s(1e-6));
        assert_eq!(Form::best(&old, &new), Form::Words);
        let delta = encode(Some(&old), &new, 1);
        let xored = zstd::bulk::compress(&Form::Bytes.changes(&old, &new), LEVEL).expect("compressed");
        assert!(5 * delta.len() < 4 * xored.len(), "{} of {} bytes", delta.len(), xored.len());
        assert_eq!(decode(Some(old.clone()), &delta, hash(&new), 1), Ok(new.clone()));

        let mut changed = old.clone();
        changed.iter_mut().step_by(997).for_each(|byte| *byte = byte.wrapping_sub(1));
        assert_eq!(Form::best(&old, &changed), Form::Bytes);
        for form in [Form::Bytes, Form::Words] {
            for len in [0, 1, 3, 4, 4001] {
                let mut chunk = old[..len].to_vec();
                form.apply(&mut chunk, &form.changes(&old[..len], &changed[..len]));
                assert_eq!(chunk, changed[..len], "{form:?}");
            }
        }
    }
}
