//! Which instruction set the CPU kernels run with.
//!
//! Every kernel is written once, generic over [`super::simd::Simd`], and compiled once per level; the level
//! is chosen when a [`super::Cpu`] is made, so one binary serves every x86-64 machine (and, with the scalar
//! level, every other one). Results are reproducible bit for bit within a level, not across levels: wider
//! registers sum in another order.

use std::fmt;

/// An instruction set the kernels are compiled for, from the slowest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust; runs everywhere and is the reference.
    Scalar,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F/BW/DQ/VL without the bf16 and 8-bit dot products.
    Avx512,
    /// AVX-512 with BF16 and VNNI dot products.
    Avx512Bf16,
}

/// Why a level asked for by name cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LevelError {
    /// The name is not one of the known ones.
    #[error("QURL_CPU={0:?} is not a CPU level; expected scalar, avx2, avx512 or avx512-without-bf16")]
    Unknown(String),
    /// The machine lacks the instructions.
    #[error("QURL_CPU={0:?} asks for instructions this machine does not have (best here: {1})")]
    Unsupported(String, Level),
}

impl Level {
    /// The best level of this machine.
    pub fn best() -> Level {
        *Level::available().last().unwrap_or(&Level::Scalar)
    }

    /// All levels this machine can run, slowest first.
    pub fn available() -> Vec<Level> {
        let mut levels = vec![Level::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(Level::Avx2);
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Level::Avx512);
                if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni") {
                    levels.push(Level::Avx512Bf16);
                }
            }
        }
        levels
    }

    /// The level named by `QURL_CPU`, or the best one when it is not set.
    pub fn from_env() -> Result<Level, LevelError> {
        match std::env::var("QURL_CPU") {
            Ok(name) if !name.is_empty() => Level::named(&name),
            _ => Ok(Level::best()),
        }
    }

    /// The level with this name: `scalar`, `avx2`, `avx512`, which takes the bf16 and 8-bit dot products
    /// where present, or `avx512-without-bf16`, which does not.
    pub fn named(name: &str) -> Result<Level, LevelError> {
        let available = Level::available();
        let candidates: &[Level] = match name {
            "scalar" => &[Level::Scalar],
            "avx2" => &[Level::Avx2],
            "avx512" => &[Level::Avx512Bf16, Level::Avx512],
            "avx512-without-bf16" => &[Level::Avx512],
            _ => return Err(LevelError::Unknown(name.to_string())),
        };
        candidates
            .iter()
            .copied()
            .find(|level| available.contains(level))
            .ok_or_else(|| LevelError::Unsupported(name.to_string(), Level::best()))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Avx512Bf16 => "avx512 (bf16, vnni)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Level::named("scalar"), Ok(Level::Scalar));
        assert_eq!(Level::named("sse9"), Err(LevelError::Unknown("sse9".into())));
        assert!(Level::available().contains(&Level::best()));
        let older = Level::available().contains(&Level::Avx512).then_some(Level::Avx512);
        assert_eq!(Level::named("avx512-without-bf16").ok(), older);
    }
}
