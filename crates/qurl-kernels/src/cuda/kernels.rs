//! Every kernel with the arguments it takes: a launch names them, and the compiler of this program checks
//! them.
//!
//! A struct holds the arguments of one kernel or of several that differ in number format or tile; its fields
//! have the names and the order of the kernel's parameters in `cu/` (a test compares them with the sources).
//! A kernel is a constant of type [`Kernel`] with the name it has there, bound to its arguments: nothing else
//! can be launched with it. `overlaps` marks those that wait for the kernel before them by themselves, and
//! may be launched before it has ended.

use super::ffi::{DevicePtr as Ptr, TensorMap};
use std::ffi::c_void;
use std::marker::PhantomData;

/// Most arguments of a kernel.
pub(super) const MAX_ARGUMENTS: usize = 24;

/// Where the driver finds the arguments of a launch.
pub(super) type Pointers = [*mut c_void; MAX_ARGUMENTS];

/// Arguments of a kernel.
pub(super) trait Arguments {
    /// Whether the kernel may be launched before the one before it has ended.
    const OVERLAPS: bool;
    /// Names and types.
    #[cfg(test)]
    const PARAMETERS: &'static [(&'static str, &'static str)];
    /// Where each of them is, in the kernel's order.
    fn pointers(&self, to: &mut Pointers);
}

/// A kernel that takes the arguments `A`.
pub(super) struct Kernel<A> {
    pub id: KernelId,
    arguments: PhantomData<fn(A)>,
}

impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kernel<A> {}

impl<A> std::fmt::Debug for Kernel<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.id.name())
    }
}

macro_rules! overlaps {
    () => {
        false
    };
    (overlaps) => {
        true
    };
}

macro_rules! kernels {
    ($(
        $(#[$meta:meta])*
        $args:ident($($field:ident: $ty:ty),* $(,)?) $($overlaps:ident)?
        { $($file:literal: $($kernel:ident),+;)+ }
    )*) => {
        /// A kernel, whatever it takes: a place in tables. Named as in `cu/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        pub(super) enum KernelId {
            $($($($kernel,)+)+)*
        }

        impl KernelId {
            /// All of them, in order.
            pub const ALL: &'static [KernelId] = &[$($($(KernelId::$kernel,)+)+)*];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self {
                    $($($(KernelId::$kernel => stringify!($kernel),)+)+)*
                }
            }

            /// The file of its source, without ending.
            pub fn file(self) -> &'static str {
                match self {
                    $($($(KernelId::$kernel => $file,)+)+)*
                }
            }

            /// Names and types of its parameters.
            #[cfg(test)]
            fn parameters(self) -> &'static [(&'static str, &'static str)] {
                match self {
                    $($($(KernelId::$kernel => $args::PARAMETERS,)+)+)*
                }
            }
        }

        $(
            $(#[$meta])*
            #[derive(Clone, Copy)]
            pub(super) struct $args {
                $(pub $field: $ty,)*
            }

            impl Arguments for $args {
                const OVERLAPS: bool = overlaps!($($overlaps)?);
                #[cfg(test)]
                const PARAMETERS: &'static [(&'static str, &'static str)] =
                    &[$((stringify!($field), stringify!($ty))),*];

                fn pointers(&self, to: &mut Pointers) {
                    let own = [$((&raw const self.$field).cast_mut().cast::<c_void>()),*];
                    to[..own.len()].copy_from_slice(&own);
                }
            }

            $($(
                #[allow(non_upper_case_globals)]
                pub(super) const $kernel: Kernel<$args> =
                    Kernel { id: KernelId::$kernel, arguments: PhantomData };
            )+)+
        )*
    };
}

