//! The gradients of the log-probability head, and the head and its gradients in one: then logits are computed
//! once.
//!
//! Which of the two a loss can have is its own matter: where the derivative by a log-prob depends on other
//! tokens (a ratio of whole sequences), all of them must be known before the first gradient, and logits, of
//! which only some rows fit into memory at a time, are computed again.

use super::device::Cuda;
use super::ffi::DevicePtr;
use super::head::{Logits, SCORE_WORDS, Scores, held};
use super::kernels::{self, LogitGradients};
use super::launch::Launch;
use super::linear_backward::{converted, input_gradient, weight_gradient};
use super::pending::{self, PendingWords};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::ops::{HeadBackward, HeadTraining, Output};
use crate::types::{DeviceError, Format, HeadOutput, LossGradient};
use std::ops::Range;

/// What the gradients of some rows are made of, on the device: `scale` makes the logits those of the
/// temperature.
struct Slopes {
    targets: DevicePtr,
    scale: f32,
    inverse_temperature: f32,
    lse: DevicePtr,
    entropy: DevicePtr,
    dlogp: DevicePtr,
    /// 0 where the loss has no entropy.
    dentropy: DevicePtr,
}

/// Adds the gradient of the weights and stores that of the hidden rows, both through the trained weights; the
/// logits are used up. `hidden` are the rows in f32, which are brought into the trained weights' format where
/// the logits were made in another.
fn gradients(
    queue: &mut CudaQueue,
    (head, trained): (&CudaWeight, &CudaWeight),
    hidden: DevicePtr,
    logits: Logits,
    rows: usize,
    slopes: Slopes,
    dweight: Option<DevicePtr>,
    dhidden: DevicePtr,
) {
    let (kernel, dlogits) = match trained.format {
        Format::Bf16 => (kernels::logit_gradients_bf16, queue.alloc(2 * rows * trained.n)),
        Format::F32 => (kernels::logit_gradients_f32, logits.at),
        Format::Int8 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => {
            panic!("head backward: weights in {} have no gradients", trained.format)
        }
    };
    let Slopes { targets, scale, inverse_temperature, lse, entropy, dlogp, dentropy } = slopes;
    let args = LogitGradients {
        logits: logits.at,
        vocabulary: logits.vocabulary,
        targets,
        scale,
        inverse_temperature,
        lse,
        dlogp,
        dentropy,
        entropy,
        out: dlogits,
    };
    queue.launch(kernel, Launch::grid([trained.n.div_ceil(4 * 256), rows, 1], 256), args);
    if let Some(dweight) = dweight {
        let x = match head.format == trained.format {
            true => logits.hidden.data,
            false => converted(queue, trained.format, hidden, rows, trained.k),
        };
        weight_gradient(queue, x, dlogits, rows, trained, dweight);
    }
    input_gradient(queue, dlogits, rows, trained, Output::Store, dhidden);
}

/// [`crate::Queue::head_backward`]
pub(super) fn backward(queue: &mut CudaQueue, args: HeadBackward<Cuda>) {
    let HeadBackward { hidden, head, trained, targets, temperature, out, gradient, dhidden, dweight } = args;
    let rows = targets.len();
    assert!(trained.n == head.n && trained.k == head.k, "head backward: trained weights");
    assert!(rows * head.k <= hidden.len.min(dhidden.len), "head backward: hidden rows");
    assert!(dweight.as_ref().is_none_or(|dw| head.n * head.k <= dw.len), "head backward: weights");
    assert!(out.lse.len() == rows && out.entropy.len() == rows, "head backward: rows");
    gradient.check(rows);
    let dweight = dweight.map(|dweight| dweight.at());
    let mark = queue.mark();
    for range in held(rows, head.n) {
        queue.rewind(mark);
        let (count, offset) = (range.len(), (range.start * head.k * 4) as u64);
        let logits = Logits::new(queue, head, hidden.at() + offset, count);
        let gradient = gradient.part(range.clone());
        let numbers =
            [&out.lse[range.clone()], &out.entropy[range.clone()], gradient.dlogp, gradient.dentropy];
        let [lse, entropy, dlogp, dentropy] = numbers.map(|numbers| queue.stage(numbers));
        let targets = queue.stage(&targets[range]);
        let (scale, inverse_temperature) = (1.0 / temperature, 1.0 / temperature);
        let slopes = Slopes { targets, scale, inverse_temperature, lse, entropy, dlogp, dentropy };
        let at = hidden.at() + offset;
        gradients(queue, (head, trained), at, logits, count, slopes, dweight, dhidden.at() + offset);
    }
}

