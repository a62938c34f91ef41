//! Naive twins in f64 of the paged key/value store and of attention, by the definition: a full softmax per
//! row over the keys that it sees ([`Heads::first_seen`]).

use crate::support::round_bf16;
use qurl_kernels::types::{Heads, KvFormat, Span};

/// Keys and values by slot; NaN where nothing was written.
pub struct Store {
    page_size: usize,
    /// Keys, then values, of one token.
    slots: Vec<Vec<f64>>,
}

impl Store {
    pub fn new(pages: usize, page_size: usize, heads: Heads) -> Store {
        let nothing = vec![f64::NAN; 2 * heads.kv_heads * heads.head_dim];
        Store { page_size, slots: vec![nothing; pages * page_size] }
    }

    pub fn write(&mut self, qkv: &[f64], heads: Heads, slots: &[u32]) {
        for (row, &slot) in qkv.chunks_exact(heads.qkv_width()).zip(slots) {
            self.slots[slot as usize] = row[heads.q_width()..].to_vec();
        }
    }

    fn token(&self, pages: &[u32], position: usize) -> &[f64] {
        &self.slots[pages[position / self.page_size] as usize * self.page_size + position % self.page_size]
    }
}

/// The rows with keys and values rounded to what the store keeps.
pub fn round_kv(qkv: &[f64], heads: Heads, format: KvFormat) -> Vec<f64> {
    let mut rounded = qkv.to_vec();
    if format == KvFormat::Bf16 {
        for row in rounded.chunks_exact_mut(heads.qkv_width()) {
            for x in &mut row[heads.q_width()..] {
                *x = round_bf16(*x);
            }
        }
    }
    rounded
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Output rows and logarithms of the softmax denominators.
pub fn attention(
    heads: Heads,
    qkv: &[f64],
    kv: &Store,
    spans: &[Span],
    pages: &[u32],
    rows: usize,
) -> (Vec<f64>, Vec<f64>) {
    let d = heads.head_dim;
    let (mut out, mut lse) = (vec![0.0; rows * heads.heads * d], vec![0.0; rows * heads.heads]);
    for span in spans {
        let pages = &pages[span.pages..];
        for i in 0..span.rows {
            for head in 0..heads.heads {
                let row = span.row + i;
                let kv_head = head / heads.group();
                let query = &qkv[row * heads.qkv_width() + head * d..][..d];
                let position = span.position + i;
                let seen = heads.first_seen(position)..=position;
                let tokens: Vec<&[f64]> = seen.map(|p| kv.token(pages, p)).collect();
                let scores: Vec<f64> =
                    tokens.iter().map(|t| heads.scale as f64 * dot(query, &t[kv_head * d..][..d])).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let out = &mut out[(row * heads.heads + head) * d..][..d];
                for (score, token) in scores.iter().zip(&tokens) {
                    let weight = (score - largest).exp() / total;
                    let value = &token[(heads.kv_heads + kv_head) * d..][..d];
                    for (out, value) in out.iter_mut().zip(value) {
                        *out += weight * value;
                    }
                }
                lse[row * heads.heads + head] = largest + total.ln();
            }
        }
    }
    (out, lse)
}

/// Gradient of `qkv` for whole sequences whose keys and values are in `qkv` itself.
pub fn attention_backward(heads: Heads, qkv: &[f64], spans: &[Span], dout: &[f64]) -> Vec<f64> {
    let (d, width, scale) = (heads.head_dim, heads.qkv_width(), heads.scale as f64);
    let mut dqkv = vec![0.0; qkv.len()];
    for span in spans {
        for i in 0..span.rows {
            for head in 0..heads.heads {
                let kv_head = head / heads.group();
                let query_at = (span.row + i) * width + head * d;
                let key_at = |p: usize| (span.row + p) * width + (heads.heads + kv_head) * d;
                let value_at = |p: usize| key_at(p) + heads.kv_heads * d;
                let dout = &dout[((span.row + i) * heads.heads + head) * d..][..d];
                let query = &qkv[query_at..][..d];
                let seen = heads.first_seen(i)..i + 1;
                let keys = seen.clone().map(|p| &qkv[key_at(p)..][..d]);
                let scores: Vec<f64> = keys.map(|key| scale * dot(query, key)).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / total).collect();
                let values = seen.clone().map(|p| &qkv[value_at(p)..][..d]);
                let dweights: Vec<f64> = values.map(|value| dot(dout, value)).collect();
                let mean = dot(&weights, &dweights);
                for ((p, weight), dweight) in seen.zip(&weights).zip(&dweights) {
                    let dscore = scale * weight * (dweight - mean);
                    for j in 0..d {
                        dqkv[value_at(p) + j] += weight * dout[j];
                        dqkv[key_at(p) + j] += dscore * qkv[query_at + j];
                        dqkv[query_at + j] += dscore * qkv[key_at(p) + j];
                    }
                }
            }
        }
    }
    dqkv
}
