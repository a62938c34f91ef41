//! [`Backend`] for CUDA: every operation launches its kernels.

use super::drawn::{self, CudaDrawn};
use super::ffi::DevicePtr;
use super::flash::{self, Decoded};
use super::gemm::Packed;
use super::gpu::Gpu;
use super::head;
use super::kv::{self, CudaKv};
use super::launch::{Arg, args};
use super::linear::{self, CudaWeight, Rows as Left};
use super::linear_backward;
use super::memory::{Buffer, Slot};
use super::sums;
use crate::backend::*;
use crate::{Format, Rounding};
use std::sync::Arc;

/// Largest head dimension.
const MAX_HEAD_DIM: usize = 256;

/// A device as a [`Backend`].
pub struct Cuda {
    gpu: Arc<Gpu>,
}

/// Numbers on the device.
pub struct CudaTensor {
    buffer: Buffer,
    len: usize,
}

impl CudaTensor {
    pub(super) fn at(&self) -> DevicePtr {
        self.buffer.at()
    }
}

impl Cuda {
    /// The first device of the machine; an error where there is none or its driver or compiler is missing.
    pub fn open() -> Result<Cuda, DeviceError> {
        Cuda::open_as(u32::MAX)
    }

    /// The same, with instructions of at most the architecture `newest` (80 for compute capability 8.0): how tests see
    /// what older devices do.
    pub fn open_as(newest: u32) -> Result<Cuda, DeviceError> {
        Ok(Cuda { gpu: Arc::new(Gpu::open_as(newest)?) })
    }

    /// Whether the machine has a driver, usable or not, or is said to have one.
    pub fn has_driver() -> bool {
        super::ffi::has_driver()
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn each(&self, file: &'static str, kernel: &'static str, count: usize, args: &[Arg]) {
        self.gpu.launch(file, kernel, [count.div_ceil(256), 1, 1], 256, 0, args);
    }
}

fn check(what: &str, fits: bool) {
    assert!(fits, "{what}: shapes");
}

fn address(tensor: Option<&CudaTensor>) -> DevicePtr {
    tensor.map_or(0, CudaTensor::at)
}

impl Backend for Cuda {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Kv = CudaKv;
    type Asked = CudaDrawn;

    fn describe(&self) -> String {
        let (free, total) = self.gpu.memory_info();
        let (name, sms) = (self.gpu.name(), self.gpu.multiprocessors());
        format!("cuda, {name}, {sms} multiprocessors, {} of {} MiB free", free >> 20, total >> 20)
    }

    fn zeros(&self, len: usize) -> Result<CudaTensor, DeviceError> {
        Ok(CudaTensor { buffer: Buffer::zeros(&self.gpu, 4 * len, "a tensor")?, len })
    }

    fn upload(&self, values: &[f32]) -> Result<CudaTensor, DeviceError> {
        let tensor = CudaTensor {
            buffer: Buffer::new(&self.gpu, size_of_val(values), "a tensor")?,
            len: values.len(),
        };
        self.gpu.write_values(tensor.at(), values);
        Ok(tensor)
    }

    fn download(&self, tensor: &CudaTensor, len: usize) -> Result<Vec<f32>, DeviceError> {
        check("download", len <= tensor.len);
        let mut values = vec![0.0; len];
        self.gpu.read(tensor.at(), &mut values)?;
        Ok(values)
    }

    fn write(&self, tensor: &mut CudaTensor, values: &[f32]) {
        check("write", values.len() <= tensor.len);
        self.gpu.write_values(tensor.at(), values);
    }

    fn copy(&self, from: &CudaTensor, to: &mut CudaTensor, len: usize) {
        check("copy", len <= from.len && len <= to.len);
        self.gpu.copy(from.at(), to.at(), 4 * len);
    }

    fn clear(&self, tensor: &mut CudaTensor, len: usize) {
        check("clear", len <= tensor.len);
        self.gpu.fill(tensor.at(), 0, 4 * len);
    }

    fn len(&self, tensor: &CudaTensor) -> usize {
        tensor.len
    }

