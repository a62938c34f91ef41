//! Steps that may be recorded: replayed they give the bits of running them directly, whatever changes in
//! their batches.

use crate::ops::{Ops, Tables, cpus};
use crate::paged::{Paged, heads, sampling};
use crate::support::{Random, assert_bits};
use qurl_kernels::ops::{Attend, Gather, Index, Linear, Mlp, MlpPass, Norm, Output, RmsNorm, Sample};
use qurl_kernels::types::{Bias, Heads, KvFormat, SampleRow, Sampled, Token};
use qurl_kernels::{Device, Format, Queue};
use std::sync::atomic::{AtomicU64, Ordering};

const D: usize = 128;
const F: usize = 256;
const VOCABULARY: usize = 211;
const EPS: f32 = 1e-6;
/// Rounds of decoding.
const ROUNDS: usize = 16;
/// Prompts of the sequences: three of them end shortly before contexts are rounded to another length on a
/// GPU.
const PROMPTS: [usize; 4] = [60, 508, 1020, 5];
/// Sequences that take a step in every round, in batches of several sizes.
const BATCHES: [&[usize]; 3] = [&[0, 3], &[1, 0], &[0, 1, 2, 3]];

/// What the layers' rows see: everything, or a window that begins in other tiles and splits of a GPU from
/// step to step.
const WINDOWS: [Option<usize>; 2] = [None, Some(100)];

/// A model of two layers.
struct Network<D: Device> {
    heads: Heads,
    tables: Tables<D>,
    embeddings: D::Tensor,
    gain: D::Tensor,
    layers: Vec<[D::Weight; 4]>,
    head: D::Weight,
}

/// What a step writes.
struct Buffers<D: Device> {
    x: D::Tensor,
    qkv: D::Tensor,
    picked: D::Tensor,
    hidden: D::Tensor,
    tokens: D::Tokens,
    kv: Vec<D::Kv>,
}

impl<Dev: Device> Network<Dev> {
    fn new(ops: &Ops<Dev>, format: Format, positions: usize) -> Network<Dev> {
        let mut random = Random::new(21);
        let heads = heads(2, 2, 64);
        let mut weight = |n: usize, k: usize| {
            let values: Vec<f32> = random.normals(n * k).iter().map(|x| x / (k as f32).sqrt()).collect();
            ops.frozen(&values, n, k, format)
        };
        let mut layer =
            || [weight(heads.qkv_width(), D), weight(D, heads.q_width()), weight(2 * F, D), weight(D, F)];
        let layers = vec![layer(), layer()];
        let head = weight(VOCABULARY, D);
        let angles: Vec<f32> = random.normals(positions * heads.head_dim / 2);
        let [cos, sin] = [f32::cos, f32::sin].map(|f| angles.iter().map(|&x| f(x)).collect::<Vec<f32>>());
        let tables = Tables::new(ops, &cos, &sin);
        let (embeddings, gain) = (ops.up(&random.normals(VOCABULARY * D)), ops.up(&random.normals(D)));
        Network { heads, tables, embeddings, gain, layers, head }
    }

    fn buffers(&self, ops: &Ops<Dev>, rows: usize, paged: &Paged, format: KvFormat) -> Buffers<Dev> {
        Buffers {
            x: ops.stale(rows * D),
            qkv: ops.stale(rows * self.heads.qkv_width()),
            picked: ops.stale(rows * D),
            hidden: ops.stale(rows * D),
            tokens: ops.device().tokens(PROMPTS.len()).expect("memory for a test"),
            kv: self.layers.iter().map(|_| paged.stale_store(ops, self.heads, format)).collect(),
        }
    }