kernels! {
    // ---- rows ---------------------------------------------------------------------------------------------

    /// Rows of a table, by number.
    Gather(table: Ptr, ids: Ptr, d: u32, out: Ptr) overlaps { "elementwise": gather; }
    /// Rows of a table, by tokens of a batch.
    GatherTokens(table: Ptr, tokens: Ptr, sampled: Ptr, d: u32, out: Ptr) overlaps {
        "elementwise": gather_tokens;
    }
    /// Rows added to those of a table, a block a target.
    ScatterAdd(rows: Ptr, ids: Ptr, starts: Ptr, order: Ptr, d: u32, table: Ptr) {
        "elementwise": scatter_add;
    }
    /// Rotation of heads.
    Rope(x: Ptr, stride: u32, heads: u32, half: u32, positions: Ptr, cos: Ptr, sin: Ptr, inverse: u32) {
        "elementwise": rope;
    }
    /// SwiGLU of gate and up projections.
    Swiglu(gate_up: Ptr, f: u32, count: u64, out: Ptr) { "elementwise": swiglu; }
    /// Its backward pass, in place.
    SwigluBackward(gate_up: Ptr, f: u32, out: Ptr) overlaps { "elementwise": swiglu_backward; }
    /// Its backward pass in bf16, where its output was kept.
    SwigluBackwardBf16(gate_up: Ptr, dout: Ptr, f: u32) overlaps {
        "elementwise": swiglu_backward_bf16;
    }
    /// Column sums of some rows.
    ColumnPartials(x: Ptr, w: Ptr, rows: u32, d: u32, per: u32, partials: Ptr) {
        "elementwise": column_partials;
    }
    /// Their sums, in order.
    AddPartials(partials: Ptr, parts: u32, d: u32, sums: Ptr) { "elementwise": add_partials; }
    /// Dot products of rows with a vector.
    RowDots(x: Ptr, w: Ptr, d: u32, out: Ptr) { "elementwise": row_dots; }
    /// Their backward pass.
    OuterProduct(g: Ptr, w: Ptr, d: u32, count: u64, dx: Ptr) { "elementwise": outer_product; }
    /// Random numbers.
    RandomFill(out: Ptr, count: u64, seed: u64, factor: f32) { "elementwise": random_fill; }
    /// A block of a matrix, scaled, into another matrix.
    ScaleBlock(
        from: Ptr, from_stride: u32, to: Ptr, to_stride: u32, rows: u32, columns: u32, factor: f32, add: u32
    ) { "elementwise": scale_block; }

    // ---- norms --------------------------------------------------------------------------------------------

    /// RMSNorm of rows or heads.
    NormForward(
        x: Ptr, gain: Ptr, start: u64, per: u32, stride: u32, width: u32, eps: f32, out: Ptr
    ) overlaps { "norm": norm_forward; }
    /// RMSNorm of dense rows, rounded.
    NormForwardBf16(x: Ptr, gain: Ptr, width: u32, eps: f32, out: Ptr) overlaps { "norm": norm_forward_bf16; }
    /// Inverse root mean squares.
    NormScales(x: Ptr, start: u64, per: u32, stride: u32, width: u32, eps: f32, scales: Ptr) {
        "norm": norm_scales;
    }
    /// Gradients of the gain from some rows.
    NormGainPartials(
        x: Ptr, dy: Ptr, scales: Ptr, start: u64, per: u32, stride: u32, width: u32, rows: u32, many: u32,
        partials: Ptr
    ) { "norm": norm_gain_partials; }
    /// Gradient of the input.
    NormBackward(
        x: Ptr, gain: Ptr, scales: Ptr, start: u64, per: u32, stride: u32, width: u32, eps: f32, dy: Ptr,
        dx: Ptr, add: u32
    ) { "norm": norm_backward; }
    /// All of it for dense rows that are held in registers. Names tell how many fours a thread has.
    NormBackwardRows(
        x: Ptr, gain: Ptr, width: u32, eps: f32, dy: Ptr, dx: Ptr, rows: u32, many: u32, partials: Ptr,
        normed: Ptr
    ) overlaps {
        "norm":
            norm_backward_rows_1, norm_backward_rows_2, norm_backward_rows_4, norm_backward_rows_8;
    }

    // ---- operands of GEMMs --------------------------------------------------------------------------------

    /// Rows in bf16.
    RowsBf16(x: Ptr, k: u32, out: Ptr) overlaps { "quantize": rows_bf16; }
    /// Rows in eight bits.
    QuantizeRows(x: Ptr, k: u32, out: Ptr, scales: Ptr) overlaps { "quantize": rows_i8, rows_e4m3; }
    /// The same where the absmax of each row is known.
    QuantizeKnown(x: Ptr, k: u32, absmax: Ptr, out: Ptr, scales: Ptr) overlaps {
        "quantize": known_i8, known_e4m3;
    }
    /// RMSNorm of rows, in bf16.
    NormRowsBf16(x: Ptr, gain: Ptr, k: u32, eps: f32, out: Ptr) overlaps { "quantize": norm_bf16; }
    /// RMSNorm of rows, in eight bits; places for absmax are cleared on the way.
    QuantizeNorm(x: Ptr, gain: Ptr, k: u32, eps: f32, out: Ptr, scales: Ptr, absmax: Ptr) overlaps {
        "quantize": norm_i8, norm_e4m3;
    }
    /// SwiGLU of rows, in bf16; keeps the projections where training wants them.
    SwigluRowsBf16(gate_up: Ptr, f: u32, kept: Ptr, out: Ptr) overlaps { "quantize": swiglu_bf16; }
    /// SwiGLU of rows, in eight bits.
    QuantizeSwiglu(gate_up: Ptr, f: u32, out: Ptr, scales: Ptr) overlaps {
        "quantize": swiglu_i8, swiglu_e4m3;
    }
    /// Weights in eight bits.
    QuantizeWeights(w: Ptr, k: u32, stochastic: u32, seed: u64, out: Ptr, scales: Ptr, bad: Ptr) {
        "quantize": weights_i8, weights_e4m3;
    }
    /// Rows into tiles.
    GemmPack(rows: Ptr, tiles: Ptr, n: u32, row_bytes: u32, k_blocks: u32) { "gemm_pack": gemm_pack; }
    /// Weights in f32 into tiles of bf16, and into rows of it where they are wanted.
    GemmPackBf16(weights: Ptr, rows: Ptr, tiles: Ptr, n: u32, k: u32, k_blocks: u32) {
        "gemm_pack": gemm_pack_bf16;
    }
    /// Tiles (or rows) into rows of bf16.
    GemmUnpack(weights: Ptr, scales: Ptr, rows: Ptr, n: u32, k: u32, k_blocks: u32) {
        "gemm_pack": gemm_unpack_bf16, gemm_unpack_i8, gemm_unpack_e4m3;
    }

    /// Weights in four bits into rows.
    WeightsInt4(w: Ptr, k: u32, stochastic: u32, seed: u64, out: Ptr, scales: Ptr, bad: Ptr) {
        "pack_bits4": weights_int4;
    }
    WeightsNvfp4(
        w: Ptr, k: u32, stochastic: u32, seed: u64, out: Ptr, scales: Ptr, absmax: Ptr, whole: Ptr
    ) { "pack_bits4": weights_nvfp4; }
    /// The largest of all weights.
    WeightsAbsmax(w: Ptr, k: u32, absmax: Ptr, bad: Ptr) { "pack_bits4": weights_absmax; }
    /// Such rows into tiles.
    PackBits4(rows: Ptr, scales: Ptr, tiles: Ptr, n: u32, k: u32, k_blocks: u32) {
        "pack_bits4": pack_int4, pack_nvfp4;
    }
    /// Tiles (or rows) into rows of numbers.
    UnpackBits4(weights: Ptr, scales: Ptr, whole: Ptr, rows: Ptr, n: u32, k: u32, k_blocks: u32) {
        "pack_bits4": unpack_int4_bf16, unpack_nvfp4_bf16, unpack_int4_f32, unpack_nvfp4_f32;
    }

    // ---- GEMMs --------------------------------------------------------------------------------------------

    /// A GEMM with plain arithmetic.
    GemmPlain(
        a: Ptr, a_m: u64, a_k: u64, b: Ptr, b_n: u64, b_k: u64, m: u32, n: u32, k: u32, row_scales: Ptr,
        column_scales: Ptr, bias: Ptr, add: u32, out: Ptr
    ) { "gemm_plain": gemm_plain_f32, gemm_plain_bf16, gemm_plain_i8, gemm_plain_e4m3, gemm_plain_bits4; }
    /// A GEMM with packed weights on any tensor cores.
    GemmMma(
        weights: Ptr, x: Ptr, w_scales: Ptr, x_scales: Ptr, bias: Ptr, out: Ptr, partials: Ptr, tokens: u32,
        n: u32, row_bytes: u32, k_blocks: u32, splits: u32, add: u32
    ) {
        "gemm_mma":
            gemm_mma_bf16_few, gemm_mma_bf16_some, gemm_mma_bf16_many, gemm_mma_int8_few, gemm_mma_int8_some,
            gemm_mma_int8_many, gemm_mma_fp8_few, gemm_mma_fp8_some, gemm_mma_fp8_many;
    }
    /// Its split-K reduction.
    GemmMmaFinish(
        w_scales: Ptr, x_scales: Ptr, bias: Ptr, out: Ptr, partials: Ptr, tokens: u32, n: u32, splits: u32,
        add: u32
    ) { "gemm_mma": gemm_mma_bf16_finish, gemm_mma_int8_finish, gemm_mma_fp8_finish; }
    /// The same two of weights in four bits.
    GemmMmaBits4(
        weights: Ptr, x: Ptr, w_scale: Ptr, bias: Ptr, out: Ptr, partials: Ptr, tokens: u32, n: u32, k: u32,
        k_blocks: u32, splits: u32, add: u32
    ) {
        "gemm_mma_bits4":
            gemm_mma_bits4_int4_few, gemm_mma_bits4_int4_some, gemm_mma_bits4_int4_many,
            gemm_mma_bits4_nvfp4_few, gemm_mma_bits4_nvfp4_some, gemm_mma_bits4_nvfp4_many;
    }
    GemmMmaBits4Finish(
        w_scale: Ptr, bias: Ptr, out: Ptr, partials: Ptr, tokens: u32, n: u32, splits: u32, add: u32
    ) { "gemm_mma_bits4": gemm_mma_bits4_int4_finish, gemm_mma_bits4_nvfp4_finish; }
    /// A GEMM with packed weights on Hopper. Names tell tokens, warpgroups (or columns of a gated one),
    /// blocks of a cluster and schedule.
    GemmHopper(
        map: TensorMap, weights: Ptr, w_scales: Ptr, x_scales: Ptr, bias: Ptr, out: Ptr, partials: Ptr,
        tokens: u32, n: u32, k_blocks: u32, ranges: u32, add: u32, gating: u32, absmax: Ptr, kept: Ptr
    ) overlaps {
        "gemm_bf16":
            gemm_bf16_16_2_1_STREAM, gemm_bf16_64_2_1_STREAM, gemm_bf16_128_2_1_STREAM,
            gemm_bf16_256_2_2_STREAM, gemm_bf16_64_1_1_VIRTUAL, gemm_bf16_128_1_1_VIRTUAL,
            gemm_bf16_128_1_2_SPLIT, gemm_bf16_128_1_4_SPLIT, gemm_bf16_256_2_3_SPLIT,
            gemm_bf16_256_2_4_SPLIT;
        "gemm_int8":
            gemm_int8_16_2_1_STREAM, gemm_int8_64_2_1_STREAM, gemm_int8_128_2_1_STREAM,
            gemm_int8_256_2_2_STREAM, gemm_int8_64_1_1_TILES, gemm_int8_128_1_1_TILES,
            gemm_int8_128_2_1_TILES, gemm_int8_256_2_2_TILES, gemm_int8_128_1_2_SPLIT,
            gemm_int8_128_1_4_SPLIT, gemm_int8_256_2_3_SPLIT, gemm_int8_256_2_4_SPLIT, gemm_int8_256_40_GATED,
            gemm_int8_256_48_GATED, gemm_int8_256_56_GATED, gemm_int8_256_64_GATED, gemm_int8_256_72_GATED;
        "gemm_fp8":
            gemm_fp8_16_2_1_STREAM, gemm_fp8_64_2_1_STREAM, gemm_fp8_128_2_1_STREAM, gemm_fp8_256_2_2_STREAM,
            gemm_fp8_64_1_1_VIRTUAL, gemm_fp8_128_1_1_VIRTUAL, gemm_fp8_128_2_1_VIRTUAL,
            gemm_fp8_128_2_2_VIRTUAL,
            gemm_fp8_128_1_2_SPLIT, gemm_fp8_128_1_4_SPLIT;
        "gemm_int4":
            gemm_int4_16_2_1_STREAM, gemm_int4_64_2_1_STREAM, gemm_int4_64_2_2_STREAM,
            gemm_int4_128_2_2_STREAM, gemm_int4_64_2_1_VIRTUAL, gemm_int4_96_2_1_VIRTUAL;
        "gemm_nvfp4":
            gemm_nvfp4_16_2_1_STREAM, gemm_nvfp4_64_2_1_STREAM, gemm_nvfp4_64_2_2_STREAM,
            gemm_nvfp4_128_2_2_STREAM, gemm_nvfp4_64_2_1_VIRTUAL, gemm_nvfp4_128_2_1_VIRTUAL;
    }

    /// The same with results stored in the background.
    GemmBulk(
        map: TensorMap, out_map: TensorMap, kept_map: TensorMap, weights: Ptr, bias: Ptr, tokens: u32, n: u32,
        k_blocks: u32, ranges: u32, add: u32, gating: u32, kept: Ptr
    ) overlaps { "gemm_bf16": gemm_bf16_128_2_1_BULK, gemm_bf16_128_2_2_BULK, gemm_bf16_192_2_2_BULK; }

    // ---- attention ----------------------------------------------------------------------------------------

    /// Rotation of queries and keys; keys and values into pages.
    RopeWrite(
        qkv: Ptr, rows: u32, width: u32, heads: u32, kv_heads: u32, head_dim: u32, positions: Ptr, cos: Ptr,
        sin: Ptr, slots: Ptr, page_size: u32, format: u32, keys: Ptr, values: Ptr, key_scales: Ptr,
        value_scales: Ptr
    ) overlaps { "kv": rope_write; }
    /// Attention with plain arithmetic.
    AttentionForward(
        qkv: Ptr, width: u32, heads: u32, group: u32, head_dim: u32, scale: f32, spans: Ptr, span_count: u32,
        pages: Ptr, page_size: u32, format: u32, keys: Ptr, values: Ptr, key_scales: Ptr, value_scales: Ptr,
        rows: u32, window: u32, out: Ptr, lse: Ptr
    ) { "attention_plain": attention_forward; }
    /// Dot products of outputs and their gradients.
    AttentionDeltas(out: Ptr, dout: Ptr, count: u32, head_dim: u32, deltas: Ptr) {
        "attention_plain": attention_deltas;
    }
    /// Backward of attention with plain arithmetic.
    AttentionBackward(
        qkv: Ptr, width: u32, heads: u32, group: u32, head_dim: u32, scale: f32, spans: Ptr, span_count: u32,
        rows: u32, window: u32, dout: Ptr, lse: Ptr, deltas: Ptr, dqkv: Ptr
    ) { "attention_plain": attention_backward_queries, attention_backward_keys; }
    /// Attention of many queries of a sequence.
    FlashPrefill(
        qkv: Ptr, keys: Ptr, values: Ptr, key_scales: Ptr, value_scales: Ptr, spans: Ptr, pages: Ptr,
        work: Ptr, out: Ptr, lse: Ptr, stride: u32, heads: u32, kv_heads: u32, page_shift: u32, scale: f32,
        window: u32, sums_in_out: u32
    ) {
        "flash_prefill":
            flash_prefill_bf16_64, flash_prefill_bf16_128, flash_prefill_int8_64, flash_prefill_int8_128,
            flash_prefill_fp8_64, flash_prefill_fp8_128;
    }
    /// The same on Hopper, keys and values in bf16.
    FlashPrefillHopper(
        keys: TensorMap, values: TensorMap, qkv: Ptr, spans: Ptr, pages: Ptr, work: Ptr, out: Ptr, lse: Ptr,
        stride: u32, heads: u32, kv_heads: u32, page_shift: u32, blocks: u32, scale: f32, window: u32
    ) overlaps { "flash_prefill_hopper": flash_prefill_hopper_64, flash_prefill_hopper_128; }
    /// Attention of one new row of each sequence.
    FlashDecode(
        qkv: Ptr, keys: Ptr, values: Ptr, key_scales: Ptr, value_scales: Ptr, spans: Ptr, pages: Ptr,
        out: Ptr, lse: Ptr, partials: Ptr, counters: Ptr, stride: u32, heads: u32, kv_heads: u32,
        page_shift: u32, splits: u32, scale: f32, window: u32, cos: Ptr, sin: Ptr, output: u32,
        out_scales: Ptr, absmax: Ptr
    ) overlaps {
        "flash_decode":
            flash_decode_bf16_64, flash_decode_bf16_128, flash_decode_int8_64, flash_decode_int8_128,
            flash_decode_fp8_64, flash_decode_fp8_128;
    }
    /// The same over long contexts: the splits, each by a warp.
    FlashStream(
        qkv: Ptr, keys: Ptr, values: Ptr, key_scales: Ptr, value_scales: Ptr, spans: Ptr, pages: Ptr,
        partials: Ptr, stride: u32, heads: u32, kv_heads: u32, page_shift: u32, scale: f32, window: u32,
        sequences: u32
    ) overlaps {
        "flash_stream":
            flash_stream_bf16_64, flash_stream_bf16_128, flash_stream_int8_64, flash_stream_int8_128,
            flash_stream_fp8_64, flash_stream_fp8_128;
    }
    /// And all of them folded.
    FlashStreamFold(
        partials: Ptr, spans: Ptr, out: Ptr, lse: Ptr, heads: u32, kv_heads: u32, window: u32,
        sequences: u32, output: u32, out_scales: Ptr, absmax: Ptr
    ) overlaps { "flash_stream": flash_stream_fold_64, flash_stream_fold_128; }
    /// Operands of the backward pass, rounded.
    FlashBackwardPrepare(
        qkv: Ptr, out: Ptr, dout: Ptr, lse: Ptr, qkv_to: Ptr, dout_to: Ptr, facts: Ptr, stride: u32,
        heads: u32, head_dim: u32
    ) { "flash_backward": flash_backward_prepare; }
    /// Backward of attention on any tensor cores.
    FlashBackward(
        qkv: Ptr, dout: Ptr, facts: Ptr, spans: Ptr, work: Ptr, dqkv: Ptr, stride: u32, heads: u32,
        kv_heads: u32, window: u32, scale: f32
    ) {
        "flash_backward":
            flash_backward_keys_64, flash_backward_keys_128, flash_backward_queries_64,
            flash_backward_queries_128;
    }
    /// Backward of attention on Hopper: gradients of keys and values.
    FlashBackwardHopperKeys(
        qkv: TensorMap, dout: TensorMap, facts_map: TensorMap, spans: Ptr, work: Ptr, dkeys: Ptr,
        dvalues: Ptr, stride: u64, heads: u32, kv_heads: u32, share: u32, window: u32, scale: f32
    ) { "flash_backward_hopper": flash_backward_hopper_keys_64, flash_backward_hopper_keys_128; }
    /// Sums of these where blocks have parts of a group.
    FlashBackwardJoin(
        dkeys: Ptr, dvalues: Ptr, to: Ptr, stride: u64, parts: u32, kv_heads: u32, head_dim: u32
    ) { "flash_backward_hopper": flash_backward_join; }
    /// Backward of attention on Hopper: gradients of queries.
    FlashBackwardHopperQueries(
        qkv: TensorMap, dout: TensorMap, facts: Ptr, spans: Ptr, work: Ptr, dqueries: Ptr, stride: u64,
        heads: u32, kv_heads: u32, window: u32, scale: f32
    ) { "flash_backward_hopper": flash_backward_hopper_queries_64, flash_backward_hopper_queries_128; }

    // ---- head and sampling --------------------------------------------------------------------------------

    /// Sums over chunks of logits.
    ReduceLogits(
        logits: Ptr, vocabulary: u32, rows: u32, chunks: u32, factor: f32, factors: Ptr, partials: Ptr
    ) overlaps { "head": reduce_logits; }
    /// Log-probabilities of targets.
    ScoreRows(
        logits: Ptr, vocabulary: u32, chunks: u32, partials: Ptr, targets: Ptr, logp: Ptr, entropy: Ptr,
        argmax: Ptr, lse: Ptr
    ) { "head": score_rows; }
    /// Gradients of logits: in their place, or rounded.
    LogitGradients(
        logits: Ptr, vocabulary: u32, targets: Ptr, scale: f32, inverse_temperature: f32, lse: Ptr,
        dlogp: Ptr, dentropy: Ptr, entropy: Ptr, out: Ptr
    ) { "head": logit_gradients_f32, logit_gradients_bf16; }
    /// Logits with their biases.
    BiasLogits(logits: Ptr, vocabulary: u32, first: u32, rows: u32, biases: Ptr, count: u32) {
        "sample": bias_logits;
    }
    /// Tokens of rows that keep all of them.
    SampleRows(logits: Ptr, vocabulary: u32, chunks: u32, partials: Ptr, samples: Ptr, out: Ptr) overlaps {
        "sample": sample_rows;
    }
    /// Tokens of rows that keep some of them.
    SampleTruncated(
        logits: Ptr, vocabulary: u32, chunks: u32, partials: Ptr, samples: Ptr, which: Ptr, first: u32,
        rows: u32, all_keys: Ptr, key_capacity: u32, out: Ptr
    ) { "sample": sample_truncated; }

    /// The most probable tokens of rows, with their log-probs.
    TopTokens(logits: Ptr, vocabulary: u32, chunks: u32, partials: Ptr, count: u32, out: Ptr) {
        "sample": top_tokens;
    }

    // ---- whole tensors ------------------------------------------------------------------------------------

    /// One update, with moments in a format.
    AdamW(
        w: Ptr, g: Ptr, m: Ptr, v: Ptr, m_exponents: Ptr, v_exponents: Ptr, count: u64, at: u32, step: u32,
        grad_scale: f32, beta1: f32, beta2: f32, rest1: f32, rest2: f32, keep: f32, step_size: f32,
        root_correction: f32, eps: f32
    ) { "optim": adamw_f32, adamw_bf16, adamw_8bit; }
    /// A binary tree over pieces.
    AddPieces(pieces: Ptr, count: u32, len: u64, add: u32, to: Ptr) { "optim": add_pieces; }
    /// Values in bf16, two in a word.
    Narrow(x: Ptr, count: u64, words: Ptr) { "elementwise": narrow; }
    /// They in f32 again.
    Widen(words: Ptr, count: u64, y: Ptr) { "elementwise": widen; }
    /// Sums of squares.
    SquarePartials(x: Ptr, count: u64, per: u32, partials: Ptr) { "optim": square_partials; }
    /// Their sums, a block for each tensor.
    SumDoubles(x: Ptr, starts: Ptr, out: Ptr) { "optim": sum_doubles; }
    /// Checksums of blocks.
    BlockSums(x: Ptr, count: u64, sums: Ptr) { "checksum": block_sums; }
}

