//! A network's weights as bytes that are the same on every device, and back: what rollout workers are sent.

use super::Network;
use super::block::{Packed, own};
use qurl_kernels::ops::Pack;
use qurl_kernels::{Device, DeviceError, Queue, Rounding, canonical};

impl<D: Device> Network<D> {
    /// The weights as bytes that are the same on every device ([`qurl_kernels::canonical`]): vectors and the
    /// embedding in f32, matrices as they are packed, leaf by leaf in the order of [`Params`](crate::Params).
    /// A tied head in full is left out: it is packed from the embedding. Adapters come last.
    pub fn export(&self, queue: &mut D::Queue) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = Vec::with_capacity(self.exported_bytes());
        let vector = |queue: &mut D::Queue, from: &D::Tensor, bytes: &mut Vec<u8>| {
            let values = queue.read(from, D::len(from))?;
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
            Ok::<_, DeviceError>(())
        };
        vector(queue, &self.embed, &mut bytes)?;
        for leaf in self.blocks.iter().flat_map(|block| block.params.as_ref().into_leaves()) {
            match leaf {
                Packed::Tensor(from) => vector(queue, from, &mut bytes)?,
                Packed::Weight(from) => queue.export(from, &mut bytes)?,
            }
        }
        vector(queue, &self.final_norm, &mut bytes)?;
        if !self.head_is_embedding() {
            queue.export(&self.head, &mut bytes)?;
        }
        if let Some(from) = &self.value_head {
            vector(queue, from, &mut bytes)?;
        }
        for block in &self.blocks {
            block.adapters.as_ref().try_map(&mut |from: &D::Weight| queue.export(from, &mut bytes))?;
        }
        Ok(bytes)
    }

    /// Takes over the weights of a network of the same model and options; an error where the bytes are not
    /// such weights, after which they are of no use.
    pub fn import(&mut self, queue: &mut D::Queue, bytes: &[u8]) -> Result<(), DeviceError> {
        let (format, expected) = (self.options.format, self.exported_bytes());
        if bytes.len() != expected {
            let reason = format!("{} bytes of a model; expected {expected}", bytes.len());
            return Err(DeviceError::Pack { format, reason });
        }
        let mut rest = bytes;
        let mut next = |len: usize| {
            let (part, after) = rest.split_at(len);
            rest = after;
            part
        };
        let vector = |queue: &mut D::Queue, bytes: &[u8], to: &mut D::Tensor| {
            let (values, _) = bytes.as_chunks::<4>();
            let values: Vec<f32> = values.iter().map(|x| f32::from_le_bytes(*x)).collect();
            queue.write(to, &values);
        };
        vector(queue, next(4 * D::len(&self.embed)), own(&mut self.embed));
        for leaf in self.blocks.iter_mut().flat_map(|block| block.params.as_mut().into_leaves()) {
            match leaf {
                Packed::Tensor(to) => vector(queue, next(4 * D::len(to)), to),
                Packed::Weight(to) => queue.import(next(canonical::bytes(D::weight_shape(to))), own(to))?,
            }
        }
        vector(queue, next(4 * D::len(&self.final_norm)), &mut self.final_norm);
        match self.head_is_embedding() {
            true => {
                let (from, to) = (&*self.embed, own(&mut self.head));
                queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to })?;
            }
            false => {
                queue.import(next(canonical::bytes(D::weight_shape(&self.head))), own(&mut self.head))?
            }
        }
        if let Some(to) = &mut self.value_head {
            vector(queue, next(4 * D::len(to)), to);
        }
        for block in &mut self.blocks {
            block.adapters.as_mut().try_map(&mut |to: &mut D::Weight| {
                queue.import(next(canonical::bytes(D::weight_shape(to))), to)
            })?;
        }
        Ok(())
    }

    /// Bytes of [`Network::export`].
    pub fn exported_bytes(&self) -> usize {
        let leaf = |leaf: &Packed<D>| match leaf {
            Packed::Tensor(tensor) => 4 * D::len(tensor),
            Packed::Weight(weight) => canonical::bytes(D::weight_shape(weight)),
        };
        let blocks = self.blocks.iter().flat_map(|block| block.params.as_ref().into_leaves()).map(leaf);
        let vectors = [Some(&*self.embed), Some(&self.final_norm), self.value_head.as_ref()];
        let vectors = vectors.into_iter().flatten().map(|tensor| 4 * D::len(tensor));
        let head = if self.head_is_embedding() { 0 } else { canonical::bytes(D::weight_shape(&self.head)) };
        let mut adapters = 0;
        for block in &self.blocks {
            let Ok(_) = block.adapters.as_ref().try_map(&mut |weight: &D::Weight| {
                adapters += canonical::bytes(D::weight_shape(weight));
                Ok::<_, std::convert::Infallible>(())
            });
        }
        blocks.chain(vectors).sum::<usize>() + head + adapters
    }

    /// Whether the head is packed from the embedding without a scale or a random number.
    fn head_is_embedding(&self) -> bool {
        self.config.tie_word_embeddings && !self.options.head_format.is_quantized()
    }
}