    fn fill_random(&self, tensor: &mut CudaTensor, seed: u64, factor: f32) {
        self.each("elementwise", "random_fill", tensor.len, args![tensor.at(), tensor.len, seed, factor]);
    }

    fn memory(&self) -> Option<(usize, usize)> {
        Some(self.gpu.memory_info())
    }

    fn peak_memory(&self) -> Option<usize> {
        Some(self.gpu.peak_memory())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.gpu.wait()
    }

    fn bucket(&self, rows: usize) -> usize {
        match rows {
            0..=2 => rows,
            3..=64 => rows.next_multiple_of(4),
            65..=256 => rows.next_multiple_of(16),
            _ => rows.next_multiple_of(64),
        }
    }

    fn step(&self, of: u64, run: &mut dyn FnMut(Extent)) {
        self.gpu.step(of, run);
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn pack(
        &self,
        weights: &CudaTensor,
        n: usize,
        k: usize,
        format: Format,
        trained: bool,
    ) -> Result<CudaWeight, DeviceError> {
        let mut packed = CudaWeight::new(&self.gpu, n, k, format, trained)?;
        self.repack(weights, &mut packed)?;
        Ok(packed)
    }

    fn repack_rounded(
        &self,
        weights: &CudaTensor,
        packed: &mut CudaWeight,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        check("pack", weights.len >= packed.n * packed.k);
        packed.fill(&self.gpu, weights.at(), rounding)
    }

    fn weight_bytes(&self, packed: &CudaWeight) -> usize {
        packed.bytes()
    }

    fn gather(&self, table: &CudaTensor, ids: &[u32], d: usize, out: &mut CudaTensor) {
        let inside = ids.iter().all(|&id| (id as usize + 1) * d <= table.len);
        check("gather", inside && ids.len() * d <= out.len);
        let given = args![table.at(), self.gpu.stage(ids), d as u32, out.at()];
        self.gpu.launch_next("elementwise", "gather", [ids.len(), 1, 1], 256, 0, given);
    }

    fn gather_tokens(
        &self,
        table: &CudaTensor,
        ids: &[u32],
        drawn: &CudaTensor,
        d: usize,
        out: &mut CudaTensor,
    ) {
        let inside = |&id: &u32| match drawn_row(id) {
            Some(row) => (row + 1) * DRAWN_WORDS <= drawn.len,
            None => (id as usize + 1) * d <= table.len,
        };
        check("gather", ids.iter().all(inside) && ids.len() * d <= out.len);
        let given = args![table.at(), self.gpu.stage(ids), drawn.at(), d as u32, out.at()];
        self.gpu.launch_next("elementwise", "gather_tokens", [ids.len(), 1, 1], 256, 0, given);
    }

    fn scatter_add(&self, rows: &CudaTensor, ids: &[u32], d: usize, table: &mut CudaTensor) {
        let inside = ids.iter().all(|&id| (id as usize + 1) * d <= table.len);
        check("scatter", inside && ids.len() * d <= rows.len);
        // Rows of one target are added by one block, in their order.
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|&i| ids[i as usize]);
        let (mut targets, mut starts) = (Vec::new(), Vec::new());
        for (place, &i) in order.iter().enumerate() {
            if targets.last() != Some(&ids[i as usize]) {
                targets.push(ids[i as usize]);
                starts.push(place as u32);
            }
        }
        starts.push(order.len() as u32);
        let gpu = &self.gpu;
        let given = args![
            rows.at(),
            gpu.stage(&targets),
            gpu.stage(&starts),
            gpu.stage(&order),
            d as u32,
            table.at()
        ];
        gpu.launch("elementwise", "scatter_add", [targets.len(), 1, 1], 256, 0, given);
    }

    fn rmsnorm(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        width: usize,
        eps: f32,
        out: &mut CudaTensor,
    ) {
        check("rmsnorm", rows * width <= x.len && rows * width <= out.len && gain.len == width);
        let width = width as u32;
        let given = args![x.at(), gain.at(), 0u64, 1u32, width, width, eps, out.at()];
        self.gpu.launch_next("norm", "norm_forward", [rows, 1, 1], 256, 0, given);
    }