    /// From tokens to tokens.
    fn step(
        &self,
        queue: &mut Dev::Queue,
        b: &mut Buffers<Dev>,
        batch: &Dev::Batch,
        rows: usize,
        samples: usize,
    ) {
        let norm = || Norm { gain: &self.gain, eps: EPS };
        let index = Index::Tokens { batch, sampled: Some(&b.tokens) };
        queue.gather(Gather { table: &self.embeddings, index, width: D, out: &mut b.x });
        for (([qkv, o, gate_up, down], window), kv) in self.layers.iter().zip(WINDOWS).zip(&mut b.kv) {
            queue.linear(Linear {
                adapter: None,
                x: &b.x,
                rows,
                norm: Some(norm()),
                w: qkv,
                bias: None,
                output: Output::Store,
                out: &mut b.qkv,
            });
            queue.attend(Attend {
                adapter: None,
                heads: Heads { window, ..self.heads },
                batch,
                qkv: &mut b.qkv,
                qk_norm: None,
                rope: self.tables.rope(),
                kv,
                o,
                x: &mut b.x,
                kept: None,
            });
            queue.mlp(Mlp {
                gate_up_adapter: None,
                down_adapter: None,
                x: &mut b.x,
                rows,
                norm: norm(),
                gate_up,
                down,
                pass: MlpPass::Forward,
            });
        }
        queue.gather(Gather { table: &b.x, index: Index::Sampled(batch), width: D, out: &mut b.picked });
        queue.rmsnorm(RmsNorm { x: &b.picked, rows: samples, norm: norm(), out: &mut b.hidden });
        queue.sample(Sample { hidden: &b.hidden, head: &self.head, batch, out: &mut b.tokens });
    }
}

#[test]
fn replayed_steps_give_the_bits_of_direct_ones() {
    let cpu = cpus(2).pop().expect("a level");
    check_replay(&cpu, Format::Int8, KvFormat::Bf16);
    check_owners(&cpu);
}

/// Decodes sequences twice, with steps that may be replayed and with direct ones. From step to step tokens,
/// positions, pages, sampled rows and who is in the batch change, and some tokens are those that the last
/// step sampled.
pub(crate) fn check_replay<Dev: Device>(ops: &Ops<Dev>, format: Format, kv_format: KvFormat) {
    // Other buffers, another key.
    static KEYS: AtomicU64 = AtomicU64::new(100);
    let key = KEYS.fetch_add(1, Ordering::Relaxed);
    let mut random = Random::new(22);
    let lengths = PROMPTS.map(|prompt| prompt + BATCHES.len() * ROUNDS + 1);
    let mut paged = Paged::scattered(&mut random, &lengths, 16);
    let network = Network::new(ops, format, lengths[2]);
    let prompt_rows = PROMPTS.iter().sum();
    let [mut replayed, mut direct] = [(); 2].map(|_| network.buffers(ops, prompt_rows, &paged, kv_format));
    let mut batch = ops.device().batch();

    let mut prompts = paged.batch(PROMPTS.into_iter().enumerate().map(|(i, len)| (i, 0..len)));
    prompts.tokens = random.ids(prompt_rows, VOCABULARY).into_iter().map(Token::Id).collect();
    prompts.sampled_rows = prompts.spans.iter().map(|span| (span.row + span.rows - 1) as u32).collect();
    prompts.samples = vec![SampleRow::greedy(); PROMPTS.len()];
    let (mut steps, mut spare) = (vec![prompts], paged.spare_page());
    // Tokens that came last, what the host knows of them, and the batch they came in.
    let (mut last, mut next, mut came_with): (Vec<Sampled>, _, Vec<usize>) =
        (vec![Sampled::default(); PROMPTS.len()], PROMPTS, (0..PROMPTS.len()).collect());
    for step in 0..=BATCHES.len() * ROUNDS {
        let rows = steps.pop().expect("one step at a time");
        let (count, samples) = (rows.rows(), rows.samples.len());
        let results = {
            let mut queue = ops.queue();
            queue.load(&mut batch, &rows);
            queue
                .replay(key, &batch, &mut |queue| network.step(queue, &mut replayed, &batch, count, samples));
            network.step(&mut queue, &mut direct, &batch, count, samples);
            [&replayed, &direct].map(|buffers| {
                let pending = queue.fetch(&buffers.tokens, samples).expect("sampled tokens");
                queue.wait(pending).expect("sampled tokens")
            })
        };
        let what = format!("{format} {kv_format:?} step {step}: {count} rows");
        let stream = |b: &Buffers<Dev>| ops.down(&b.x)[..count * D].to_vec();
        assert_bits(&what, &stream(&replayed), &stream(&direct));
        assert_eq!(results[0], results[1], "{what}");
        assert!(results[0].iter().all(|sampled| sampled.logp <= 0.0), "{what}: {:?}", results[0]);
        for (&sequence, sampled) in came_with.iter().zip(&results[0]) {
            last[sequence] = *sampled;
        }

        // Copy on write: a page of a sequence moves, with its content.
        let (moved, index) = (step % PROMPTS.len(), random.below(PROMPTS[step % PROMPTS.len()].div_ceil(16)));
        let old = paged.replace_page(moved, index, spare);
        for kv in replayed.kv.iter_mut().chain(&mut direct.kv) {
            ops.queue().copy_page(kv, old as usize, spare as usize);
        }
        spare = old;

        let members = BATCHES[step % BATCHES.len()];
        let mut rows = paged.batch(members.iter().map(|&i| (i, next[i]..next[i] + 1)));
        for (row, &sequence) in members.iter().enumerate() {
            // Every second time the host does not say what was sampled.
            let sampled = came_with.iter().position(|&i| i == sequence).filter(|_| step % 2 == 0);
            rows.tokens[row] = match sampled {
                Some(row) => Token::Sampled(row as u32),
                None => Token::Id(last[sequence].token),
            };
            next[sequence] += 1;
        }
        // Which rows are truncated changes more often than how many.
        let (round, few) = (step / BATCHES.len(), [members.len() / 2, 0, members.len() / 2, 1]);
        let truncated = few[round / 4 % few.len()];
        rows.sampled_rows = (0..members.len() as u32).collect();
        rows.sampled_rows.rotate_left(round % members.len());
        came_with = rows.sampled_rows.iter().map(|&row| members[row as usize]).collect();
        let row = |i: usize| SampleRow {
            temperature: 1.0,
            top_p: if (i + round) % members.len() < truncated { 0.6 } else { 1.0 },
            uniform: random.below(1 << 20) as f64 / (1 << 20) as f64,
            ..SampleRow::greedy()
        };
        rows.samples = (0..members.len()).map(row).collect();
        // So are those with biases, of which some steps have none.
        let biased = (0..members.len() as u32).filter(|row| (*row as usize + round) % 5 < round % 3);
        let bias =
            |row| Bias { row, token: row % 7, add: if round % 2 == 0 { f32::NEG_INFINITY } else { 3.0 } };
        rows.biases = biased.map(bias).collect();
        steps.push(rows);
    }
}

