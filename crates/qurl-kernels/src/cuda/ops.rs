//! [`Queue`] for CUDA: where each operation is.

use super::attention;
use super::batch::{self, CudaBatch};
use super::canonical;
use super::device::{Cuda, CudaTensor, CudaTokens};
use super::kernels::{self, RandomFill};
use super::kv::CudaKv;
use super::launch::Launch;
use super::moments::{self, CudaMoments};
use super::pending::{self, CudaPending};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use super::{adapter, exchange, head, head_backward, linear, linear_backward, mlp, norm, rows, sums};
use crate::ops::*;
use crate::queue::Queue;
use crate::types::{Batch, DeviceError, HeadOutput, LossGradient, Moments, Sampled};
use std::ops::Range;
use std::sync::Arc;

impl Queue for CudaQueue {
    type Device = Cuda;

    fn device(&self) -> &Arc<Cuda> {
        self.owner()
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.wait_for_all();
        self.result()
    }

    fn write(&mut self, tensor: &mut CudaTensor, values: &[f32]) {
        assert!(values.len() <= tensor.len, "write: length");
        self.write_values(tensor.at(), values);
    }

    fn read(&mut self, tensor: &CudaTensor, len: usize) -> Result<Vec<f32>, DeviceError> {
        assert!(len <= tensor.len, "read: length");
        let mut values = vec![0.0; len];
        self.read_values(tensor.at(), &mut values)?;
        Ok(values)
    }

    fn copy(&mut self, from: &CudaTensor, to: &mut CudaTensor, len: usize) {
        assert!(len <= from.len.min(to.len), "copy: length");
        self.copy_bytes(from.at(), to.at(), 4 * len);
    }

    fn clear(&mut self, tensor: &mut CudaTensor, len: usize) {
        assert!(len <= tensor.len, "clear: length");
        self.fill_bytes(tensor.at(), 0, 4 * len);
    }

    fn fill_random(&mut self, tensor: &mut CudaTensor, seed: u64, factor: f32) {
        let args = RandomFill { out: tensor.at(), count: tensor.len as u64, seed, factor };
        self.launch(kernels::random_fill, Launch::elements(tensor.len), args);
    }

    fn spread(&mut self, args: Spread<Cuda>) {
        self.begin();
        adapter::spread(self, args);
    }

    fn export(&mut self, weight: &CudaWeight, to: &mut Vec<u8>) -> Result<(), DeviceError> {
        canonical::export(self, weight, to)
    }

    fn import(&mut self, bytes: &[u8], to: &mut CudaWeight) -> Result<(), DeviceError> {
        crate::canonical::check(canonical::shape(to), bytes.len())?;
        self.begin();
        let imported = canonical::import(self, bytes, to);
        self.packed = true;
        imported
    }

    fn pack(&mut self, args: Pack<Cuda>) -> Result<(), DeviceError> {
        let Pack { from, rounding, copy, to } = args;
        assert!(from.len >= to.n * to.k, "pack: weights");
        self.begin();
        if let Some(copy) = copy {
            self.copy(from, copy, from.len);
        }
        let filled = to.fill(self, from.at(), rounding);
        self.packed = true;
        filled
    }

    fn load(&mut self, batch: &mut CudaBatch, rows: &Batch) {
        batch::load(self, batch, rows);
    }

    fn replay(&mut self, key: u64, batch: &CudaBatch, run: &mut dyn FnMut(&mut CudaQueue)) {
        self.replay_step(key, batch, run);
    }

    fn gather(&mut self, args: Gather<Cuda>) {
        self.begin();
        rows::gather(self, args);
    }

    fn scatter_add(&mut self, args: ScatterAdd<Cuda>) {
        self.begin();
        rows::scatter_add(self, args);
    }

    fn rmsnorm(&mut self, args: RmsNorm<Cuda>) {
        self.begin();
        norm::rmsnorm(self, args);
    }

    fn rmsnorm_backward(&mut self, args: RmsNormBackward<Cuda>) {
        self.begin();
        norm::rmsnorm_backward(self, args);
    }

    fn linear(&mut self, args: Linear<Cuda>) {
        self.begin();
        linear::linear(self, args);
    }

    fn linear_backward(&mut self, args: LinearBackward<Cuda>) {
        self.begin();
        linear_backward::linear_backward(self, args);
    }

    fn mlp(&mut self, args: Mlp<Cuda>) {
        self.begin();
        mlp::mlp(self, args);
    }

    fn mlp_backward(&mut self, args: MlpBackward<Cuda>) {
        self.begin();
        mlp::mlp_backward(self, args);
    }

    fn attend(&mut self, args: Attend<Cuda>) {
        self.begin();
        attention::attend(self, args);
    }