    fn rmsnorm_backward(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        width: usize,
        eps: f32,
        dy: &mut CudaTensor,
        dx: &mut CudaTensor,
        dgain: &mut CudaTensor,
    ) {
        let fits = [x.len, dy.len, dx.len].iter().all(|&len| rows * width <= len);
        check("rmsnorm backward", fits && gain.len == width && dgain.len == width);
        let rows = Rows::dense(rows, width);
        sums::norm_backward(&self.gpu, x.at(), gain.at(), rows, eps, dy.at(), dx.at(), dgain.at());
    }

    fn head_norm(&self, x: &mut CudaTensor, gain: &CudaTensor, rows: Rows, eps: f32) {
        check("head norm", rows.fits(x.len) && gain.len == rows.width);
        let Rows { start, outer, stride, per, width } = rows;
        let given =
            args![x.at(), gain.at(), start as u64, per as u32, stride as u32, width as u32, eps, x.at()];
        self.gpu.launch_next("norm", "norm_forward", [outer * per, 1, 1], 256, 0, given);
    }

    fn head_norm_backward(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: Rows,
        eps: f32,
        gradient: &mut CudaTensor,
        dgain: &mut CudaTensor,
    ) {
        let fits = rows.fits(x.len) && rows.fits(gradient.len);
        check("head norm backward", fits && gain.len == rows.width && dgain.len == rows.width);
        sums::norm_backward(
            &self.gpu,
            x.at(),
            gain.at(),
            rows,
            eps,
            gradient.at(),
            gradient.at(),
            dgain.at(),
        );
    }

    fn linear(
        &self,
        x: &CudaTensor,
        rows: usize,
        w: &CudaWeight,
        bias: Option<&CudaTensor>,
        output: Output,
        out: &mut CudaTensor,
    ) {
        check("linear", rows * w.k <= x.len && rows * w.n <= out.len && bias.is_none_or(|b| b.len >= w.n));
        let x = linear::left(&self.gpu, w.format, Left::Plain(x.at()), rows, w.k);
        linear::forward(&self.gpu, x, rows, w, address(bias), output, out.at());
    }

    fn norm_linear(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        eps: f32,
        w: &CudaWeight,
        bias: Option<&CudaTensor>,
        _normed: &mut CudaTensor,
        out: &mut CudaTensor,
    ) {
        check("linear", rows * w.k <= x.len && rows * w.n <= out.len && bias.is_none_or(|b| b.len >= w.n));
        check("rmsnorm", gain.len == w.k);
        let source = Left::Normed { x: x.at(), gain: gain.at(), eps, largest: 0 };
        let x = linear::left(&self.gpu, w.format, source, rows, w.k);
        linear::forward(&self.gpu, x, rows, w, address(bias), Output::Store, out.at());
    }

    fn swiglu_linear(
        &self,
        gate_up: &CudaTensor,
        rows: usize,
        width: usize,
        w: &CudaWeight,
        output: Output,
        _activated: &mut CudaTensor,
        out: &mut CudaTensor,
    ) {
        check("swiglu", width == w.k && rows * 2 * w.k <= gate_up.len && rows * w.n <= out.len);
        let x = linear::left(&self.gpu, w.format, Left::Swiglu(gate_up.at()), rows, w.k);
        linear::forward(&self.gpu, x, rows, w, 0, output, out.at());
    }

    fn mlp(
        &self,
        x: &mut CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        width: usize,
        eps: f32,
        gate_up: &CudaWeight,
        down: &CudaWeight,
        normed: &mut CudaTensor,
        projected: &mut CudaTensor,
        activated: &mut CudaTensor,
    ) {
        let together = |w: &Packed| w.format == down.format && w.takes_gates(&self.gpu);
        let Some(packed) = gate_up.tiles().filter(together) else {
            self.norm_linear(x, gain, rows, eps, gate_up, None, normed, projected);
            return self.swiglu_linear(projected, rows, width, down, Output::Add, activated, x);
        };
        let fits = rows * packed.k <= x.len && rows * packed.n <= projected.len && rows * down.n <= x.len;
        check("mlp", fits && gain.len == packed.k && packed.n == 2 * width && down.k == width);
        if gate_up.trained {
            let source = Left::Normed { x: x.at(), gain: gain.at(), eps, largest: 0 };
            linear::gates_and_ups(&self.gpu, source, rows, packed, projected.at());
            return self.swiglu_linear(projected, rows, width, down, Output::Add, activated, x);
        }
        let room = (projected.at(), 4 * projected.len);
        linear::mlp(&self.gpu, (gain.at(), eps), rows, packed, down, room, x.at());
    }

