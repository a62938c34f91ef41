//! How long it takes to pack new weights, which every step of a run does before its rollouts.

use super::machine::Machine;
use qurl_kernels::BackendError;
use qurl_model::compute::{Network, random_leaf};
use std::time::Instant;

/// Weights that are made before they are packed.
const GROUP_BYTES: usize = 512 << 20;

/// Makes new random weights, [`GROUP_BYTES`] of them at a time: more than the caches hold, as a trainer's are, and less
/// than all of a large model. `group` is called with each group before it is packed, and with what packs it and says how
/// many seconds that took.
pub fn repack_random<B: Machine>(
    backend: &B,
    network: &mut Network<B>,
    seed: u64,
    mut group: impl FnMut(
        &[&B::Tensor],
        &mut dyn FnMut() -> Result<f64, BackendError>,
    ) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let config = network.config().clone();
    let mut matrices = network.matrices_mut().into_iter().peekable();
    while matrices.peek().is_some() {
        let (mut leaves, mut packed, mut bytes) = (Vec::new(), Vec::new(), 0);
        while bytes < GROUP_BYTES
            && let Some((info, weight)) = matrices.next()
        {
            let leaf = random_leaf(backend, &config, &info, seed)?;
            bytes += 4 * backend.len(&leaf);
            leaves.push(leaf);
            packed.push(weight);
        }
        backend.synchronize()?;
        let read: Vec<&B::Tensor> = leaves.iter().collect();
        group(&read, &mut || pack_time(backend, &leaves, &mut packed))?;
    }
    Ok(())
}

/// Seconds that packing takes, the median of three times: touching memory for the first time in a while may cost more than
/// packing it.
fn pack_time<B: Machine>(
    backend: &B,
    leaves: &[B::Tensor],
    packed: &mut [&mut B::Weight],
) -> Result<f64, BackendError> {
    let mut seconds = [0.0; 3];
    for seconds in &mut seconds {
        let start = Instant::now();
        for (leaf, weight) in leaves.iter().zip(packed.iter_mut()) {
            backend.repack(leaf, weight)?;
        }
        backend.synchronize()?;
        *seconds = start.elapsed().as_secs_f64();
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[1])
}
