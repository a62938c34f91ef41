//! The few vector operations that every CPU kernel is written with.
//!
//! A kernel is an `#[inline(always)]` function generic over [`Simd`]; [`simd_dispatch!`] compiles it once for
//! each [`Level`](super::level::Level) inside a function that has the level's instructions enabled, so that
//! the operations below inline to single instructions. The trait has no arithmetic of its own beyond that:
//! what is summed in which order is decided by the kernel, per row, never by the batch.
//!
//! Conversions between numbers and 8- or 4-bit codes have plain bodies here; a level overrides them where it
//! has the instructions. Codes are the same at every level, bit for bit.

use super::quant::codec;

/// Vectors of `LANES` f32 at one instruction-set level.
///
/// # Safety
/// Every method requires that the CPU has the instructions of the implementing level, and that pointers are
/// valid for the lanes read or written (no alignment needed).
pub unsafe trait Simd: Copy + 'static {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// A vector of `LANES` i32.
    type I: Copy;
    /// f32 per vector.
    const LANES: usize;
    /// Rows of the GEMM register tile, whose columns are two vectors.
    const MR: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Loads the first `n <= LANES` values, the rest are zero.
    unsafe fn load_n(p: *const f32, n: usize) -> Self::V;
    /// Stores the first `n <= LANES` values.
    unsafe fn store_n(p: *mut f32, v: Self::V, n: usize);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sqrt(a: Self::V) -> Self::V;
    /// The larger of the two; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of the two; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the level has it.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Keeps the first `n` lanes and puts `fill` into the others.
    unsafe fn keep_n(v: Self::V, n: usize, fill: f32) -> Self::V;
    /// Sum of the lanes, always in the same order.
    unsafe fn sum(v: Self::V) -> f32;
    /// Largest lane.
    unsafe fn largest(v: Self::V) -> f32;
    /// Nearest integer, ties to even.
    unsafe fn round(v: Self::V) -> Self::V;
    /// 2^v for integral v in [-126, 127].
    unsafe fn pow2(v: Self::V) -> Self::V;

    /// `LANES` words of two bf16: the low halves as f32, and the high ones.
    unsafe fn load_pairs(p: *const u32) -> [Self::V; 2];
    /// [`Simd::load_pairs`] of the first `n <= LANES` words, the rest are zero.
    unsafe fn load_pairs_n(p: *const u32, n: usize) -> [Self::V; 2];
    /// Stores as bf16, rounding to nearest even.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);
    /// Rounds to bf16 and back.
    unsafe fn round_bf16(v: Self::V) -> Self::V;
    /// Adds to each lane the products of a pair of bf16: `a` is one pair for all lanes, `b` a pair per lane.
    unsafe fn dot_bf16(acc: Self::V, a: u32, b: Self::I) -> Self::V;
    /// [`Simd::dot_bf16`] with a pair in memory, for products that have other work beside them.
    #[inline(always)]
    unsafe fn dot_bf16_at(acc: Self::V, a: *const u32, b: Self::I) -> Self::V {
        // SAFETY: the caller gives a readable word.
        unsafe { Self::dot_bf16(acc, *a, b) }
    }

    /// Stores a word of two bf16 per lane, `low` in the low half; subnormals may become zero.
    unsafe fn store_pairs(p: *mut u32, low: Self::V, high: Self::V);
    /// Stores `LANES` words of two bf16 made from `2 * LANES` neighbouring f32, the `first` and those after
    /// them; subnormals may become zero.
    unsafe fn store_neighbours(p: *mut u32, first: Self::V, second: Self::V);

    unsafe fn zero_i() -> Self::I;
    /// Adds to each lane four products of an unsigned byte of `a` (the same four for all lanes) and a signed
    /// byte of `b`.
    unsafe fn dot_u8i8(acc: Self::I, a: u32, b: Self::I) -> Self::I;
    /// Adds to each lane two products of signed 16-bit numbers: `a` is one pair for all lanes, `b` a pair per
    /// lane.
    unsafe fn dot_i16(acc: Self::I, a: u32, b: Self::I) -> Self::I;
    /// The signed bytes 0 and 2 of every lane as a pair of 16-bit numbers, and those of 1 and 3.
    unsafe fn widen_i8(bytes: Self::I) -> [Self::I; 2];
    unsafe fn load_i(p: *const i32) -> Self::I;
    unsafe fn store_i(p: *mut i32, v: Self::I);
    /// The integers as f32, rounded to nearest even.
    unsafe fn to_f32(v: Self::I) -> Self::V;
    /// The bits of the integers as f32.
    unsafe fn bits_as_f32(v: Self::I) -> Self::V;

    /// The larger of `acc` and the bits of |v|, lane by lane: as integers, so that infinities and
    /// NaNs win.
    unsafe fn abs_max(acc: Self::I, v: Self::V) -> Self::I;
    /// Largest lane.
    unsafe fn largest_i(v: Self::I) -> i32;
    /// Stores past the caches where the level can; `p` is aligned to the vector. Call [`Simd::fence`] after
    /// the last.
    #[inline(always)]
    unsafe fn stream_i(p: *mut i32, v: Self::I) {
        // SAFETY: the caller's promise.
        unsafe { Self::store_i(p, v) }
    }
    /// Orders streamed stores before everything that follows.
    #[inline(always)]
    unsafe fn fence() {}
    /// Prefetches the cache line at `p`, which may be any address, to come into the L2.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// Prefetches the cache line at `p`, which may be any address, to come into the first-level cache.
    #[inline(always)]
    unsafe fn prefetch_close(_p: *const u8) {}
    /// Prefetches the cache line at `p`, which may be any address, to write to it.
    #[inline(always)]
    unsafe fn prefetch_for_writing(_p: *const u8) {}

    /// Stores the nearest signed bytes (ties to even), saturating.
    #[inline(always)]
    unsafe fn store_i8(p: *mut u8, v: Self::V) {
        // SAFETY: the caller gives LANES writable bytes.
        unsafe { each_lane::<Self>(v, |lane, x| *p.add(lane) = codec::i8_code(x)) }
    }
    /// Stores the nearest signed 16-bit numbers (ties to even), saturating; what a NaN becomes is open.
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, v: Self::V) {
        // SAFETY: the caller gives LANES writable numbers.
        unsafe { each_lane::<Self>(v, |lane, x| *p.add(lane) = x.round_ties_even() as i16) }
    }
    /// Stores `LANES` words of four neighbours times `factor`, each as [`Simd::store_i8`] rounds it and 128
    /// larger.
    #[inline(always)]
    unsafe fn store_offset_i8(words: *mut u32, values: *const f32, factor: f32) {
        // SAFETY: the caller gives 4 * LANES readable numbers and LANES writable words.
        unsafe {
            for part in 0..4 {
                let scaled = Self::mul(Self::load(values.add(part * Self::LANES)), Self::splat(factor));
                Self::store_i8(words.cast::<u8>().add(part * Self::LANES), scaled);
            }
            for word in 0..Self::LANES {
                *words.add(word) ^= 0x8080_8080;
            }
        }
    }
    /// `LANES` signed bytes as f32.
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::V {
        // SAFETY: the caller gives LANES readable bytes.
        unsafe { from_lanes::<Self>(|lane| (*p.add(lane)).cast_signed() as f32) }
    }
    /// Rounds to the values of E4M3 (nearest, ties to even). Magnitudes are at most 448, or so little more
    /// that they round to it; the sign of what becomes zero may be lost.
    #[inline(always)]
    unsafe fn round_e4m3(v: Self::V) -> Self::V {
        // SAFETY: register operations and an array on the stack.
        unsafe {
            let mut lanes = [0.0f32; MAX_LANES];
            each_lane::<Self>(v, |lane, x| lanes[lane] = codec::e4m3_value(codec::e4m3_code(x)));
            Self::load(lanes.as_ptr())
        }
    }
    /// Stores as E4M3 (nearest, ties to even), saturating at 448.
    #[inline(always)]
    unsafe fn store_e4m3(p: *mut u8, v: Self::V) {
        // SAFETY: the caller gives LANES writable bytes.
        unsafe { each_lane::<Self>(v, |lane, x| *p.add(lane) = codec::e4m3_code(x)) }
    }
    /// From `LANES` rows of `LANES` numbers, `stride` apart, each row times its factor (the same in all
    /// lanes): signed bytes or E4M3 codes as [`Simd::store_i8`] and [`Simd::store_e4m3`] store them, four
    /// neighbours of a row in a word, a row in a lane. These are `LANES / 4` vectors, the others are of no
    /// use.
    #[inline(always)]
    unsafe fn byte_columns<const E4M3: bool>(
        rows: *const f32,
        stride: usize,
        factors: &[Self::V; MAX_LANES],
    ) -> [Self::I; 4] {
        let mut words = [[0u32; MAX_LANES]; 4];
        // SAFETY: the caller gives the rows; the arrays have the lanes of any level.
        unsafe {
            for (lane, &factor) in factors.iter().enumerate().take(Self::LANES) {
                let mut codes = [0u8; MAX_LANES];
                let scaled = Self::mul(Self::load(rows.add(lane * stride)), factor);
                if E4M3 {
                    Self::store_e4m3(codes.as_mut_ptr(), scaled);
                } else {
                    Self::store_i8(codes.as_mut_ptr(), scaled);
                }
                for (words, &codes) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
                    words[lane] = u32::from_le_bytes(codes);
                }
            }
            let [a, b, c, d] = words.each_ref().map(|words| words.as_ptr().cast());
            [Self::load_i(a), Self::load_i(b), Self::load_i(c), Self::load_i(d)]
        }
    }
    /// `LANES` E4M3 codes as f32.
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: the caller gives LANES readable bytes.
        unsafe { from_lanes::<Self>(|lane| codec::e4m3_value(*p.add(lane))) }
    }
    /// `LANES` words of four E4M3 codes in the order of [`codec::e4m3_word`], and whether some code is zero
    /// or subnormal.
    #[inline(always)]
    unsafe fn order_e4m3(codes: Self::I) -> (Self::I, bool) {
        let mut words = [0i32; MAX_LANES];
        let mut small = false;
        // SAFETY: the array has the lanes of any level.
        unsafe {
            Self::store_i(words.as_mut_ptr(), codes);
            for word in words.iter_mut().take(Self::LANES) {
                let codes = word.to_le_bytes();
                small |= codes.into_iter().any(codec::e4m3_is_small);
                *word = codec::e4m3_word(codes) as i32;
            }
            (Self::load_i(words.as_ptr()), small)
        }
    }
    /// The first half of decoding E4M3: from `LANES` ordered words of four codes what [`Simd::place_e4m3`]
    /// makes words of two bf16 of, for the first pair of codes or the `LAST`. The byte before the words must
    /// be readable.
    #[inline(always)]
    unsafe fn shift_e4m3<const LAST: bool>(codes: *const u32) -> Self::I {
        let mut words = [0i32; MAX_LANES];
        for (lane, word) in words.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller gives LANES readable words.
            let [a, b, c, d] = codec::e4m3_codes(unsafe { *codes.add(lane) });
            let [low, high] = if LAST { [c, d] } else { [a, b] }
                .map(|code| (codec::e4m3_value(code) / codec::E4M3_SHIFT).to_bits() >> 16);
            *word = (low | high << 16) as i32;
        }
        // SAFETY: the array has the lanes of any level.
        unsafe { Self::load_i(words.as_ptr()) }
    }
    /// The second half: bf16 that are [`codec::E4M3_SHIFT`] too small; zeros and subnormals may be wrong.
    #[inline(always)]
    unsafe fn place_e4m3(shifted: Self::I) -> Self::I {
        shifted
    }
    /// Puts right the zeros and subnormals of [`Simd::place_e4m3`].
    #[inline(always)]
    unsafe fn mend_e4m3(words: Self::I) -> Self::I {
        words
    }
    /// From `LANES` words of eight 4-bit codes, four vectors of words of two bf16 each, `stride` words apart;
    /// `table` has the bf16 bits of each code.
    #[inline(always)]
    unsafe fn decode_nibbles(codes: *const u32, table: &[u32; 16], out: *mut u32, stride: usize) {
        for lane in 0..Self::LANES {
            // SAFETY: the caller gives LANES readable words and four vectors of writable ones.
            unsafe {
                let word = *codes.add(lane);
                for pair in 0..4 {
                    let two = word >> (8 * pair);
                    let [low, high] = [two & 15, two >> 4 & 15].map(|code| table[code as usize]);
                    *out.add(pair * stride + lane) = low | high << 16;
                }
            }
        }
    }
    /// Multiplies both bf16 of every word by the lane's number; the products must be exact in bf16.
    #[inline(always)]
    unsafe fn scale_pairs(words: *mut u32, scale: Self::V) {
        // SAFETY: the caller gives LANES words.
        unsafe {
            each_lane::<Self>(scale, |lane, scale| {
                let word = *words.add(lane);
                let [low, high] =
                    [word << 16, word & 0xffff_0000].map(|half| (f32::from_bits(half) * scale).to_bits());
                *words.add(lane) = low >> 16 | high;
            })
        }
    }
    /// Transposes `n <= LANES` rows of `LANES` words: `LANES` rows of `n` words are written.
    #[inline(always)]
    unsafe fn transpose(from: *const u32, from_stride: usize, n: usize, to: *mut u32, to_stride: usize) {
        for column in 0..Self::LANES {
            for row in 0..n {
                // SAFETY: the caller gives two areas that do not overlap.
                unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) }
            }
        }
    }
}

