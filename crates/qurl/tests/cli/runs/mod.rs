//! What a training run leaves behind: checkpoints that survive anything, logs that can be read, and the same
//! bits whatever happens on the way. All of it through the real command, on a model that trains in a second.

mod alarm;
mod avg_at_k;
mod best;
mod broken;
mod closed;
mod compare;
mod data_sets;
mod disk;
mod dynamic;
mod emulated;
mod finished;
mod interrupted;
mod killed;
mod launched;
mod logs;
mod own;
mod ranks;
mod refused;
mod rewards;
mod scaled;
mod stages;
mod study;
mod supervised;
mod supervised_formats;
mod supervised_resume;
pub(crate) mod support;
mod torn;
mod unused;
mod workers;
