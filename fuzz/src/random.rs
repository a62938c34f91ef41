//! Random numbers that depend on a name and an index alone (SplitMix64).

/// A stream of random numbers.
pub struct Random(u64);

impl Random {
    /// The stream of input `index` of a target.
    pub fn of(name: &str, seed: u64, index: u64) -> Random {
        let mut state = Random(seed ^ index.wrapping_mul(0xD1B5_4A32_D192_ED03));
        for byte in name.bytes() {
            state.0 = state.bits() ^ u64::from(byte);
        }
        state
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 where there is none.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len()))
    }
}
