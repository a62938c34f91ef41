//! `--adapter DIR`: a model with the LoRA adapters of a directory beside its weights.

use crate::input::OrBad;
use qurl_kernels::{Device, Queue};
use qurl_model::compute::{Base, BaseLeaves, Network, NetworkOptions};
use qurl_model::hf::peft::{self, LoadedAdapter};
use qurl_model::{ModelConfig, Params};
use std::path::PathBuf;

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

    /// Packs the weights, and the adapters beside them.
    pub fn network<D: Device>(
        &self,
        queue: &mut D::Queue,
        config: &ModelConfig,
        params: &Params<Vec<f32>>,
        options: NetworkOptions,
    ) -> anyhow::Result<Network<D>> {
        network(queue, config, params, self.load(config)?.as_ref(), options)
    }
}

/// Packs weights, and adapters beside them where there are some.
pub fn network<D: Device>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    adapter: Option<&LoadedAdapter>,
    options: NetworkOptions,
) -> anyhow::Result<Network<D>> {
    let options = NetworkOptions { lora: adapter.map(|adapter| adapter.lora), ..options };
    let mut base = BaseLeaves::new(Base::Host(params));
    let value_head = params.value_head.is_some();
    let mut network = Network::of_leaves(queue, config, value_head, &mut base, options).or_bad()?;
    if let Some(adapter) = adapter {
        let adapters = adapter.params.as_ref().try_map(|leaf| queue.upload(leaf))?;
        network.refresh(queue, &adapters).or_bad()?;
    }
    Ok(network)
}
