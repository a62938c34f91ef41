//! [`Queue`] for the CPU: every operation hands over to its kernels and is done when it returns.

use super::buf::Aligned;
use super::device::{Cpu, CpuBatch, CpuTokens, CpuWeight, Forward};
use super::gemm::{self, Mode};
use super::kv::KvPages;
use super::moments::CpuMoments;
use super::norm::InputGradient;
use super::{
    Context, adamw, adapter, attention, attention_backward, canonical, elementwise, frozen, head, norm,
    sample, top,
};
use crate::checksum;
use crate::collective::{Pieces, bytes_of, bytes_of_mut};
use crate::ops::*;
use crate::queue::Queue;
use crate::types::{Batch, Bias, DeviceError, HeadOutput, Heads, Moments, Rows, Sampled, Token};
use std::sync::Arc;

/// Operations on the CPU, in order.
pub struct CpuQueue {
    device: Arc<Cpu>,
}

impl CpuQueue {
    /// A queue of this device.
    pub fn new(device: Arc<Cpu>) -> CpuQueue {
        CpuQueue { device }
    }

    fn ctx(&self) -> &Context {
        &self.device.ctx
    }
}

impl Queue for CpuQueue {
    type Device = Cpu;

    fn device(&self) -> &Arc<Cpu> {
        &self.device
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn write(&mut self, tensor: &mut Aligned<f32>, values: &[f32]) {
        tensor[..values.len()].copy_from_slice(values);
    }

    fn read(&mut self, tensor: &Aligned<f32>, len: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(tensor[..len].to_vec())
    }

    fn copy(&mut self, from: &Aligned<f32>, to: &mut Aligned<f32>, len: usize) {
        elementwise::copy(self.ctx(), &from[..len], &mut to[..len]);
    }

    fn clear(&mut self, tensor: &mut Aligned<f32>, len: usize) {
        elementwise::clear(self.ctx(), &mut tensor[..len]);
    }

    fn fill_random(&mut self, tensor: &mut Aligned<f32>, seed: u64, factor: f32) {
        elementwise::fill_random(self.ctx(), tensor, seed, factor);
    }

    fn spread(&mut self, args: Spread<Cpu>) {
        adapter::spread(args);
    }

    fn export(&mut self, weight: &CpuWeight, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        canonical::export(self.ctx(), weight, to);
        Ok(())
    }

    fn import(&mut self, bytes: &[u8], to: &mut CpuWeight) -> Result<(), DeviceError> {
        crate::canonical::check(canonical::shape(to), bytes.len())?;
        canonical::import(self.ctx(), bytes, to);
        Ok(())
    }

    fn pack(&mut self, args: Pack<Cpu>) -> Result<(), DeviceError> {
        let Pack { from, rounding, copy, to } = args;
        let ctx = self.ctx();
        match (&mut to.forward, copy) {
            (Forward::Quantized(forward), Some(copy)) => forward.fill_and_copy(ctx, from, rounding, copy)?,
            (Forward::Quantized(forward), None) => forward.fill(ctx, from, rounding)?,
            (Forward::Float(forward), copy) => {
                if let Some(copy) = copy {
                    elementwise::copy(ctx, from, &mut copy[..from.len()]);
                }
                forward.fill(ctx, from, true);
            }
        }
        if let Some(backward) = &mut to.backward {
            backward.fill(ctx, from, false);
        }
        Ok(())
    }

    fn load(&mut self, batch: &mut CpuBatch, rows: &Batch) {
        Bias::check(&rows.biases, rows.samples.len());
        batch.0.clone_from(rows);
    }

    fn replay(&mut self, _key: u64, _batch: &CpuBatch, run: &mut dyn FnMut(&mut Self)) {
        run(self);
    }

    fn gather(&mut self, args: Gather<Cpu>) {
        let Gather { table, index, width, out } = args;
        with_rows(index, |rows| elementwise::gather(self.ctx(), table, rows, width, out));
    }

    fn scatter_add(&mut self, args: ScatterAdd<Cpu>) {
        let ScatterAdd { rows, index, width, table } = args;
        with_rows(index, |at| elementwise::scatter_add(self.ctx(), rows, at, width, table));
    }

    fn rmsnorm(&mut self, args: RmsNorm<Cpu>) {
        let RmsNorm { x, rows, norm: Norm { gain, eps }, out } = args;
        norm::forward(self.ctx(), x, gain, Rows::dense(rows, gain.len()), eps, out);
    }

    fn rmsnorm_backward(&mut self, args: RmsNormBackward<Cpu>) {
        let RmsNormBackward { x, rows, norm, dy, dx } = args;
        norm_backward(self.ctx(), x, Rows::dense(rows, norm.gain.len()), norm, dy, InputGradient::Add(dx));
    }

    fn linear(&mut self, args: Linear<Cpu>) {
        let Linear { x, rows, norm, w, bias, adapter, output, out } = args;
        let (ctx, bias) = (self.ctx(), bias.map(|b| &**b));
        let multiply = |w: &CpuWeight, bias: Option<&[f32]>, mode: Mode, out: &mut [f32]| match &norm {
            Some(Norm { gain, eps }) => {
                gemm::norm_matmul(ctx, x, gain, *eps, rows, w.right(), bias, mode, out);
            }
            None => gemm::matmul(ctx, x, rows, w.right(), bias, mode, out),
        };
        multiply(w, bias, output.into(), out);
        adapter::forward(ctx, adapter, rows, |a, u| multiply(a, None, Mode::Store, u), out);
    }

    fn linear_backward(&mut self, args: LinearBackward<Cpu>) {
        let LinearBackward { x, rows, norm, w, adapter, dy, dw, dbias, dx } = args;
        let ctx = self.ctx();
        let Some(norm) = norm else {
            weight_gradients(ctx, x, dy, rows, w, dw, dbias);
            match (dx, adapter) {
                (Some(dx), adapter) => {
                    frozen::input_gradient(ctx, dy, rows, w, dx);
                    adapter_backward(ctx, adapter, x, dy, rows, dx);
                }
                (None, None) => (),
                (None, Some(_)) => panic!("an adapter gives the gradient of its input"),
            }
            return;
        };
        let Some(dx) = dx else { panic!("a linear layer after a norm gives the gradient of its input") };
        normed_backward(ctx, x, rows, norm, w, adapter, dy, dw, dbias, dx);
    }

    fn mlp(&mut self, args: Mlp<Cpu>) {
        let Mlp { x, rows, norm, gate_up, down, gate_up_adapter, down_adapter, pass } = args;
        let Norm { gain, eps } = norm;
        let ctx = self.ctx();
        let (kept, keep_only) = pass.split();
        let mut workspace = ctx.scratch.take(if kept.is_some() { 0 } else { rows * gate_up.n });
        let projected: &mut [f32] = match kept {
            Some(kept) => kept,
            None => workspace.floats(),
        };
        let first = |w: &CpuWeight, out: &mut [f32]| {
            gemm::norm_matmul(ctx, x, gain, eps, rows, w.right(), None, Mode::Store, out);
        };
        first(gate_up, projected);
        adapter::forward(ctx, gate_up_adapter, rows, first, projected);
        assert_eq!(gate_up.n, 2 * down.k, "mlp: widths");
        if keep_only {
            return;
        }
        gemm::swiglu_matmul(ctx, projected, rows, down.right(), Mode::Add, x);
        let second = |w: &CpuWeight, out: &mut [f32]| {
            gemm::swiglu_matmul(ctx, projected, rows, w.right(), Mode::Store, out);
        };
        adapter::forward(ctx, down_adapter, rows, second, x);
    }

    fn mlp_backward(&mut self, args: MlpBackward<Cpu>) {
        let MlpBackward { x, rows, norm, gate_up, down, kept, dgate_up, ddown, dx, .. } = args;
        let (ctx, width) = (self.ctx(), down.k);
        let mut workspace = ctx.scratch.take(rows * width);
        let activated = workspace.floats();
        frozen::input_gradient(ctx, dx, rows, down, activated);
        let mut du = ctx.scratch.take(args.down_adapter.as_ref().map_or(0, |adapter| rows * adapter.a.n));
        if let Some(adapter) = &args.down_adapter {
            adapter::input_gradient(ctx, adapter, dx, rows, du.floats(), activated);
        }
        elementwise::swiglu_backward(ctx, kept, activated, rows, width);
        weight_gradients(ctx, activated, dx, rows, down, ddown, None);
        if let Some(adapter) = args.down_adapter {
            adapter::weight_gradients(ctx, adapter, activated, dx, rows, du.floats());
        }
        drop((workspace, du));
        normed_backward(ctx, x, rows, norm, gate_up, args.gate_up_adapter, kept, dgate_up, None, dx);
    }

    fn attend(&mut self, args: Attend<Cpu>) {
        let Attend { heads, batch: CpuBatch(batch), qkv, qk_norm, rope, kv, o, adapter, x, mut kept } = args;
        let (ctx, rows) = (self.ctx(), batch.rows());
        if let Some(QkNorm { q, k }) = qk_norm {
            if let Some(raw) = kept.as_mut().and_then(|kept| kept.raw.as_mut()) {
                let len = rows * heads.qkv_width();
                elementwise::copy(ctx, &qkv[..len], &mut raw[..len]);
            }
            let (queries, keys) = head_rows(heads, rows);
            norm::forward_in_place(ctx, qkv, q.gain, queries, q.eps);
            norm::forward_in_place(ctx, qkv, k.gain, keys, k.eps);
        }
        kv.rope_store(ctx, qkv, heads, &batch.positions, rope.cos, rope.sin, &batch.slots);
        let mut workspace = ctx.scratch.take(if kept.is_some() { 0 } else { rows * heads.q_width() });
        let (out, lse): (&mut [f32], Option<&mut [f32]>) = match kept {
            Some(KeptAttention { out, lse, .. }) => (out, Some(lse)),
            None => (workspace.floats(), None),
        };
        attention::forward(ctx, heads, qkv, kv, &batch.spans, &batch.pages, out, lse);
        gemm::matmul(ctx, out, rows, o.right(), None, Mode::Add, x);
        let project =
            |a: &CpuWeight, u: &mut [f32]| gemm::matmul(ctx, out, rows, a.right(), None, Mode::Store, u);
        adapter::forward(ctx, adapter, rows, project, x);
    }

    fn attend_backward(&mut self, args: AttendBackward<Cpu>) {
        let AttendBackward {
            heads,
            batch: CpuBatch(batch),
            qkv,
            qk_norm,
            rope,
            out,
            lse,
            o,
            adapter,
            dx,
            d_o,
            dqkv,
            ..
        } = args;
        let (ctx, rows) = (self.ctx(), batch.rows());
        weight_gradients(ctx, out, dx, rows, o, d_o, None);
        let mut workspace = ctx.scratch.take(rows * heads.q_width());
        let dout = workspace.floats();
        frozen::input_gradient(ctx, dx, rows, o, dout);
        adapter_backward(ctx, adapter, out, dx, rows, dout);
        attention_backward::backward(ctx, heads, qkv, &batch.spans, out, dout, lse, dqkv);
        let (width, rotated) = (heads.qkv_width(), heads.heads + heads.kv_heads);
        let Rope { cos, sin } = rope;
        elementwise::rope(ctx, dqkv, width, rotated, heads.head_dim, &batch.positions, cos, sin, true);
        if let Some(QkNormBackward { raw, q, k }) = qk_norm {
            let (queries, keys) = head_rows(heads, rows);
            norm_backward(ctx, raw, queries, q, dqkv, InputGradient::InPlace);
            norm_backward(ctx, raw, keys, k, dqkv, InputGradient::InPlace);
        }
    }

    fn copy_page(&mut self, kv: &mut KvPages, from: usize, to: usize) {
        kv.copy_page(from, to);
    }

    fn head(&mut self, args: Head<Cpu>) -> Result<HeadOutput, DeviceError> {
        let Head { hidden, head, targets, temperature } = args;
        Ok(head::forward(self.ctx(), hidden, head.right(), targets, temperature))
    }

    fn head_backward(&mut self, args: HeadBackward<Cpu>) {
        let HeadBackward { hidden, head, trained, targets, temperature, out, gradient, dhidden, dweight } =
            args;
        let trained = (trained.float().precision, trained.transposed());
        let dweight = dweight.map(|dweight| &mut **dweight);
        let (ctx, head) = (self.ctx(), head.right());
        head::backward(ctx, hidden, head, trained, targets, temperature, out, gradient, dhidden, dweight);
    }

    fn sample(&mut self, args: Sample<Cpu>) {
        let Sample { hidden, head, batch: CpuBatch(batch), out: CpuTokens(out) } = args;
        let sampled = sample::sample(self.ctx(), hidden, head.right(), &batch.samples, &batch.biases);
        out[..sampled.len()].copy_from_slice(&sampled);
    }

    fn top(&mut self, args: Top<Cpu>) -> Result<Vec<Vec<(u32, f32)>>, DeviceError> {
        let Top { hidden, head, factors, count } = args;
        Ok(top::top(self.ctx(), hidden, head.right(), factors, count))
    }

    fn fetch(&mut self, tokens: &CpuTokens, rows: usize) -> Result<Vec<Sampled>, DeviceError> {
        Ok(tokens.0[..rows].to_vec())
    }

    fn wait(&mut self, pending: Vec<Sampled>) -> Result<Vec<Sampled>, DeviceError> {
        Ok(pending)
    }

    fn row_dots(&mut self, args: RowDots<Cpu>) -> Result<Vec<f32>, DeviceError> {
        let RowDots { hidden, rows, w } = args;
        let mut out = vec![0.0; rows];
        elementwise::row_dots(self.ctx(), hidden, rows, w, &mut out);
        Ok(out)
    }

    fn row_dots_backward(&mut self, args: RowDotsBackward<Cpu>) {
        let RowDotsBackward { hidden, w, gradient, dhidden, dw } = args;
        elementwise::row_dots_backward(self.ctx(), hidden, gradient.len(), w, gradient, dhidden, dw);
    }

    fn adamw(&mut self, args: Update<Cpu>) {
        let Update { adamw, w, g, at, moments } = args;
        adamw::update(self.ctx(), &adamw, w, g, at, moments);
    }

    fn read_moments(&mut self, from: &CpuMoments) -> Result<Moments, DeviceError> {
        Ok(from.read())
    }

    fn write_moments(&mut self, to: &mut CpuMoments, from: &Moments) -> Result<(), DeviceError> {
        to.write(from)
    }

    fn add(&mut self, from: &Aligned<f32>, to: &mut Aligned<f32>, len: usize) {
        elementwise::add(self.ctx(), &from[..len], &mut to[..len]);
    }

    fn drain(&mut self, from: &mut Aligned<f32>, to: &mut Aligned<f32>, len: usize) {
        elementwise::drain(self.ctx(), &mut from[..len], &mut to[..len]);
    }

    fn add_pieces(&mut self, args: AddPieces<Cpu>) {
        let AddPieces { pieces, count, len, to, at } = args;
        elementwise::add_pieces(self.ctx(), &pieces[..count * len], count, &mut to[at..at + len]);
    }

    fn narrow(&mut self, args: Narrow<Cpu>) {
        let Narrow { from, len, to, at } = args;
        assert!(at.is_multiple_of(2), "narrow: from {at} on");
        elementwise::narrow(self.ctx(), &from[..len], &mut to[at / 2..(at + len).div_ceil(2)]);
    }

    fn widen(&mut self, args: Widen<Cpu>) {
        let Widen { from, to, len } = args;
        elementwise::widen(self.ctx(), &from[..len.div_ceil(2)], &mut to[..len]);
    }

    fn sum_squares(&mut self, tensors: &[&Aligned<f32>]) -> Result<f64, DeviceError> {
        let blocks: Vec<Vec<f64>> = tensors.iter().map(|x| adamw::block_squares(self.ctx(), x)).collect();
        self.add_block_squares(&blocks)
    }

    fn block_squares(&mut self, slices: &[Slice<Cpu>]) -> Result<Vec<Vec<f64>>, DeviceError> {
        let blocks = |s: &Slice<Cpu>| adamw::block_squares(self.ctx(), &s.tensor[s.at..s.at + s.len]);
        Ok(slices.iter().map(blocks).collect())
    }

    fn add_block_squares(&mut self, blocks: &[Vec<f64>]) -> Result<f64, DeviceError> {
        Ok(blocks.iter().map(|blocks| blocks.iter().sum::<f64>()).sum())
    }

    fn checksum(&mut self, tensor: &Aligned<f32>) -> Result<u64, DeviceError> {
        Ok(checksum::on(&self.ctx().pool, tensor))
    }

    fn begin_exchange(&mut self, exchange: Exchange<Cpu>) -> Result<(), DeviceError> {
        match exchange {
            Exchange::AllToAll(tensors) => {
                let Some(ranks) = tensors.first().map(|first| first.ranks) else { return Ok(()) };
                let mut together = ranks.together();
                for AllToAll { from, cuts, into, .. } in tensors {
                    let pieces = Pieces::new(cuts, ranks.size(), from.len());
                    together.all_to_all(bytes_of(from), &pieces, bytes_of_mut(into));
                }
                together.exchange()?;
            }
            Exchange::AllGather(tensors) => {
                let Some(ranks) = tensors.first().map(|first| first.ranks) else { return Ok(()) };
                let mut together = ranks.together();
                for AllGather { cuts, tensor, .. } in tensors {
                    let pieces = Pieces::new(cuts, ranks.size(), tensor.len());
                    together.all_gather(&pieces, bytes_of_mut(tensor));
                }
                together.exchange()?;
            }
            Exchange::Broadcast(Broadcast { ranks, root, tensor }) => {
                ranks.broadcast(root, bytes_of_mut(tensor))?;
            }
        }
        Ok(())
    }

    fn join_exchanges(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Calls `use_rows` with the rows that an index names.
fn with_rows(index: Index<Cpu>, use_rows: impl FnOnce(&[u32])) {
    match index {
        Index::Rows(rows) => use_rows(rows),
        Index::Sampled(CpuBatch(batch)) => use_rows(&batch.sampled_rows),
        Index::Tokens { batch: CpuBatch(batch), sampled } => {
            let id = |token: &Token| match (token, sampled) {
                (Token::Id(id), _) => *id,
                (Token::Sampled(row), Some(CpuTokens(sampled))) => sampled[*row as usize].token,
                (Token::Sampled(row), None) => panic!("the token of row {row} was not sampled"),
            };
            use_rows(&batch.tokens.iter().map(id).collect::<Vec<_>>());
        }
    }
}

/// The query heads, then the key heads, inside rows of `[rows, qkv]`.
fn head_rows(heads: Heads, rows: usize) -> (Rows, Rows) {
    let (stride, width) = (heads.qkv_width(), heads.head_dim);
    let queries = Rows { start: 0, outer: rows, stride, per: heads.heads, width };
    (queries, Rows { start: heads.q_width(), per: heads.kv_heads, ..queries })
}

fn norm_backward(
    ctx: &Context,
    x: &[f32],
    rows: Rows,
    norm: NormBackward<Cpu>,
    dy: &mut [f32],
    dx: InputGradient,
) {
    let NormBackward { gain, eps, dgain } = norm;
    norm::backward(ctx, x, gain, rows, eps, dy, dx, dgain.map(|dgain| &mut **dgain));
}

/// `dw += dy^T x`, `dbias += sum dy`, where they are asked for.
fn weight_gradients(
    ctx: &Context,
    x: &[f32],
    dy: &[f32],
    rows: usize,
    w: &CpuWeight,
    dw: Option<&mut Aligned<f32>>,
    dbias: Option<&mut Aligned<f32>>,
) {
    if let Some(dw) = dw {
        gemm::weight_gradient(ctx, w.float().precision(), x, dy, rows, w.n, w.k, dw);
    }
    if let Some(dbias) = dbias {
        elementwise::column_sums(ctx, dy, rows, w.n, dbias);
    }
}

/// Backward of an adapter beside a linear layer whose input gradient is in `dx`.
fn adapter_backward(
    ctx: &Context,
    adapter: Option<AdapterBackward<Cpu>>,
    x: &[f32],
    dy: &[f32],
    rows: usize,
    dx: &mut [f32],
) {
    let Some(adapter) = adapter else { return };
    let mut du = ctx.scratch.take(rows * adapter.a.n);
    adapter::input_gradient(ctx, &adapter, dy, rows, du.floats(), dx);
    adapter::weight_gradients(ctx, adapter, x, dy, rows, du.floats());
}

/// Backward of `norm(x) W^T (+ bias)`, with `dx +=` the gradient of the norm's input.
fn normed_backward(
    ctx: &Context,
    x: &[f32],
    rows: usize,
    norm: NormBackward<Cpu>,
    w: &CpuWeight,
    adapter: Option<AdapterBackward<Cpu>>,
    dy: &[f32],
    dw: Option<&mut Aligned<f32>>,
    dbias: Option<&mut Aligned<f32>>,
    dx: &mut [f32],
) {
    let shape = Rows::dense(rows, w.k);
    let mut workspace = ctx.scratch.take(rows * w.k);
    let normed = workspace.floats();
    let mut dnormed = ctx.scratch.take(if adapter.is_some() { rows * w.k } else { 0 });
    if dw.is_some() || dbias.is_some() || adapter.is_some() {
        norm::forward(ctx, x, norm.gain, shape, norm.eps, normed);
        weight_gradients(ctx, normed, dy, rows, w, dw, dbias);
    }
    let dnormed = match adapter {
        Some(adapter) => {
            let dnormed = dnormed.floats();
            frozen::input_gradient(ctx, dy, rows, w, dnormed);
            adapter_backward(ctx, Some(adapter), normed, dy, rows, dnormed);
            dnormed
        }
        None => {
            frozen::input_gradient(ctx, dy, rows, w, normed);
            normed
        }
    };
    norm_backward(ctx, x, shape, norm, dnormed, InputGradient::Add(dx));
}

impl From<Output> for Mode {
    fn from(output: Output) -> Mode {
        match output {
            Output::Store => Mode::Store,
            Output::Add => Mode::Add,
        }
    }
}
