//! `--adapter DIR`: a model with the LoRA adapters of a directory beside its weights.

use crate::input::OrBad;
use crate::model::check_memory;
use qurl_kernels::{Device, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::{Base, Network, NetworkOptions};
use qurl_model::hf::OpenModel;
use qurl_model::hf::peft::{self, LoadedAdapter};
use qurl_quant::checksum::Summed;
use std::path::{Path, PathBuf};

/// An adapter for the model.
#[derive(clap::Args)]
pub struct AdapterArg {
    /// Directory of LoRA adapters for the model, as PEFT or a run with [lora] writes it
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
}

impl AdapterArg {
    /// The adapter, if one was asked for.
    pub fn load(&self, config: &ModelConfig) -> anyhow::Result<Option<LoadedAdapter>> {
        self.adapter.as_ref().map(|dir| peft::load(dir, config)).transpose().or_bad()
    }

    /// Packs the weights of files leaf by leaf, and the adapters beside them. Says which weights they are.
    pub fn network<D: Device>(
        &self,
        queue: &mut D::Queue,
        dir: &Path,
        model: &OpenModel,
        options: NetworkOptions,
    ) -> anyhow::Result<(Network<D>, u64)> {
        network(queue, dir, model, self.load(&model.config)?.as_ref(), options)
    }
}

/// Packs the weights of files leaf by leaf, and adapters beside them where there are some. The number is the
/// checksum of the weights without adapters.
pub fn network<D: Device>(
    queue: &mut D::Queue,
    dir: &Path,
    model: &OpenModel,
    adapter: Option<&LoadedAdapter>,
    options: NetworkOptions,
) -> anyhow::Result<(Network<D>, u64)> {
    let options = NetworkOptions { lora: adapter.map(|adapter| adapter.lora), ..options };
    if !queue.device().info().asynchronous {
        check_memory(dir, &model.config, &options)?;
    }
    let mut leaves = Summed::new(Base::Files(model));
    // A critic's value head samples nothing.
    let mut network = Network::of_leaves(queue, &model.config, false, &mut leaves, options).or_bad()?;
    let checksum = leaves.total(queue).or_bad()?;
    if let Some(adapter) = adapter {
        let adapters = adapter.params.as_ref().try_map(|leaf| queue.upload(leaf))?;
        network.refresh(queue, &adapters).or_bad()?;
    }
    Ok((network, checksum))
}