/// No level has more lanes.
pub(crate) const MAX_LANES: usize = 16;

/// Calls `f(lane, value)` for every lane: for operations that a level has no instructions for.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn each_lane<S: Simd>(v: S::V, mut f: impl FnMut(usize, f32)) {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: the array holds the lanes of any level.
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    for (lane, &x) in lanes.iter().enumerate().take(S::LANES) {
        f(lane, x);
    }
}

/// A vector with `f(lane)` in every lane.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
unsafe fn from_lanes<S: Simd>(f: impl Fn(usize) -> f32) -> S::V {
    let mut lanes = [0.0f32; MAX_LANES];
    for (lane, x) in lanes.iter_mut().enumerate().take(S::LANES) {
        *x = f(lane);
    }
    // SAFETY: the array has the lanes of any level.
    unsafe { S::load(lanes.as_ptr()) }
}

/// e^x within two units in the last place for finite results; 0 is never returned (the smallest result is
/// about 1e-38), NaN stays NaN.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the instructions of S.
    unsafe {
        // The bound is the second operand of neither max nor min, so that a NaN in x survives.
        let x = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        // x - n ln 2 in two steps: the first constant has few bits, so n times it is exact.
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_5e-2, 1.666_666_5e-1, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::fma(S::mul(r, r), p, S::add(r, S::splat(1.0)));
        S::mul(p, S::pow2(n))
    }
}