    fn linear_input_gradient(&self, dy: &CudaTensor, rows: usize, w: &CudaWeight, dx: &mut CudaTensor) {
        check("linear input gradient", rows * w.n <= dy.len && rows * w.k <= dx.len);
        let dy = linear::converted(&self.gpu, w.format, dy.at(), rows, w.n, Slot::Right);
        linear::input_gradient(&self.gpu, dy, rows, w, dx.at());
    }

    fn linear_weight_gradient(
        &self,
        x: &CudaTensor,
        dy: &CudaTensor,
        rows: usize,
        w: &CudaWeight,
        dw: &mut CudaTensor,
        dbias: Option<&mut CudaTensor>,
    ) {
        check("linear weight gradient", rows * w.k <= x.len && rows * w.n <= dy.len && w.n * w.k <= dw.len);
        if let Some(dbias) = dbias {
            sums::of_columns(&self.gpu, dy.at(), 0, rows, w.n, dbias.at());
        }
        let x = linear::converted(&self.gpu, w.format, x.at(), rows, w.k, Slot::Left);
        let dy = linear::converted(&self.gpu, w.format, dy.at(), rows, w.n, Slot::Right);
        linear::weight_gradient(&self.gpu, w.format, x, dy, rows, w.n, w.k, dw.at());
    }

    fn linear_backward(
        &self,
        x: &CudaTensor,
        dy: &CudaTensor,
        rows: usize,
        w: &CudaWeight,
        dw: &mut CudaTensor,
        dbias: Option<&mut CudaTensor>,
        dx: &mut CudaTensor,
    ) {
        check(
            "linear backward",
            rows * w.k <= x.len.min(dx.len) && rows * w.n <= dy.len && w.n * w.k <= dw.len,
        );
        check("linear backward bias", dbias.as_ref().is_none_or(|dbias| w.n <= dbias.len));
        let x = linear::converted(&self.gpu, w.format, x.at(), rows, w.k, Slot::Left);
        linear_backward::gradients(
            &self.gpu,
            x,
            dy.at(),
            rows,
            w,
            dw.at(),
            address(dbias.as_deref()),
            dx.at(),
        );
    }

    fn norm_linear_backward(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        eps: f32,
        w: &CudaWeight,
        dy: &CudaTensor,
        _normed: &mut CudaTensor,
        dw: &mut CudaTensor,
        dbias: Option<&mut CudaTensor>,
        dnormed: &mut CudaTensor,
    ) {
        let rows_fit = rows * w.n <= dy.len && rows * w.k <= x.len.min(dnormed.len);
        check("norm and linear backward", rows_fit && w.n * w.k <= dw.len && gain.len == w.k);
        check("norm and linear backward bias", dbias.as_ref().is_none_or(|dbias| w.n <= dbias.len));
        let x = linear_backward::normed(&self.gpu, x.at(), gain.at(), eps, rows, w);
        linear_backward::gradients(
            &self.gpu,
            x,
            dy.at(),
            rows,
            w,
            dw.at(),
            address(dbias.as_deref()),
            dnormed.at(),
        );
    }