/// Steps of several owners that differ only in a later layer, of which one has inputs of its own there.
pub(crate) fn check_owners<Dev: Device>(ops: &Ops<Dev>) {
    let (rows, n) = (8, 64);
    let mut random = Random::new(5);
    let table = ops.up(&random.normals(50 * n));
    let weights: Vec<_> = (0..3).map(|_| ops.frozen(&random.normals(n * n), n, n, Format::Int8)).collect();
    let [mut x, mut middle, mut out] = [(); 3].map(|_| ops.stale(rows * n));
    let mut batch = ops.device().batch();
    let paged = Paged::scattered(&mut random, &vec![1; rows], 16);
    for step in 0..12 {
        let mut given = paged.batch((0..rows).map(|i| (i, 0..1)));
        given.tokens = random.ids(rows, 50).into_iter().map(Token::Id).collect();
        given.sampled_rows = random.ids(rows, rows);
        given.samples = sampling(vec![SampleRow::greedy(); rows]).samples;
        // Owners 0 and 1 have other second layers, owner 2 picks rows before its own.
        let owner = step % 3;
        let mut queue = ops.queue();
        queue.load(&mut batch, &given);
        let mut run = |queue: &mut Dev::Queue, out: &mut Dev::Tensor| {
            let linear = |queue: &mut Dev::Queue, x: &Dev::Tensor, w, out: &mut Dev::Tensor| {
                queue.linear(Linear {
                    adapter: None,
                    x,
                    rows,
                    norm: None,
                    w,
                    bias: None,
                    output: Output::Store,
                    out,
                });
            };
            let index = Index::Tokens { batch: &batch, sampled: None };
            queue.gather(Gather { table: &table, index, width: n, out: &mut x });
            linear(queue, &x, &weights[0], &mut middle);
            match owner {
                2 => {
                    let index = Index::Sampled(&batch);
                    queue.gather(Gather { table: &middle, index, width: n, out: &mut x });
                }
                _ => queue.copy(&middle, &mut x, rows * n),
            }
            linear(queue, &x, &weights[1 + owner % 2], out);
        };
        queue.replay(owner as u64, &batch, &mut |queue| run(queue, &mut out));
        let replayed = queue.read(&out, rows * n).expect("results");
        run(&mut queue, &mut out);
        assert_eq!(replayed, queue.read(&out, rows * n).expect("results"), "step {step}");
    }
}