/// Copies values past the caches where the target is aligned to vectors.
///
/// # Safety
/// As for [`Simd`]; `to` holds the values. Call [`Simd::fence`] after the last.
#[inline(always)]
pub(crate) unsafe fn copy_past_caches<S: Simd>(values: &[f32], to: *mut f32) {
    // SAFETY: whole vectors, then what is left.
    unsafe {
        let streamed =
            if to.addr().is_multiple_of(4 * S::LANES) { values.len() / S::LANES * S::LANES } else { 0 };
        for i in (0..streamed).step_by(S::LANES) {
            S::stream_i(to.add(i).cast(), S::load_i(values.as_ptr().add(i).cast()));
        }
        let rest = &values[streamed..];
        std::ptr::copy_nonoverlapping(rest.as_ptr(), to.add(streamed), rest.len());
    }
}

/// Declares a function that runs a generic kernel at a level known only at run time.
macro_rules! simd_dispatch {
    // For kernels without bf16 and 8-bit dot products: the code of both AVX-512 levels is one.
    (
        plain $(#[$meta:meta])*
        $vis:vis fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $(-> $ret:ty)? = $generic:ident
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The machine must have the instructions of `level`, and every pointer must be valid for the shapes
        /// given.
        $vis unsafe fn $name(level: $crate::cpu::level::Level, $($arg: $ty),*) $(-> $ret)? {
            use $crate::cpu::level::Level;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: passed on to the caller of the dispatched function.
                unsafe { $generic::<$crate::cpu::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: passed on to the caller of the dispatched function.
                unsafe { $generic::<$crate::cpu::avx512::Avx512>($($arg),*) }
            }
            // SAFETY: the caller promises that the machine has the instructions of `level`.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Avx512Bf16 => avx512($($arg),*),
                    _ => $generic::<$crate::cpu::scalar::Scalar>($($arg),*),
                }
            }
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $(-> $ret:ty)? = $generic:ident
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The machine must have the instructions of `level`, and every pointer must be valid for the shapes
        /// given.
        $vis unsafe fn $name(level: $crate::cpu::level::Level, $($arg: $ty),*) $(-> $ret)? {
            use $crate::cpu::level::Level;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: passed on to the caller of the dispatched function.
                unsafe { $generic::<$crate::cpu::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: passed on to the caller of the dispatched function.
                unsafe { $generic::<$crate::cpu::avx512::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")]
            unsafe fn avx512bf16($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: passed on to the caller of the dispatched function.
                unsafe { $generic::<$crate::cpu::avx512::Avx512Bf16>($($arg),*) }
            }
            // SAFETY: the caller promises that the machine has the instructions of `level`.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512Bf16 => avx512bf16($($arg),*),
                    _ => $generic::<$crate::cpu::scalar::Scalar>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use simd_dispatch;