    fn attend_backward(&mut self, args: AttendBackward<Cuda>) {
        self.begin();
        attention::attend_backward(self, args);
    }

    fn copy_page(&mut self, kv: &mut CudaKv, from: usize, to: usize) {
        kv.copy_page(self, from, to);
    }

    fn head(&mut self, args: Head<Cuda>) -> Result<HeadOutput, DeviceError> {
        self.begin();
        head::score(self, args)
    }

    fn head_backward(&mut self, args: HeadBackward<Cuda>) {
        self.begin();
        head_backward::backward(self, args);
    }

    fn head_training<E: From<DeviceError>>(
        &mut self,
        args: HeadTraining<Cuda>,
        loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
    ) -> Result<(), E> {
        self.begin();
        head_backward::training(self, args, loss)
    }

    fn sample(&mut self, args: Sample<Cuda>) {
        self.begin();
        head::sample(self, args);
    }

    fn top(&mut self, args: Top<Cuda>) -> Result<Vec<Vec<(u32, f32)>>, DeviceError> {
        self.begin();
        head::top(self, args)
    }

    fn fetch(&mut self, tokens: &CudaTokens, rows: usize) -> Result<CudaPending, DeviceError> {
        assert!(rows <= tokens.rows, "fetch: rows");
        pending::fetch(self, tokens.at(), rows)
    }

    fn wait(&mut self, pending: CudaPending) -> Result<Vec<Sampled>, DeviceError> {
        pending::wait(self, pending)
    }

    fn row_dots(&mut self, args: RowDots<Cuda>) -> Result<Vec<f32>, DeviceError> {
        self.begin();
        rows::row_dots(self, args)
    }

    fn row_dots_backward(&mut self, args: RowDotsBackward<Cuda>) {
        self.begin();
        rows::row_dots_backward(self, args);
    }

    fn adamw(&mut self, args: Update<Cuda>) {
        moments::adamw(self, args);
    }

    fn read_moments(&mut self, from: &CudaMoments) -> Result<Moments, DeviceError> {
        moments::read(self, from)
    }

    fn write_moments(&mut self, to: &mut CudaMoments, from: &Moments) -> Result<(), DeviceError> {
        moments::write(self, to, from)
    }

    fn add(&mut self, from: &CudaTensor, to: &mut CudaTensor, len: usize) {
        assert!(len <= from.len.min(to.len), "add: length");
        sums::pieces(self, from.at(), 1, len, Output::Add, to.at());
    }

    fn add_pieces(&mut self, args: AddPieces<Cuda>) {
        let AddPieces { pieces, count, len, to, at } = args;
        assert!(count * len <= pieces.len && at + len <= to.len, "add_pieces: lengths");
        sums::pieces(self, pieces.at(), count, len, Output::Store, to.at() + 4 * at as u64);
    }

    fn narrow(&mut self, args: Narrow<Cuda>) {
        let Narrow { from, len, to, at } = args;
        let fits = at.is_multiple_of(2) && len <= from.len && (at + len).div_ceil(2) <= to.len;
        assert!(fits, "narrow: lengths");
        if len > 0 {
            let args = kernels::Narrow { x: from.at(), count: len as u64, words: to.at() + 2 * at as u64 };
            self.launch(kernels::narrow, Launch::elements(len.div_ceil(2).min(1 << 22)), args);
        }
    }

    fn widen(&mut self, args: Widen<Cuda>) {
        let Widen { from, to, len } = args;
        assert!(len <= to.len && len.div_ceil(2) <= from.len, "widen: lengths");
        if len > 0 {
            let args = kernels::Widen { words: from.at(), count: len as u64, y: to.at() };
            self.launch(kernels::widen, Launch::elements(len.div_ceil(2).min(1 << 22)), args);
        }
    }

    fn sum_squares(&mut self, tensors: &[&CudaTensor]) -> Result<f64, DeviceError> {
        self.begin();
        sums::squares(self, tensors)
    }

    fn block_squares(&mut self, slices: &[Slice<Cuda>]) -> Result<Vec<Vec<f64>>, DeviceError> {
        self.begin();
        sums::block_squares(self, slices)
    }

    fn add_block_squares(&mut self, blocks: &[Vec<f64>]) -> Result<f64, DeviceError> {
        self.begin();
        sums::add_block_squares(self, blocks)
    }

    fn checksum(&mut self, tensor: &CudaTensor) -> Result<u64, DeviceError> {
        self.begin();
        sums::checksum(self, tensor)
    }

    fn begin_exchange(&mut self, exchange: Exchange<Cuda>) -> Result<(), DeviceError> {
        exchange::begin(self, exchange)
    }

    fn join_exchanges(&mut self) -> Result<(), DeviceError> {
        exchange::join(self)
    }
}
