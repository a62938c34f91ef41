//! How long it takes to pack new weights, which every step of a run does before its rollouts.

use super::machine::Machine;
use qurl_kernels::ops::Pack;
use qurl_kernels::{DeviceError, Queue, Rounding};
use qurl_model::compute::{Network, random_leaf};
use std::time::Instant;

/// Weights that are made before they are packed.
const GROUP_BYTES: usize = 512 << 20;

/// Makes new random weights, [`GROUP_BYTES`] of them at a time: more than the caches hold, as a trainer's
/// are, and less than all of a large model. `group` is called with each group before it is packed, and with
/// what packs it and says how many seconds that took.
pub fn repack_random<D: Machine>(
    queue: &mut D::Queue,
    network: &mut Network<D>,
    seed: u64,
    mut group: impl FnMut(
        &mut D::Queue,
        &[&D::Tensor],
        &mut dyn FnMut(&mut D::Queue) -> Result<f64, DeviceError>,
    ) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let config = network.config().clone();
    let mut matrices = network.matrices_mut().into_iter().peekable();
    while matrices.peek().is_some() {
        let (mut leaves, mut packed, mut bytes) = (Vec::new(), Vec::new(), 0);
        while bytes < GROUP_BYTES
            && let Some((info, weight)) = matrices.next()
        {
            let leaf = random_leaf::<D>(queue, &config, &info, seed)?;
            bytes += 4 * D::len(&leaf);
            leaves.push(leaf);
            packed.push(weight);
        }
        queue.synchronize()?;
        let read: Vec<&D::Tensor> = leaves.iter().collect();
        group(queue, &read, &mut |queue| pack_time::<D>(queue, &leaves, &mut packed))?;
    }
    Ok(())
}

/// Seconds that packing takes, the median of three times: touching memory for the first time in a while may
/// cost more than packing it.
fn pack_time<D: Machine>(
    queue: &mut D::Queue,
    leaves: &[D::Tensor],
    packed: &mut [&mut D::Weight],
) -> Result<f64, DeviceError> {
    let mut seconds = [0.0; 3];
    for seconds in &mut seconds {
        let start = Instant::now();
        for (from, to) in leaves.iter().zip(packed.iter_mut()) {
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to })?;
        }
        queue.synchronize()?;
        *seconds = start.elapsed().as_secs_f64();
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[1])
}
