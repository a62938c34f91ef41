//! What it takes to bring a worker from one version of the weights to the next: bytes and time, whole and as
//! changes, over a loopback connection.
//!
//! The weights are random. Between the versions lie some updates of AdamW as its first steps are: every weight
//! moves by about the learning rate, up or down. Trained models move less, since their gradients repeat.

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
#[derive(Serialize)]
struct Case {
    case: &'static str,
    format: String,
    lr: f32,
    /// Bytes that travel, and their share of the whole version.
    bytes: usize,
    share: f64,
    /// Seconds: to make them, over loopback, to make the version of them and check it.
    encode_s: f64,
    loopback_s: f64,
    decode_s: f64,
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
    for Case { case, format, lr, bytes, share, encode_s, loopback_s, decode_s, export_s, import_s } in
        &results
    {
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
    let expected = delta::hash(&new);
    let mut results = Vec::new();
    for (case, base) in [("whole", None), ("changes", Some(&old))] {
        let began = Instant::now();
        let sent = delta::encode(base.map(Vec::as_slice), &new, threads());
        let encode_s = began.elapsed().as_secs_f64();
        let began = Instant::now();
        let received = over_loopback(&sent)?;
        let loopback_s = began.elapsed().as_secs_f64();
        let (bytes, have) = (sent.len(), base.cloned());
        drop(sent);
        let began = Instant::now();
        let decoded = delta::decode(have, &received, expected, threads())?;
        let decode_s = began.elapsed().as_secs_f64();
        let began = Instant::now();
        network.import(&mut queue, &decoded)?;
        queue.synchronize()?;
        let import_s = began.elapsed().as_secs_f64();
        anyhow::ensure!(decoded == new, "{case}: other weights");
        let share = bytes as f64 / new.len() as f64;
        let format = format.to_string();
        results.push(Case {
            case,
            format,
            lr,
            bytes,
            share,
            encode_s,
            loopback_s,
            decode_s,
            export_s,
            import_s,
        });
    }
    Ok(results)
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
