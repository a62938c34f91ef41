//! [`Backend`] for the CPU: every operation hands over to its kernel.

use super::buf::{Aligned, out_of_memory};
use super::gemm::{self, Mode, PackedB, Precision, Right};
use super::kv::{self, KvPages};
use super::level::{Level, LevelError};
use super::quant::QuantB;
use super::{Context, adamw, attention, attention_backward, elementwise, head, norm, sample};
use crate::backend::*;
use crate::{Format, Rounding, checksum};

/// The CPU as a [`Backend`].
pub struct Cpu {
    ctx: Context,
}

/// Packed weights of a linear layer.
pub struct CpuWeight {
    n: usize,
    k: usize,
    forward: Forward,
    /// For the gradient of the input, where the weights are trained.
    backward: Option<PackedB>,
}

/// Weights as the forward product reads them.
enum Forward {
    Float(PackedB),
    Quantized(QuantB),
}

impl Cpu {
    /// All threads of the machine (or `QURL_THREADS`) at its best level (or `QURL_CPU`).
    pub fn from_env() -> Result<Cpu, CpuError> {
        let available = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = match std::env::var("QURL_THREADS") {
            Ok(text) if !text.is_empty() => match text.parse() {
                Ok(threads) if (1..=1024).contains(&threads) => threads,
                _ => return Err(CpuError::Threads(text)),
            },
            _ => available,
        };
        Ok(Cpu::new(Level::from_env()?, threads))
    }

    /// A given level and number of threads.
    pub fn new(level: Level, threads: usize) -> Cpu {
        Cpu { ctx: Context::new(level, threads) }
    }

    /// Level, threads and scratch memory of the kernels.
    pub fn context(&self) -> &Context {
        &self.ctx
    }
}

/// Why the CPU backend cannot be set up as asked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// `QURL_CPU` is wrong.
    #[error(transparent)]
    Level(#[from] LevelError),
    /// `QURL_THREADS` is wrong.
    #[error("QURL_THREADS={0:?} is not a number of threads; expected 1 to 1024")]
    Threads(String),
}

impl Backend for Cpu {
    type Tensor = Aligned<f32>;
    type Weight = CpuWeight;
    type Kv = KvPages;
    /// Nothing is on its way: an operation is done when it returns.
    type Asked = Vec<Sampled>;

    fn describe(&self) -> String {
        format!("cpu, {} threads, {}", self.ctx.threads(), self.ctx.level())
    }

    fn zeros(&self, len: usize) -> Result<Self::Tensor, DeviceError> {
        let missing = || out_of_memory(len.saturating_mul(size_of::<f32>()), "a tensor");
        Aligned::try_zeros(len).ok_or_else(missing)
    }

    fn upload(&self, values: &[f32]) -> Result<Self::Tensor, DeviceError> {
        let mut tensor = self.zeros(values.len())?;
        tensor.copy_from_slice(values);
        Ok(tensor)
    }

    fn download(&self, tensor: &Self::Tensor, len: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(tensor[..len].to_vec())
    }

    fn write(&self, tensor: &mut Self::Tensor, values: &[f32]) {
        tensor[..values.len()].copy_from_slice(values);
    }

    fn copy(&self, from: &Self::Tensor, to: &mut Self::Tensor, len: usize) {
        elementwise::copy(&self.ctx, &from[..len], &mut to[..len]);
    }

    fn clear(&self, tensor: &mut Self::Tensor, len: usize) {
        tensor[..len].fill(0.0);
    }

    fn len(&self, tensor: &Self::Tensor) -> usize {
        <[f32]>::len(tensor)
    }

    fn fill_random(&self, tensor: &mut Self::Tensor, seed: u64, factor: f32) {
        elementwise::fill_random(&self.ctx, tensor, seed, factor);
    }