    fn mlp_backward(
        &self,
        x: &CudaTensor,
        gain: &CudaTensor,
        rows: usize,
        width: usize,
        eps: f32,
        gate_up: &CudaWeight,
        down: &CudaWeight,
        dy: &CudaTensor,
        _normed: &mut CudaTensor,
        projected: &mut CudaTensor,
        activated: &mut CudaTensor,
        dgate_up: &mut CudaTensor,
        ddown: &mut CudaTensor,
        dnormed: &mut CudaTensor,
    ) {
        let rows_fit =
            rows * gate_up.n <= projected.len && rows * width <= activated.len && rows * down.n <= dy.len;
        let weights_fit = gate_up.n * gate_up.k <= dgate_up.len && down.n * down.k <= ddown.len;
        check("mlp backward", rows_fit && weights_fit && rows * gate_up.k <= x.len.min(dnormed.len));
        check("mlp backward widths", gate_up.n == 2 * width && down.k == width && gain.len == gate_up.k);
        check("mlp backward formats", gate_up.format == down.format);
        let (gpu, activated) = (&self.gpu, activated.at());
        let dprojected =
            linear_backward::swiglu_linear(gpu, projected.at(), dy.at(), rows, down, activated, ddown.at());
        let x = linear_backward::normed(gpu, x.at(), gain.at(), eps, rows, gate_up);
        linear_backward::products(gpu, x, dprojected, rows, gate_up, dgate_up.at(), dnormed.at());
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        stride: usize,
        heads: usize,
        head_dim: usize,
        positions: &[u32],
        rope: Rope<CudaTensor>,
        inverse: bool,
    ) {
        let half = head_dim / 2;
        check("rope", positions.len() * stride <= x.len && heads * head_dim <= stride);
        check("rope table", positions.iter().all(|&p| (p as usize + 1) * half <= rope.cos.len));
        let given = args![
            x.at(),
            stride as u32,
            heads as u32,
            half as u32,
            self.gpu.stage(positions),
            rope.cos.at(),
            rope.sin.at(),
            u32::from(inverse),
        ];
        self.gpu.launch("elementwise", "rope", [positions.len(), 1, 1], 256, 0, given);
    }