#[cfg(test)]
mod tests {
    use super::super::compile::{HEADERS, SOURCES};
    use super::*;

    /// A kernel of the sources, or several that a macro makes.
    struct Found {
        /// Parts of the name; those of odd places are filled in by the macro.
        name: Vec<String>,
        parameters: Vec<(String, &'static str)>,
    }

    impl Found {
        fn makes(&self, mut name: &str) -> bool {
            for (i, part) in self.name.iter().enumerate() {
                let length = match i % 2 {
                    0 if name.starts_with(part) => part.len(),
                    0 => return false,
                    _ => name.find('_').unwrap_or(name.len()),
                };
                name = &name[length..];
            }
            name.is_empty()
        }
    }

    /// The type of a parameter as the host gives it.
    fn host_type(parameter: &str) -> &'static str {
        match parameter.split(' ').collect::<Vec<_>>()[..] {
            _ if parameter.contains('*') => "Ptr",
            [.., "TensorMap", _] => "TensorMap",
            ["u32" | "int", _] => "u32",
            ["u64", _] => "u64",
            ["float", _] => "f32",
            _ => panic!("a parameter that no kernel has had so far: {parameter}"),
        }
    }

    /// All `extern "C" __global__` functions.
    fn kernels_of_sources() -> Vec<Found> {
        let texts = SOURCES.iter().map(|s| s.text).chain(HEADERS.iter().map(|(_, text)| *text));
        let text = texts.map(|text| text.replace("\\\n", "\n")).collect::<String>();
        let (_, shared) = text.split_once("#define GEMM_PARAMETERS").expect("parameters of GEMMs on Hopper");
        let (shared, _) = shared.split_once('#').expect("more macros");
        let mut found = Vec::new();
        for part in text.split("extern \"C\" __global__ void").skip(1) {
            let (signature, _) = part.split_once('{').expect("a body");
            // Attributes have parentheses, too: the last ones are the parameters.
            let (before, parameters) = signature.rsplit_once('(').expect("parameters");
            let name = before.rsplit([' ', '\n', ')']).next().expect("a name");
            let parameters = parameters.trim().trim_end_matches(')').trim();
            let parameters = if parameters == "GEMM_PARAMETERS" { shared } else { parameters };
            let one = |parameter: &str| {
                let parameter = parameter.split_whitespace().collect::<Vec<_>>().join(" ");
                let (_, name) = parameter.rsplit_once([' ', '*']).expect("a type and a name");
                (name.to_string(), host_type(&parameter))
            };
            let name = name.split("##").map(str::to_string).collect();
            found.push(Found { name, parameters: parameters.split(',').map(one).collect() });
        }
        found
    }