    fn pack(
        &self,
        weights: &Self::Tensor,
        n: usize,
        k: usize,
        format: Format,
        trained: bool,
    ) -> Result<CpuWeight, DeviceError> {
        let precision = match format {
            Format::F32 => Some(Precision::F32),
            Format::Bf16 => Some(Precision::Bf16),
            _ => None,
        };
        let (forward, backward) = match precision {
            Some(precision) => (
                Forward::Float(PackedB::new(&self.ctx, precision, k, n)?),
                trained.then(|| PackedB::new(&self.ctx, precision, n, k)).transpose()?,
            ),
            None if trained => {
                let reason = "quantized weights have no gradients; train in f32 or bf16".to_string();
                return Err(DeviceError::Pack { format, reason });
            }
            None => (Forward::Quantized(QuantB::new(&self.ctx, format, n, k)?), None),
        };
        let mut packed = CpuWeight { n, k, forward, backward };
        self.repack(weights, &mut packed)?;
        Ok(packed)
    }

    fn repack_rounded(
        &self,
        weights: &Self::Tensor,
        packed: &mut CpuWeight,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        match &mut packed.forward {
            Forward::Float(forward) => forward.fill(&self.ctx, weights, true),
            Forward::Quantized(forward) => forward.fill(&self.ctx, weights, rounding)?,
        }
        if let Some(backward) = &mut packed.backward {
            backward.fill(&self.ctx, weights, false);
        }
        Ok(())
    }

    fn repack_and_copy(
        &self,
        weights: &Self::Tensor,
        packed: &mut CpuWeight,
        rounding: Rounding,
        copy: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        if let Forward::Quantized(forward) = &mut packed.forward {
            return forward.fill_and_copy(&self.ctx, weights, rounding, copy);
        }
        self.copy(weights, copy, weights.len());
        self.repack_rounded(weights, packed, rounding)
    }

    fn weight_bytes(&self, packed: &CpuWeight) -> usize {
        match &packed.forward {
            Forward::Float(forward) => forward.bytes(),
            Forward::Quantized(forward) => forward.bytes(),
        }
    }

    fn gather(&self, table: &Self::Tensor, ids: &[u32], d: usize, out: &mut Self::Tensor) {
        elementwise::gather(&self.ctx, table, ids, d, out);
    }

    fn gather_tokens(
        &self,
        table: &Self::Tensor,
        ids: &[u32],
        drawn: &Self::Tensor,
        d: usize,
        out: &mut Self::Tensor,
    ) {
        if ids.iter().all(|&id| drawn_row(id).is_none()) {
            return self.gather(table, ids, d, out);
        }
        let token = |&id: &u32| drawn_row(id).map_or(id, |row| drawn[row * DRAWN_WORDS].to_bits());
        let tokens: Vec<u32> = ids.iter().map(token).collect();
        self.gather(table, &tokens, d, out);
    }

    fn scatter_add(&self, rows: &Self::Tensor, ids: &[u32], d: usize, table: &mut Self::Tensor) {
        elementwise::scatter_add(&self.ctx, rows, ids, d, table);
    }

    fn rmsnorm(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        out: &mut Self::Tensor,
    ) {
        norm::forward(&self.ctx, x, gain, Rows::dense(rows, width), eps, out);
    }