    fn kv_pages(
        &self,
        format: KvFormat,
        pages: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<CudaKv, DeviceError> {
        CudaKv::new(&self.gpu, format, pages, page_size, kv_heads, head_dim)
    }

    fn kv_page_bytes(&self, format: KvFormat, page_size: usize, kv_heads: usize, head_dim: usize) -> usize {
        CudaKv::page_bytes(format, page_size, kv_heads, head_dim)
    }

    fn round_kv(&self, qkv: &mut CudaTensor, rows: usize, heads: Heads, format: KvFormat) {
        check("round_kv", rows * heads.qkv_width() <= qkv.len);
        if format == KvFormat::F32 {
            return;
        }
        let parts = 2 * heads.kv_heads;
        let given = args![
            qkv.at(),
            rows as u32,
            heads.qkv_width() as u32,
            (heads.heads * heads.head_dim) as u32,
            parts as u32,
            heads.head_dim as u32,
            kv::code(format),
        ];
        self.gpu.launch("kv", "kv_round", [(rows * parts).div_ceil(4), 1, 1], 128, 0, given);
    }

    fn kv_write(&self, qkv: &CudaTensor, heads: Heads, slots: &[u32], kv: &mut CudaKv) {
        check("kv write", slots.len() * heads.qkv_width() <= qkv.len);
        kv.write(&self.gpu, qkv.at(), heads, slots);
    }

    fn rope_store(
        &self,
        qkv: &mut CudaTensor,
        heads: Heads,
        positions: &[u32],
        rope: Rope<CudaTensor>,
        slots: &[u32],
        kv: &mut CudaKv,
        format: KvFormat,
    ) {
        check("rope", positions.len() * heads.qkv_width() <= qkv.len && format == kv.format);
        let half = heads.head_dim / 2;
        check("rope table", positions.iter().all(|&p| (p as usize + 1) * half <= rope.cos.len));
        kv.rope_write(&self.gpu, qkv.at(), heads, positions, (rope.cos.at(), rope.sin.at()), slots);
    }

    fn kv_copy_page(&self, kv: &mut CudaKv, from: usize, to: usize) {
        kv.copy_page(&self.gpu, from, to);
    }

    fn attention(
        &self,
        heads: Heads,
        qkv: &CudaTensor,
        kv: &CudaKv,
        spans: &[Span],
        pages: &[u32],
        out: &mut CudaTensor,
        lse: Option<&mut CudaTensor>,
    ) {
        let rows = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
        check(
            "attention heads",
            heads.head_dim <= MAX_HEAD_DIM && heads.heads == heads.group() * heads.kv_heads,
        );
        check("attention queries", rows * heads.qkv_width() <= qkv.len);
        check("attention output", rows * heads.heads * heads.head_dim <= out.len);
        check("attention lse", lse.as_ref().is_none_or(|lse| rows * heads.heads <= lse.len));
        kv::attention(&self.gpu, heads, qkv.at(), kv, spans, pages, out.at(), address(lse.as_deref()));
    }

    fn attend(
        &self,
        heads: Heads,
        qkv: &mut CudaTensor,
        rope: Rope<CudaTensor>,
        rows: Placed,
        kv: &mut CudaKv,
        format: KvFormat,
        out: &mut CudaTensor,
        lse: Option<&mut CudaTensor>,
        w: &CudaWeight,
        x: &mut CudaTensor,
    ) {
        let Placed { positions, slots, spans, pages } = rows;
        let seen = kv::see(&self.gpu, kv, spans, pages);
        if lse.is_some() || !flash::decodes(heads, kv, &seen) {
            self.rope_store(qkv, heads, positions, rope, slots, kv, format);
            self.attention(heads, qkv, kv, spans, pages, out, lse);
            return self.linear(out, positions.len(), w, None, Output::Add, x);
        }
        let (count, half) = (positions.len(), heads.head_dim / 2);
        check("attention queries", count * heads.qkv_width() <= qkv.len && count == seen.count);
        check("attention output", count * w.k <= out.len && count * w.n <= x.len && format == kv.format);
        check("rope table", seen.longest * half <= rope.cos.len.min(rope.sin.len));
        let gpu = &self.gpu;
        // Attention writes what the product reads, where it can.
        let decoded = match w.format {
            Format::Bf16 => Decoded::Rounded(out.at()),
            format if format.is_quantized() && flash::writes_codes(gpu, heads, kv, &seen) => {
                Decoded::Codes(format, linear::code_room(gpu, count, w.k))
            }
            _ => Decoded::Numbers(out.at()),
        };
        let tables = Some((rope.cos.at(), rope.sin.at()));
        flash::decode(gpu, heads, qkv.at(), kv, &seen, decoded, 0, tables);
        let left = match decoded {
            Decoded::Numbers(data) => linear::left(gpu, w.format, Left::Plain(data), count, w.k),
            Decoded::Rounded(data) => linear::Left { data, scales: 0, readable: 2 * out.len / w.k },
            Decoded::Codes(_, left) => left,
        };
        linear::forward(gpu, left, count, w, 0, Output::Add, x.at());
    }

    fn attention_backward(
        &self,
        heads: Heads,
        format: KvFormat,
        qkv: &CudaTensor,
        spans: &[Span],
        out: &CudaTensor,
        dout: &CudaTensor,
        lse: &CudaTensor,
        dqkv: &mut CudaTensor,
    ) {
        let rows = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
        let width = heads.heads * heads.head_dim;
        check("attention backward rows", rows * heads.qkv_width() <= qkv.len.min(dqkv.len));
        check("attention backward", rows * width <= out.len.min(dout.len) && rows * heads.heads <= lse.len);
        let (out, dout, lse, dqkv) = (out.at(), dout.at(), lse.at(), dqkv.at());
        kv::attention_backward(&self.gpu, heads, format, qkv.at(), spans, out, dout, lse, dqkv);
    }

    fn swiglu(&self, gate_up: &CudaTensor, rows: usize, f: usize, out: &mut CudaTensor) {
        check("swiglu", rows * 2 * f <= gate_up.len && rows * f <= out.len);
        self.each("elementwise", "swiglu", rows * f, args![gate_up.at(), f as u32, rows * f, out.at()]);
    }

    fn swiglu_backward(&self, gate_up: &mut CudaTensor, out: &mut CudaTensor, rows: usize, f: usize) {
        check("swiglu backward", rows * 2 * f <= gate_up.len && rows * f <= out.len);
        linear_backward::swiglu(&self.gpu, gate_up.at(), out.at(), rows, f);
    }

    fn head(
        &self,
        hidden: &CudaTensor,
        head: &CudaWeight,
        targets: &[u32],
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        check("head", targets.len() * head.k <= hidden.len);
        head::score(&self.gpu, hidden.at(), head, targets, temperature)
    }

    fn draw(&self, hidden: &CudaTensor, head: &CudaWeight, rows: &[SampleRow], out: &mut CudaTensor) {
        check("sample", rows.len() * head.k <= hidden.len && rows.len() * DRAWN_WORDS <= out.len);
        head::draw(&self.gpu, hidden.at(), head, rows, out.at());
    }

    fn ask_drawn(&self, out: &CudaTensor, rows: usize) -> Result<CudaDrawn, DeviceError> {
        check("sample", rows * DRAWN_WORDS <= out.len);
        drawn::ask(&self.gpu, out.at(), rows)
    }

    fn drawn(&self, asked: CudaDrawn) -> Result<Vec<Sampled>, DeviceError> {
        asked.wait()
    }

    fn head_backward(
        &self,
        hidden: &CudaTensor,
        head: &CudaWeight,
        targets: &[u32],
        temperature: f32,
        out: &HeadOutput,
        gradient: HeadGradient,
        dhidden: &mut CudaTensor,
        dweight: &mut CudaTensor,
    ) {
        let fits = targets.len() * head.k <= hidden.len.min(dhidden.len) && head.n * head.k <= dweight.len;
        check("head backward", fits);
        let (dhidden, dweight) = (dhidden.at(), dweight.at());
        head::backward(&self.gpu, hidden.at(), head, targets, temperature, out, gradient, dhidden, dweight);
    }

    fn row_dots(&self, hidden: &CudaTensor, rows: usize, w: &CudaTensor) -> Result<Vec<f32>, DeviceError> {
        check("row dots", rows * w.len <= hidden.len);
        let results = self.gpu.scratch(Slot::Results, 4 * rows);
        let given = args![hidden.at(), w.at(), w.len as u32, results];
        self.gpu.launch("elementwise", "row_dots", [rows, 1, 1], 32, 0, given);
        let mut values = vec![0.0; rows];
        self.gpu.read(results, &mut values)?;
        Ok(values)
    }

    fn row_dots_backward(
        &self,
        hidden: &CudaTensor,
        rows: usize,
        w: &CudaTensor,
        gradient: &[f32],
        dhidden: &mut CudaTensor,
        dw: &mut CudaTensor,
    ) {
        let d = w.len;
        check(
            "row dots backward",
            rows * d <= hidden.len.min(dhidden.len) && gradient.len() >= rows && dw.len == d,
        );
        let g = self.gpu.stage(&gradient[..rows]);
        self.each(
            "elementwise",
            "outer_product",
            rows * d,
            args![g, w.at(), d as u32, rows * d, dhidden.at()],
        );
        sums::of_columns(&self.gpu, hidden.at(), g, rows, d, dw.at());
    }

    fn adamw(&self, a: &AdamW, w: &mut CudaTensor, g: &CudaTensor, m: &mut CudaTensor, v: &mut CudaTensor) {
        check("adamw", w.len == g.len && w.len == m.len && w.len == v.len);
        let step = i32::try_from(a.step).unwrap_or(i32::MAX);
        let correction1 = 1.0 - f64::from(a.beta1).powi(step);
        let correction2 = 1.0 - f64::from(a.beta2).powi(step);
        let given = args![
            w.at(),
            g.at(),
            m.at(),
            v.at(),
            w.len,
            a.grad_scale,
            a.beta1,
            a.beta2,
            1.0 - a.beta1,
            1.0 - a.beta2,
            1.0 - a.lr * a.weight_decay,
            (-f64::from(a.lr) / correction1) as f32,
            (1.0 / correction2.sqrt()) as f32,
            a.eps,
        ];
        self.each("optim", "adamw", w.len.min(1 << 24), given);
    }

    fn sum_squares(&self, tensors: &[&CudaTensor]) -> Result<f64, DeviceError> {
        sums::squares(&self.gpu, tensors.iter().map(|x| (x.at(), x.len)))
    }

    fn checksum(&self, x: &CudaTensor) -> Result<u64, DeviceError> {
        sums::checksum(&self.gpu, x.at(), x.len)
    }
}
