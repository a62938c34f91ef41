//! What the tests share: random numbers, the levels of this machine, comparisons, scattered pages.

use qurl_kernels::backend::{Backend, Heads, KvFormat, Span};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Format};
use std::ops::Range;

/// A small counter-based generator: the same numbers in every run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Numbers below `end`.
    pub fn ids(&mut self, len: usize, end: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(end) as u32).collect()
    }

    /// Roughly normal numbers of variance one: sums of four uniform ones.
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        let mut uniform = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..len).map(|_| (uniform() + uniform() + uniform() + uniform()) * 3f32.sqrt()).collect()
    }

    /// `0..len` in random order.
    pub fn shuffled(&mut self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// The CPU at every level of this machine.
pub fn cpus(threads: usize) -> Vec<Cpu> {
    Level::available().into_iter().map(|level| Cpu::new(level, threads)).collect()
}

/// A tensor with these values.
pub fn up<B: Backend>(backend: &B, values: &[f32]) -> B::Tensor {
    backend.upload(values).expect("memory for a test")
}

/// All values of a tensor.
pub fn down<B: Backend>(backend: &B, tensor: &B::Tensor) -> Vec<f64> {
    wide(&backend.download(tensor, backend.len(tensor)).expect("memory for a test"))
}

/// f32 as f64, exactly.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x as f64).collect()
}

/// The operand as a format's product sees it.
pub fn as_operand(format: Format, values: &[f32]) -> Vec<f64> {
    let round = rounding(format);
    values.iter().map(|&x| round(x as f64)).collect()
}

/// The rounding of a format's operands.
pub fn rounding(format: Format) -> fn(f64) -> f64 {
    match format {
        Format::Bf16 => round_bf16,
        _ => |x| x,
    }
}

/// The nearest number with eight significant bits, ties to even.
pub fn round_bf16(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let quantum = 2f64.powi(x.abs().log2().floor() as i32 - 7);
    (x / quantum).round_ties_even() * quantum
}

/// The rounding error of one f32 operation.
pub const ULP: f64 = 1.0 / (1u64 << 24) as f64;

/// `|got - want| <= units * ULP * (|want| + rms(want))`: an error allowed in roundings of a typical value, so that
/// cancellation in single values does not matter.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], units: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let rms = rms(want);
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let allowed = units * ULP * (want.abs() + rms);
        // Written so that a not-a-number fails.
        assert!((got - want).abs() <= allowed, "{what}[{i}]: got {got:e}, want {want:e} within {allowed:e}");
    }
}

/// Root of the mean square.
fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// The largest error in the units of [`assert_close`]; infinite for a not-a-number that is not wanted.
pub fn units_off(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "length");
    let rms = rms(want);
    let off = |(&got, &want): (&f64, &f64)| match got == want {
        true => 0.0,
        false => (got - want).abs() / (ULP * (want.abs() + rms)),
    };
    got.iter().zip(want).map(off).fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

/// The same bits.
pub fn assert_bits(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}[{i}]: got {got:e}, want {want:e}, bit for bit");
    }
}

/// Sequences whose pages are scattered over a store with a few spare pages.
pub struct Paged {
    pub page_size: usize,
    pub store_pages: usize,
    /// The page list of all sequences.
    pub pages: Vec<u32>,
    starts: Vec<usize>,
}

impl Paged {
    pub fn scattered(random: &mut Random, lengths: &[usize], page_size: usize) -> Paged {
        let counts = lengths.iter().map(|len| len.div_ceil(page_size));
        let mut starts = vec![0];
        for count in counts {
            starts.push(starts[starts.len() - 1] + count);
        }
        let used = starts[lengths.len()];
        let mut pages = random.shuffled(used + 3);
        pages.truncate(used);
        Paged { page_size, store_pages: used + 3, pages, starts }
    }

    /// Slots of some positions of a sequence.
    pub fn slots(&self, sequence: usize, positions: Range<usize>) -> Vec<u32> {
        let table = &self.pages[self.starts[sequence]..self.starts[sequence + 1]];
        positions
            .map(|p| table[p / self.page_size] * self.page_size as u32 + (p % self.page_size) as u32)
            .collect()
    }

    /// Rows `row..` of the batch, `rows` of them, are the positions from `position` of a sequence.
    pub fn span(&self, sequence: usize, row: usize, rows: usize, position: usize) -> Span {
        Span { row, rows, position, pages: self.starts[sequence] }
    }

    /// A store in which every slot holds not-a-number: what was never written must never matter.
    pub fn stale_store<B: Backend>(&self, backend: &B, heads: Heads, format: KvFormat) -> B::Kv {
        let mut kv = backend
            .kv_pages(format, self.store_pages, self.page_size, heads.kv_heads, heads.head_dim)
            .expect("memory for a test");
        let slots: Vec<u32> = (0..(self.store_pages * self.page_size) as u32).collect();
        let stale = up(backend, &vec![f32::NAN; slots.len() * heads.qkv_width()]);
        backend.kv_write(&stale, heads, &slots, &mut kv);
        kv
    }
}

/// Heads with the usual scale.
pub fn heads(kv_heads: usize, group: usize, head_dim: usize) -> Heads {
    Heads { heads: kv_heads * group, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}