    fn rmsnorm_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        dy: &mut Self::Tensor,
        dx: &mut Self::Tensor,
        dgain: &mut Self::Tensor,
    ) {
        let dx = norm::InputGradient::Add(dx);
        norm::backward(&self.ctx, x, gain, Rows::dense(rows, width), eps, dy, dx, dgain);
    }

    fn head_norm(&self, x: &mut Self::Tensor, gain: &Self::Tensor, rows: Rows, eps: f32) {
        norm::forward_in_place(&self.ctx, x, gain, rows, eps);
    }

    fn head_norm_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: Rows,
        eps: f32,
        gradient: &mut Self::Tensor,
        dgain: &mut Self::Tensor,
    ) {
        norm::backward(&self.ctx, x, gain, rows, eps, gradient, norm::InputGradient::InPlace, dgain);
    }

    fn linear(
        &self,
        x: &Self::Tensor,
        rows: usize,
        w: &CpuWeight,
        bias: Option<&Self::Tensor>,
        output: Output,
        out: &mut Self::Tensor,
    ) {
        gemm::matmul(&self.ctx, x, rows, w.right(), bias.map(|b| &**b), output.into(), out);
    }

    fn norm_linear(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        eps: f32,
        w: &CpuWeight,
        bias: Option<&Self::Tensor>,
        normed: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        gemm::norm_matmul(&self.ctx, x, gain, eps, rows, w.right(), bias.map(|b| &**b), normed, out);
    }

    fn swiglu_linear(
        &self,
        gate_up: &Self::Tensor,
        rows: usize,
        width: usize,
        w: &CpuWeight,
        output: Output,
        activated: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        assert_eq!(width, w.k, "swiglu: width");
        gemm::swiglu_matmul(&self.ctx, gate_up, rows, w.right(), output.into(), activated, out);
    }

    fn linear_input_gradient(&self, dy: &Self::Tensor, rows: usize, w: &CpuWeight, dx: &mut Self::Tensor) {
        gemm::matmul(&self.ctx, dy, rows, w.transposed(), None, Mode::Store, dx);
    }

    fn linear_weight_gradient(
        &self,
        x: &Self::Tensor,
        dy: &Self::Tensor,
        rows: usize,
        w: &CpuWeight,
        dw: &mut Self::Tensor,
        dbias: Option<&mut Self::Tensor>,
    ) {
        gemm::weight_gradient(&self.ctx, w.float().precision(), x, dy, rows, w.n, w.k, dw);
        if let Some(dbias) = dbias {
            elementwise::column_sums(&self.ctx, dy, rows, w.n, dbias);
        }
    }

    fn rope(
        &self,
        x: &mut Self::Tensor,
        stride: usize,
        heads: usize,
        head_dim: usize,
        positions: &[u32],
        rope: Rope<Self::Tensor>,
        inverse: bool,
    ) {
        elementwise::rope(&self.ctx, x, stride, heads, head_dim, positions, rope.cos, rope.sin, inverse);
    }

    fn kv_pages(
        &self,
        format: KvFormat,
        pages: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<KvPages, DeviceError> {
        Ok(KvPages::new(format, pages, page_size, kv_heads, head_dim))
    }

    fn kv_page_bytes(&self, format: KvFormat, page_size: usize, kv_heads: usize, head_dim: usize) -> usize {
        KvPages::page_bytes(format, page_size, kv_heads, head_dim)
    }

    fn round_kv(&self, qkv: &mut Self::Tensor, rows: usize, heads: Heads, format: KvFormat) {
        kv::round(&self.ctx, qkv, rows, heads, format);
    }

    fn kv_write(&self, qkv: &Self::Tensor, heads: Heads, slots: &[u32], kv: &mut KvPages) {
        kv.write(&self.ctx, qkv, heads.qkv_width(), heads.heads * heads.head_dim, slots);
    }

    fn rope_store(
        &self,
        qkv: &mut Self::Tensor,
        heads: Heads,
        positions: &[u32],
        rope: Rope<Self::Tensor>,
        slots: &[u32],
        kv: &mut KvPages,
        format: KvFormat,
    ) {
        assert_eq!(format, kv.format(), "kv store: format");
        kv.rope_store(&self.ctx, qkv, heads, positions, rope.cos, rope.sin, slots);
    }

    fn kv_copy_page(&self, kv: &mut KvPages, from: usize, to: usize) {
        kv.copy_page(from, to);
    }

    fn attention(
        &self,
        heads: Heads,
        qkv: &Self::Tensor,
        kv: &KvPages,
        spans: &[Span],
        pages: &[u32],
        out: &mut Self::Tensor,
        lse: Option<&mut Self::Tensor>,
    ) {
        attention::forward(&self.ctx, heads, qkv, kv, spans, pages, out, lse.map(|lse| &mut **lse));
    }

    fn attention_backward(
        &self,
        heads: Heads,
        _format: KvFormat,
        qkv: &Self::Tensor,
        spans: &[Span],
        out: &Self::Tensor,
        dout: &Self::Tensor,
        lse: &Self::Tensor,
        dqkv: &mut Self::Tensor,
    ) {
        attention_backward::backward(&self.ctx, heads, qkv, spans, out, dout, lse, dqkv);
    }

    fn swiglu(&self, gate_up: &Self::Tensor, rows: usize, f: usize, out: &mut Self::Tensor) {
        elementwise::swiglu(&self.ctx, gate_up, rows, f, out);
    }

    fn swiglu_backward(&self, gate_up: &mut Self::Tensor, out: &mut Self::Tensor, rows: usize, f: usize) {
        elementwise::swiglu_backward(&self.ctx, gate_up, out, rows, f);
    }

    fn head(
        &self,
        hidden: &Self::Tensor,
        head: &CpuWeight,
        targets: &[u32],
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        Ok(head::forward(&self.ctx, hidden, head.right(), targets, temperature))
    }

    fn draw(&self, hidden: &Self::Tensor, head: &CpuWeight, rows: &[SampleRow], out: &mut Self::Tensor) {
        let sampled = sample::sample(&self.ctx, hidden, head.right(), rows);
        for (words, Sampled { token, logp, entropy }) in out.chunks_exact_mut(DRAWN_WORDS).zip(sampled) {
            words.copy_from_slice(&[f32::from_bits(token), logp, entropy]);
        }
    }

    fn ask_drawn(&self, out: &Self::Tensor, rows: usize) -> Result<Vec<Sampled>, DeviceError> {
        let one = |words: &[f32]| Sampled { token: words[0].to_bits(), logp: words[1], entropy: words[2] };
        Ok(out[..rows * DRAWN_WORDS].chunks_exact(DRAWN_WORDS).map(one).collect())
    }

    fn drawn(&self, asked: Vec<Sampled>) -> Result<Vec<Sampled>, DeviceError> {
        Ok(asked)
    }

    fn head_backward(
        &self,
        hidden: &Self::Tensor,
        head: &CpuWeight,
        targets: &[u32],
        temperature: f32,
        out: &HeadOutput,
        gradient: HeadGradient,
        dhidden: &mut Self::Tensor,
        dweight: &mut Self::Tensor,
    ) {
        let transposed = head.transposed();
        head::backward(
            &self.ctx,
            hidden,
            head.float(),
            transposed,
            targets,
            temperature,
            out,
            gradient,
            dhidden,
            dweight,
        );
    }

    fn row_dots(
        &self,
        hidden: &Self::Tensor,
        rows: usize,
        w: &Self::Tensor,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut out = vec![0.0; rows];
        elementwise::row_dots(&self.ctx, hidden, rows, w, &mut out);
        Ok(out)
    }

    fn row_dots_backward(
        &self,
        hidden: &Self::Tensor,
        rows: usize,
        w: &Self::Tensor,
        gradient: &[f32],
        dhidden: &mut Self::Tensor,
        dw: &mut Self::Tensor,
    ) {
        elementwise::row_dots_backward(&self.ctx, hidden, rows, w, gradient, dhidden, dw);
    }

    fn adamw(
        &self,
        constants: &AdamW,
        w: &mut Self::Tensor,
        g: &Self::Tensor,
        m: &mut Self::Tensor,
        v: &mut Self::Tensor,
    ) {
        adamw::update(&self.ctx, constants, w, g, m, v);
    }

    fn sum_squares(&self, tensors: &[&Self::Tensor]) -> Result<f64, DeviceError> {
        Ok(tensors.iter().map(|x| adamw::sum_squares(&self.ctx, x)).sum())
    }

    fn checksum(&self, x: &Self::Tensor) -> Result<u64, DeviceError> {
        Ok(checksum::on(&self.ctx.pool, x))
    }
}

impl From<Output> for Mode {
    fn from(output: Output) -> Mode {
        match output {
            Output::Store => Mode::Store,
            Output::Add => Mode::Add,
        }
    }
}

impl CpuWeight {
    fn right(&self) -> Right<'_> {
        match &self.forward {
            Forward::Float(forward) => forward.into(),
            Forward::Quantized(forward) => forward.into(),
        }
    }

    fn float(&self) -> &PackedB {
        match &self.forward {
            Forward::Float(forward) => forward,
            Forward::Quantized(_) => panic!("quantized weights have no gradients"),
        }
    }

    fn transposed(&self) -> &PackedB {
        match &self.backward {
            Some(packed) => packed,
            None => panic!("weights packed for inference have no input gradient"),
        }
    }
}
