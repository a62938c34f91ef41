//! From the gradient of the scored rows back to the embedding, block by block.

use super::Tape;
use crate::compute::adapters::{Adapters, gradient};
use crate::compute::layer::{Activations, Kept};
use crate::compute::network::{Block, Network};
use crate::compute::weights::{GradientSink, Part, Weights, next_backward};
use crate::lora::no_adapters;
use crate::params::{DenseMlp, LayerAdapters, LayerParams, MlpParams};
use qurl_kernels::ops::{
    AttendBackward, Index, LinearBackward, MlpBackward, NormBackward, QkNormBackward, RmsNormBackward,
    ScatterAdd,
};
use qurl_kernels::{Device, DeviceError, Queue};

/// Where a gradient goes; nowhere for a frozen leaf.
pub(super) fn trained<D: Device>(gradient: &mut D::Tensor) -> Option<&mut D::Tensor> {
    Some(gradient).filter(|gradient| D::len(gradient) > 0)
}

impl<D: Device> Tape<D> {
    /// From the gradient of the picked hidden rows back to the embedding, through `net`; blocks are run again
    /// by the network that `ran` the forward pass.
    pub(super) fn backward_from_hidden(
        &mut self,
        queue: &mut D::Queue,
        ran: Option<&Network<D>>,
        weights: &mut impl Weights<D>,
        picked: &[u32],
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), DeviceError> {
        let net = weights.network();
        let (c, layers) = (net.config(), net.config().num_layers);
        let (rows, d, eps) = (self.rows, c.hidden_size, c.rms_norm_eps);
        // `hidden` has done its work: it takes the gradient of the picked rows before the norm.
        queue.clear(&mut self.hidden, picked.len() * d);
        queue.rmsnorm_backward(RmsNormBackward {
            x: &self.picked,
            rows: picked.len(),
            norm: NormBackward { gain: &net.final_norm, eps, dgain: trained::<D>(grads.final_norm()) },
            dy: &mut self.dhidden,
            dx: &mut self.hidden,
        });
        // From here on, `x` is the gradient of the residual stream.
        queue.clear(&mut self.x, rows * d);
        let (hidden, index) = (&self.hidden, Index::Rows(picked));
        queue.scatter_add(ScatterAdd { rows: hidden, index, width: d, table: &mut self.x });
        for index in (0..layers).rev() {
            next_backward(queue, weights, grads, index)?;
            let (net, block) = (weights.network(), weights.block(index));
            match ran {
                Some(ran) => self.run_again(queue, ran, ran.block(index), index),
                None => self.run_again(queue, net, block, index),
            }
            let (dparams, dadapters) = grads.block(index);
            self.block_backward(queue, (net, block), index, dparams, dadapters);
        }
        grads.complete(queue, Part::Block(0))?;
        if let Some(table) = trained::<D>(grads.embed()) {
            let index = Index::Tokens { batch: &self.batch, sampled: None };
            queue.scatter_add(ScatterAdd { rows: &self.x, index, width: d, table });
        }
        grads.complete(queue, Part::Rest)
    }

    /// One block: `x` holds the gradient of its output and receives that of its input.
    fn block_backward(
        &mut self,
        queue: &mut D::Queue,
        (net, block): (&Network<D>, &Block<D>),
        index: usize,
        grads: &mut LayerParams<D::Tensor>,
        adapters: Option<&mut LayerAdapters<D::Tensor>>,
    ) {
        let (rows, eps) = (self.rows, net.config().rms_norm_eps);
        let Block { heads, params: w, adapters: low } = block;
        let dlow = adapters.map_or(no_adapters(), LayerAdapters::as_mut);
        let slots = net.adapters().map(Adapters::slots);
        let (at, mlp_at) = self.options.recompute.places(index);
        let Activations { qkv, kept: Some(Kept { qkv_raw, attention, lse, middle }) } = &mut self.acts[at]
        else {
            panic!("activations were not kept")
        };

        // MLP: x = middle + down(swiglu(gate_up(norm(middle))))
        let MlpParams::Dense(mlp) = &w.mlp;
        let MlpParams::Dense(DenseMlp { gate_up: dgate_up, down: ddown }) = &mut grads.mlp;
        let (gain, dgain) = (w.mlp_norm.tensor(), trained::<D>(&mut grads.mlp_norm));
        queue.mlp_backward(MlpBackward {
            x: middle,
            rows,
            norm: NormBackward { gain, eps, dgain },
            gate_up: mlp.gate_up.weight(),
            down: mlp.down.weight(),
            kept: &mut self.mlps[mlp_at],
            gate_up_adapter: gradient(
                &low.gate_up,
                slots.and_then(|slots| slots.gate_up.as_ref()),
                dlow.gate_up,
            ),
            down_adapter: gradient(&low.down, slots.and_then(|slots| slots.down.as_ref()), dlow.down),
            dgate_up: trained::<D>(dgate_up),
            ddown: trained::<D>(ddown),
            dx: &mut self.x,
        });

        // Attention: middle = input + o(attention(rope(qkv(norm(input)))))
        let head_norms = w.q_norm.as_ref().zip(w.k_norm.as_ref());
        let qk_norm = head_norms.zip(qkv_raw.as_ref()).map(|((q, k), raw)| QkNormBackward {
            raw,
            q: NormBackward { gain: q.tensor(), eps, dgain: grads.q_norm.as_mut().and_then(trained::<D>) },
            k: NormBackward { gain: k.tensor(), eps, dgain: grads.k_norm.as_mut().and_then(trained::<D>) },
        });
        queue.attend_backward(AttendBackward {
            heads: *heads,
            batch: &self.batch,
            kv_format: self.kv_format,
            qkv,
            qk_norm,
            rope: net.rope(),
            out: attention,
            lse,
            o: w.o.weight(),
            dx: &self.x,
            adapter: gradient(&low.o, slots.and_then(|slots| slots.o.as_ref()), dlow.o),
            d_o: trained::<D>(&mut grads.o),
            dqkv: &mut self.dqkv,
        });
        let (gain, dgain) = (w.attn_norm.tensor(), trained::<D>(&mut grads.attn_norm));
        queue.linear_backward(LinearBackward {
            x: &self.inputs[index],
            rows,
            norm: Some(NormBackward { gain, eps, dgain }),
            w: w.qkv.weight(),
            dy: &self.dqkv,
            adapter: gradient(&low.qkv, slots.and_then(|slots| slots.qkv.as_ref()), dlow.qkv),
            dw: trained::<D>(&mut grads.qkv),
            dbias: grads.qkv_bias.as_mut().and_then(trained::<D>),
            dx: Some(&mut self.x),
        });
    }
}
