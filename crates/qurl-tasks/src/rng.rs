//! Counter-based random numbers: a value is a pure function of its key, so drawing is reproducible and does
//! not depend on the order in which things are drawn.

/// Mixes a key of any length into 64 random bits (SplitMix64's finaliser after every word).
pub fn mix(key: &[u64]) -> u64 {
    let mut state = 0x243f_6a88_85a3_08d3u64;
    for word in key {
        state = finalise(state ^ finalise(word.wrapping_add(0x9e37_79b9_7f4a_7c15)));
    }
    finalise(state)
}

fn finalise(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Mixes text into 64 bits.
pub fn mix_text(text: &str) -> u64 {
    let mut words: Vec<u64> = text
        .as_bytes()
        .chunks(8)
        .map(|chunk| chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)))
        .collect();
    words.push(text.len() as u64);
    mix(&words)
}

/// A stream of random numbers for one key.
#[derive(Clone, Debug)]
pub struct Rng {
    key: u64,
    counter: u64,
}

impl Rng {
    /// The stream of a key.
    pub fn new(key: &[u64]) -> Rng {
        Rng { key: mix(key), counter: 0 }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.counter += 1;
        mix(&[self.key, self.counter])
    }

    /// A whole number below `bound` (which must not be zero), without bias that matters: the bound is far
    /// below 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A whole number from `low` to `high`, both included.
    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as u64) as i64
    }

    /// True with this probability; nothing is drawn where it is zero.
    pub fn chance(&mut self, probability: f64) -> bool {
        const PARTS: u64 = 1 << 32;
        probability > 0.0 && (self.below(PARTS) as f64) < probability * PARTS as f64
    }

    /// One item of a slice that is not empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}