    /// What is launched has the parameters of the sources, by name, order and type, and nothing there is
    /// never launched.
    #[test]
    fn kernels_have_the_parameters_of_their_sources() {
        let found = kernels_of_sources();
        let mut used = vec![false; found.len()];
        for kernel in KernelId::ALL {
            let makes = |(_, found): &(usize, &Found)| found.makes(kernel.name());
            // `gemm_mma_bf16_finish` could be made by two macros: it is the one that says more of its name.
            let said =
                |(_, found): &(usize, &Found)| found.name.iter().step_by(2).map(String::len).sum::<usize>();
            let made = found.iter().enumerate().filter(makes).max_by_key(said);
            let (at, source) = made.unwrap_or_else(|| panic!("{} is in no source", kernel.name()));
            let own =
                kernel.parameters().iter().map(|(name, ty)| (name.to_string(), *ty)).collect::<Vec<_>>();
            assert_eq!(own, source.parameters, "{}", kernel.name());
            assert!(own.len() <= MAX_ARGUMENTS);
            used[at] = true;
        }
        let unused = found.iter().zip(used).find(|(_, used)| !used).map(|(found, _)| found.name.join("##"));
        assert_eq!(unused, None);
    }

    #[test]
    fn kernels_are_found_by_number() {
        for (at, kernel) in KernelId::ALL.iter().enumerate() {
            assert_eq!(*kernel as usize, at);
            assert!(SOURCES.iter().any(|source| source.name == kernel.file()), "{}", kernel.file());
        }
    }
}
