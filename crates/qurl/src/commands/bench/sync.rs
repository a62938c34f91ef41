//! What it takes to bring a worker from one version of the weights to the next: bytes and time, whole and as
//! changes, over a loopback connection.
//!
//! The weights are random, and so is what moves them: between the versions lie some updates in which every
//! weight moves by about the learning rate, up or down, as the first ones of AdamW do. That is more than any
//! later step of a run changes, and takes seconds. What steps of RL change is measured by `qurl bench step
//! --sync`, which makes such steps.

use super::{Document, print_json};
use crate::device::DeviceArg;
use crate::input::OrBad;
use crate::output::out;
use anyhow::Context;
use qurl_kernels::{Device, DeviceError, Format, Queue};
use qurl_model::compute::{Leaves, Network, NetworkOptions, random_leaf};
use qurl_model::params::shapes;
use qurl_model::{ModelConfig, ParamInfo};
use qurl_train::workers::delta;
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// Options of `qurl bench sync`.
#[derive(clap::Args)]
pub struct Args {
    /// Shape of the model: default, 5m, or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// Number formats, comma-separated
    #[arg(long, value_delimiter = ',', default_value = "int8")]
    formats: Vec<Format>,
    /// Learning rates of the updates between two versions, comma-separated
    #[arg(long, value_delimiter = ',', default_value = "1e-6")]
    lr: Vec<f32>,
    /// Updates between two versions
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    updates: u8,
    #[command(flatten)]
    pub(super) device: DeviceArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// One way of bringing weights over.
#[derive(Clone, Serialize)]
pub(super) struct Transfer {
    /// Whole, or as changes.
    pub case: &'static str,
    /// Bytes that travel, and their share of the whole version.
    pub bytes: usize,
    pub share: f64,
    /// Seconds: to make them, over loopback, to make the version of them and check it.
    pub encode_s: f64,
    pub loopback_s: f64,
    pub decode_s: f64,
}

#[derive(Serialize)]
struct Case {
    format: String,
    lr: f32,
    #[serde(flatten)]
    transfer: Transfer,
    /// Seconds for what both have in common: out of the trainer's engine and into the worker's.
    export_s: f64,
    import_s: f64,
}

/// Random leaves that some updates have moved.
struct Moved<'a, D: Device> {
    config: &'a ModelConfig,
    infos: Vec<ParamInfo>,
    lr: f32,
    updates: u8,
    leaf: Option<D::Tensor>,
}

impl<D: Device> Leaves<D> for Moved<'_, D> {
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        let info = &self.infos[index];
        let mut leaf = random_leaf::<D>(queue, self.config, info, 1)?;
        for update in 1..=self.updates {
            let mut change = queue.device().zeros(info.len())?;
            queue.fill_random(&mut change, u64::from(update) << 32 | index as u64, self.lr);
            queue.add(&change, &mut leaf, info.len());
        }
        Ok(self.leaf.insert(leaf))
    }
}

/// Runs the benchmark.
pub fn run<D: Device>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    let config = super::shape::config(&args.shape)?;
    let mut results = Vec::new();
    for &format in &args.formats {
        for &lr in &args.lr {
            results.extend(cases(&device, &config, format, lr, args.updates).or_bad()?);
        }
    }
    let (threads, machine) = (threads(), device.info().description);
    if args.json {
        return print_json(&Document { machine, results });
    }
    out!("{}, {} updates between the versions, {threads} threads, {machine}", args.shape, args.updates)?;
    out!("format  lr       case      MB        share   encode  loopback  decode  export  import (s)")?;
    for Case { format, lr, transfer, export_s, import_s } in &results {
        let Transfer { case, bytes, share, encode_s, loopback_s, decode_s } = transfer;
        let mb = *bytes as f64 / 1e6;
        out!(
            "{format:<7} {lr:<8e} {case:<8} {mb:>8.1}  {:>6.1}%  {encode_s:>6.3}  {loopback_s:>8.3}  \
             {decode_s:>6.3}  {export_s:>6.3}  {import_s:>6.3}",
            100.0 * share
        )?;
    }
    Ok(())
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

fn cases<D: Device>(
    device: &Arc<D>,
    config: &ModelConfig,
    format: Format,
    lr: f32,
    updates: u8,
) -> anyhow::Result<Vec<Case>> {
    let mut queue = device.queue()?;
    let options = NetworkOptions { positions: 16, ..NetworkOptions::inference(config, format) };
    let infos: Vec<ParamInfo> = shapes(config, false).into_leaves();
    let mut leaves = Moved::<D> { config, infos, lr, updates: 0, leaf: None };
    let mut network = Network::of_leaves(&mut queue, config, false, &mut leaves, options)?;
    let old = network.export(&mut queue)?;
    leaves.updates = updates;
    network.refresh_leaves(&mut queue, &mut leaves, Default::default())?;
    drop(leaves);
    let began = Instant::now();
    let new = network.export(&mut queue)?;
    let export_s = began.elapsed().as_secs_f64();
    let mut results = Vec::new();
    for base in [None, Some(old)] {
        let (transfer, received) = transfer(base, &new)?;
        let began = Instant::now();
        network.import(&mut queue, &received)?;
        queue.synchronize()?;
        let import_s = began.elapsed().as_secs_f64();
        results.push(Case { format: format.to_string(), lr, transfer, export_s, import_s });
    }
    Ok(results)
}

/// Brings a version to a worker that has another one, or none; gives what the worker has then.
pub(super) fn transfer(base: Option<Vec<u8>>, new: &[u8]) -> anyhow::Result<(Transfer, Vec<u8>)> {
    let (case, expected) = (if base.is_some() { "changes" } else { "whole" }, delta::hash(new));
    let began = Instant::now();
    let sent = delta::encode(base.as_deref(), new, threads());
    let encode_s = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let received = over_loopback(&sent)?;
    let loopback_s = began.elapsed().as_secs_f64();
    let bytes = sent.len();
    drop(sent);
    let began = Instant::now();
    let decoded = delta::decode(base, &received, expected, threads())?;
    let decode_s = began.elapsed().as_secs_f64();
    anyhow::ensure!(decoded == new, "{case}: other weights");
    let share = bytes as f64 / new.len() as f64;
    Ok((Transfer { case, bytes, share, encode_s, loopback_s, decode_s }, decoded))
}

/// Sends bytes to a thread of this process.
fn over_loopback(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening on loopback")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        scope.spawn(move || -> std::io::Result<()> { listener.accept()?.0.write_all(bytes) });
        let mut received = Vec::with_capacity(bytes.len());
        TcpStream::connect(address)?.read_to_end(&mut received)?;
        anyhow::ensure!(received.len() == bytes.len(), "the connection was cut off");
        Ok(received)
    })
}