/// Targets whose scores are on their way to the host.
struct Scored {
    range: Range<usize>,
    logits: Logits,
    targets: DevicePtr,
    scores: Scores,
    words: PendingWords,
}

/// [`crate::Queue::head_training`]: while the host answers for some targets, the logits of the next are
/// computed, so two parts of the logits are held.
pub(super) fn training<E: From<DeviceError>>(
    queue: &mut CudaQueue,
    args: HeadTraining<Cuda>,
    mut loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
) -> Result<(), E> {
    let HeadTraining { hidden, head, trained, targets, temperature, dhidden, dweight } = args;
    let rows = targets.len();
    assert!(trained.n == head.n && trained.k == head.k, "head training: trained weights");
    assert!(rows * head.k <= hidden.len.min(dhidden.len), "head training: hidden rows");
    assert!(dweight.as_ref().is_none_or(|dw| head.n * head.k <= dw.len), "head training: weights");
    assert!(
        targets.iter().all(|&t| (t as usize) < head.n),
        "head training: target outside of the vocabulary"
    );
    let dweight = dweight.map(|dweight| dweight.at());
    let place = |range: &Range<usize>| (range.start * head.k * 4) as u64;
    let score = |queue: &mut CudaQueue, range: Range<usize>| {
        let logits = Logits::new(queue, head, hidden.at() + place(&range), range.len());
        let scores = Scores { at: queue.alloc(4 * SCORE_WORDS * range.len()), rows: range.len() };
        let targets = queue.stage(&targets[range.clone()]);
        logits.score(queue, temperature, targets, range.len(), scores);
        let words = pending::fetch_words(queue, scores.at, SCORE_WORDS * range.len())?;
        Ok::<_, DeviceError>(Scored { range, logits, targets, scores, words })
    };
    // Parts alternate in the memory of the first two, which are not smaller than any other.
    let (mut begins, mut end) = ([queue.mark(); 2], queue.mark());
    let parts: Vec<Range<usize>> = held(rows, head.n).collect();
    let mut scored = None;
    for nth in 0..=parts.len() {
        let next = match parts.get(nth) {
            Some(range) => {
                begins[nth % 2] = if nth < 2 { end } else { begins[nth % 2] };
                queue.rewind(begins[nth % 2]);
                let next = score(queue, range.clone())?;
                end = if nth < 2 { queue.mark() } else { end };
                Some(next)
            }
            None => None,
        };
        let Some(Scored { range, logits, targets, scores, words }) = std::mem::replace(&mut scored, next)
        else {
            continue;
        };
        let mut output = HeadOutput::default();
        pending::wait_words(queue, words, |words| Scores::read(words, &mut output))?;
        let gradient = loss(range.clone(), &output)?;
        let gradient = gradient.borrowed();
        gradient.check(range.len());
        queue.rewind(end);
        let [dlogp, dentropy] = [gradient.dlogp, gradient.dentropy].map(|numbers| queue.stage(numbers));
        let (lse, entropy) = (scores.lse(), scores.entropy());
        // Scoring has scaled the logits.
        let (scale, inverse_temperature) = (1.0, 1.0 / temperature);
        let slopes = Slopes { targets, scale, inverse_temperature, lse, entropy, dlogp, dentropy };
        let (at, count) = (place(&range), range.len());
        let (hidden, dhidden) = (hidden.at() + at, dhidden.at() + at);
        gradients(queue, (head, trained), hidden, logits, count, slopes, dweight, dhidden);
    }
    Ok(())
}
