//! Numbers that kernels and host must agree on: written once, here, and given to the compiler of the kernels
//! with `-D` (so they are part of the name of what it caches). The benchmarks of single kernels read them
//! from this text.

use crate::checksum;
use crate::types::{self, Heads};

macro_rules! shared {
    ($($(#[$meta:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$meta])* pub(super) const $name: usize = $value;)*

        /// Name and value of each.
        const SHARED: &[(&str, usize)] = &[$((stringify!($name), $name)),*];
    };
}

shared! {
    /// Words of a sampled token: its number, log-probability and entropy.
    TOKEN_WORDS = 3;
    /// Words from the absmax of a row to that of the next: side by side, they would all lie in one slice of
    /// the L2.
    ABSMAX_STRIDE = 32;
    /// Fours of a row that a thread quantizes where the absmax is known.
    QUANTIZED_FOURS = 4;

    /// Columns of the vocabulary that are summed up at a time.
    HEAD_CHUNK = 1024;
    /// Threads of a block that sums logits up, that samples a token, and that samples one of some tokens.
    HEAD_THREADS = 128;
    SAMPLE_THREADS = 128;
    TRUNCATED_THREADS = 256;
    /// Threads of a block that adds biases to logits.
    BIAS_THREADS = 128;
    /// Threads that normalise a row.
    NORM_THREADS = 256;
    /// Threads that sum squares up, and warps that share the partial sums of columns.
    SUM_THREADS = 256;
    ADDING_WARPS = 8;
    /// Moments that share an exponent.
    MOMENT_BLOCK = types::MOMENT_BLOCK;
    /// Values of a block of a checksum, and its chains.
    CHECKSUM_BLOCK = checksum::BLOCK;
    CHECKSUM_CHAINS = checksum::CHAINS;

    /// Rows and bytes of k of a tile of packed weights.
    TILE_ROWS = 64;
    TILE_DEPTH = 128;
    /// Numbers along k of a tile of weights in four bits, and its bytes: codes and scales.
    BITS4_DEPTH = 128;
    INT4_TILE = 4352;
    NVFP4_TILE = 4608;
    /// Rows and columns of results that a block of the plain GEMM has.
    PLAIN_TILE = 64;
    /// Rows of weights that ranges are counted in, and the blocks of a range: each takes half of the rows.
    CUT_ROWS = 256;
    SIDES = 2;
    /// Most ranges that a tile is made of: its split-K reduction has as many parts.
    MAX_PARTS = 4;
    /// Tokens whose sums one of the blocks that share a tile adds up at a time.
    STRETCH = 32;
    /// KiB of shared memory for the stages of a GEMM, and of a gated one, whose warps have no buffers beside
    /// them; and most stages.
    STAGE_KIB = 196;
    GATED_STAGE_KIB = 212;
    /// The same of one that stores in the background, and of the area that its results are stored from.
    BULK_STAGE_KIB = 160;
    BULK_KIB = 64;
    /// Tokens that it stores at a time.
    BULK_CHUNK = 64;
    MAX_STAGES = 16;
    /// Tokens of a gated GEMM, and the most columns for which it has a warpgroup for every 64 of them.
    GATED_TOKENS = 256;
    GATED_WIDE = 64;
    /// What the outputs of a GEMM are: [`super::gemm::Gating`].
    GATING_NONE = 0;
    GATING_SWIGLU = 1;

    /// Formats of keys and values.
    KV_F32 = 0;
    KV_BF16 = 1;
    KV_INT8 = 2;
    KV_FP8 = 3;
    /// Largest head dimension, and warps of a block, of plain attention.
    MAX_HEAD_DIM = Heads::MAX_DIM;
    PLAIN_WARPS = 4;
    /// Keys of a tile, and tiles of a split: contexts are summed up by splits.
    FLASH_TILE = 64;
    SPLIT_TILES = 8;
    /// Rows (queries times heads of a group) and threads of a block of the prefill kernel.
    PREFILL_ROWS = 128;
    PREFILL_THREADS = 256;
    /// KiB of keys and values on their way in the prefill kernel of Hopper.
    PREFILL_RING_KIB = 96;
    /// Heads of a block of the decode kernel, and its most warps.
    DECODE_HEADS = 8;
    MAX_DECODE_WARPS = 8;
    /// Most sequences of the decode kernel of long contexts.
    MAX_STREAM_SEQUENCES = 1024;
    /// What the decode kernel writes.
    DECODED_F32 = 0;
    DECODED_BF16 = 1;
    DECODED_INT8 = 2;
    DECODED_FP8 = 3;
    /// Rows of a tile of the backward kernels, those that pass by at a time, and threads of a block.
    BACKWARD_TILE = 64;
    BACKWARD_PASSING = 32;
    BACKWARD_THREADS = 128;
    /// Warpgroups that own a tile each, on Hopper.
    BACKWARD_GROUPS = 2;
}

/// Options that tell the compiler.
pub(super) fn options() -> impl Iterator<Item = String> {
    let shared = SHARED.iter().map(|(name, value)| format!("-D{name}={value}"));
    shared.chain([format!("-DCHECKSUM_SEED={:#x}ull", checksum::SEED)])
}

#[cfg(test)]
mod tests {
    use super::super::compile::{HEADERS, SOURCES};
    use super::*;

    fn is_word(c: char) -> bool {
        c.is_ascii_alphanumeric() || c == '_'
    }

    /// A number that no kernel uses says nothing, and one that a kernel writes itself is written twice.
    #[test]
    fn every_shared_number_is_used_by_kernels_and_written_by_none() {
        let texts = || SOURCES.iter().map(|s| s.text).chain(HEADERS.iter().map(|(_, text)| *text));
        for name in SHARED.iter().map(|(name, _)| *name).chain(["CHECKSUM_SEED"]) {
            let uses = |text: &str| text.split(|c| !is_word(c)).any(|word| word == name);
            assert!(texts().any(uses), "{name}");
            for written in [format!("#define {name} "), format!(" {name} = ")] {
                assert!(texts().all(|text| !text.contains(&written)), "{written}");
            }
        }
    }
}
