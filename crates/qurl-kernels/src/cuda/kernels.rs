//! Every kernel with the arguments it takes: a launch names them, and the compiler of this program checks them.
//!
//! A struct holds the arguments of one kernel or of several that differ in number format or tile; its fields have the
//! names and the order of the kernel's parameters in `cu/` (a test compares them with the sources). A kernel is a constant
//! of type [`Kernel`] with the name it has there, bound to its arguments: nothing else can be launched with it.
//! `overlaps` marks those that wait for the kernel before them by themselves, and may be launched before it has ended.

use super::ffi::{DevicePtr, TensorMap};
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
    // ---- rows ----------------------------------------------------------------------------------------------------

    /// Rows of a table, by number.
    Gather(table: DevicePtr, ids: DevicePtr, d: u32, out: DevicePtr) overlaps { "elementwise": gather; }
    /// Rows of a table, by tokens of a batch.
    GatherTokens(table: DevicePtr, tokens: DevicePtr, sampled: DevicePtr, d: u32, out: DevicePtr) overlaps {
        "elementwise": gather_tokens;
    }
    /// Rows added to those of a table, a block a target.
    ScatterAdd(rows: DevicePtr, ids: DevicePtr, starts: DevicePtr, order: DevicePtr, d: u32, table: DevicePtr) {
        "elementwise": scatter_add;
    }
    /// Rotation of heads.
    Rope(
        x: DevicePtr, stride: u32, heads: u32, half: u32, positions: DevicePtr, cos: DevicePtr, sin: DevicePtr,
        inverse: u32
    ) { "elementwise": rope; }
    /// SwiGLU of gate and up projections.
    Swiglu(gate_up: DevicePtr, f: u32, count: u64, out: DevicePtr) { "elementwise": swiglu; }
    /// Its backward pass, in place.
    SwigluBackward(gate_up: DevicePtr, f: u32, out: DevicePtr) overlaps { "elementwise": swiglu_backward; }
    /// Its backward pass, rounded.
    SwigluBackwardBf16(gate_up: DevicePtr, dout: DevicePtr, f: u32, gradients: DevicePtr, out: DevicePtr) overlaps {
        "elementwise": swiglu_backward_bf16;
    }
    /// Column sums of some rows.
    ColumnPartials(x: DevicePtr, w: DevicePtr, rows: u32, d: u32, per: u32, partials: DevicePtr) {
        "elementwise": column_partials;
    }
    /// Their sums, in order.
    AddPartials(partials: DevicePtr, parts: u32, d: u32, sums: DevicePtr) { "elementwise": add_partials; }
    /// Dot products of rows with a vector.
    RowDots(x: DevicePtr, w: DevicePtr, d: u32, out: DevicePtr) { "elementwise": row_dots; }
    /// Their backward pass.
    OuterProduct(g: DevicePtr, w: DevicePtr, d: u32, count: u64, dx: DevicePtr) { "elementwise": outer_product; }
    /// Random numbers.
    RandomFill(out: DevicePtr, count: u64, seed: u64, factor: f32) { "elementwise": random_fill; }

    // ---- norms ---------------------------------------------------------------------------------------------------

    /// RMSNorm of rows or heads.
    NormForward(
        x: DevicePtr, gain: DevicePtr, start: u64, per: u32, stride: u32, width: u32, eps: f32, out: DevicePtr
    ) overlaps { "norm": norm_forward; }
    /// RMSNorm of dense rows, rounded.
    NormForwardBf16(x: DevicePtr, gain: DevicePtr, width: u32, eps: f32, out: DevicePtr) overlaps {
        "norm": norm_forward_bf16;
    }
    /// Inverse root mean squares.
    NormScales(x: DevicePtr, start: u64, per: u32, stride: u32, width: u32, eps: f32, scales: DevicePtr) {
        "norm": norm_scales;
    }
    /// Gradients of the gain from some rows.
    NormGainPartials(
        x: DevicePtr, dy: DevicePtr, scales: DevicePtr, start: u64, per: u32, stride: u32, width: u32, rows: u32,
        many: u32, partials: DevicePtr
    ) { "norm": norm_gain_partials; }
    /// Gradient of the input.
    NormBackward(
        x: DevicePtr, gain: DevicePtr, scales: DevicePtr, start: u64, per: u32, stride: u32, width: u32, eps: f32,
        dy: DevicePtr, dx: DevicePtr, add: u32
    ) { "norm": norm_backward; }

    // ---- operands of GEMMs ---------------------------------------------------------------------------------------

    /// Rows in bf16.
    RowsBf16(x: DevicePtr, k: u32, out: DevicePtr) overlaps { "quantize": rows_bf16; }
    /// Rows in eight bits.
    QuantizeRows(x: DevicePtr, k: u32, out: DevicePtr, scales: DevicePtr) overlaps { "quantize": rows_i8, rows_e4m3; }
    /// The same where the absmax of each row is known.
    QuantizeKnown(x: DevicePtr, k: u32, absmax: DevicePtr, out: DevicePtr, scales: DevicePtr) overlaps {
        "quantize": known_i8, known_e4m3;
    }
    /// RMSNorm of rows, in bf16.
    NormRowsBf16(x: DevicePtr, gain: DevicePtr, k: u32, eps: f32, out: DevicePtr) overlaps { "quantize": norm_bf16; }
    /// RMSNorm of rows, in eight bits; places for absmax are cleared on the way.
    QuantizeNorm(
        x: DevicePtr, gain: DevicePtr, k: u32, eps: f32, out: DevicePtr, scales: DevicePtr, absmax: DevicePtr
    ) overlaps { "quantize": norm_i8, norm_e4m3; }
    /// SwiGLU of rows, in bf16.
    SwigluRowsBf16(gate_up: DevicePtr, f: u32, out: DevicePtr) overlaps { "quantize": swiglu_bf16; }
    /// SwiGLU of rows, in eight bits.
    QuantizeSwiglu(gate_up: DevicePtr, f: u32, out: DevicePtr, scales: DevicePtr) overlaps {
        "quantize": swiglu_i8, swiglu_e4m3;
    }
    /// Weights in eight bits.
    QuantizeWeights(
        w: DevicePtr, k: u32, stochastic: u32, seed: u64, out: DevicePtr, scales: DevicePtr, bad: DevicePtr
    ) { "quantize": weights_i8, weights_e4m3; }
    /// Rows into tiles.
    GemmPack(rows: DevicePtr, tiles: DevicePtr, n: u32, row_bytes: u32, k_blocks: u32) { "gemm_pack": gemm_pack; }

    // ---- GEMMs ---------------------------------------------------------------------------------------------------

    /// A GEMM with plain arithmetic.
    GemmPlain(
        a: DevicePtr, a_m: u64, a_k: u64, b: DevicePtr, b_n: u64, b_k: u64, m: u32, n: u32, k: u32,
        row_scales: DevicePtr, column_scales: DevicePtr, bias: DevicePtr, add: u32, out: DevicePtr
    ) { "gemm_plain": gemm_plain_f32, gemm_plain_bf16, gemm_plain_i8, gemm_plain_e4m3; }
    /// A GEMM with packed weights on any tensor cores.
    GemmMma(
        weights: DevicePtr, x: DevicePtr, w_scales: DevicePtr, x_scales: DevicePtr, bias: DevicePtr, out: DevicePtr,
        partials: DevicePtr, tokens: u32, n: u32, row_bytes: u32, k_blocks: u32, splits: u32, add: u32
    ) {
        "gemm_mma":
            gemm_mma_bf16_few, gemm_mma_bf16_some, gemm_mma_bf16_many,
            gemm_mma_int8_few, gemm_mma_int8_some, gemm_mma_int8_many,
            gemm_mma_fp8_few, gemm_mma_fp8_some, gemm_mma_fp8_many;
    }
    /// Its split-K reduction.
    GemmMmaFinish(
        w_scales: DevicePtr, x_scales: DevicePtr, bias: DevicePtr, out: DevicePtr, partials: DevicePtr, tokens: u32,
        n: u32, splits: u32, add: u32
    ) { "gemm_mma": gemm_mma_bf16_finish, gemm_mma_int8_finish, gemm_mma_fp8_finish; }
    /// A GEMM with packed weights on Hopper. Names tell tokens, warpgroups (or columns of a gated one), blocks of a cluster
    /// and schedule.
    GemmHopper(
        map: TensorMap, weights: DevicePtr, w_scales: DevicePtr, x_scales: DevicePtr, bias: DevicePtr, out: DevicePtr,
        partials: DevicePtr, tokens: u32, n: u32, k_blocks: u32, ranges: u32, add: u32, gating: u32, absmax: DevicePtr
    ) overlaps {
        "gemm_bf16":
            gemm_bf16_16_2_1_STREAM, gemm_bf16_64_2_1_STREAM, gemm_bf16_128_2_1_STREAM, gemm_bf16_256_2_2_STREAM,
            gemm_bf16_64_1_1_VIRTUAL, gemm_bf16_128_1_1_VIRTUAL, gemm_bf16_128_2_1_VIRTUAL,
            gemm_bf16_128_2_2_VIRTUAL, gemm_bf16_192_2_2_VIRTUAL, gemm_bf16_128_1_2_SPLIT, gemm_bf16_128_1_4_SPLIT,
            gemm_bf16_256_2_3_SPLIT, gemm_bf16_256_2_4_SPLIT;
        "gemm_int8":
            gemm_int8_16_2_1_STREAM, gemm_int8_64_2_1_STREAM, gemm_int8_128_2_1_STREAM, gemm_int8_256_2_2_STREAM,
            gemm_int8_64_1_1_TILES, gemm_int8_128_1_1_TILES, gemm_int8_128_2_1_TILES, gemm_int8_256_2_2_TILES,
            gemm_int8_128_1_2_SPLIT, gemm_int8_128_1_4_SPLIT, gemm_int8_256_2_3_SPLIT, gemm_int8_256_2_4_SPLIT,
            gemm_int8_256_40_GATED, gemm_int8_256_48_GATED, gemm_int8_256_64_GATED;
        "gemm_fp8":
            gemm_fp8_16_2_1_STREAM, gemm_fp8_64_2_1_STREAM, gemm_fp8_128_2_1_STREAM, gemm_fp8_64_1_1_VIRTUAL,
            gemm_fp8_128_1_1_VIRTUAL, gemm_fp8_128_2_1_VIRTUAL, gemm_fp8_128_2_2_VIRTUAL, gemm_fp8_128_1_2_SPLIT,
            gemm_fp8_128_1_4_SPLIT;
    }

    // ---- attention -----------------------------------------------------------------------------------------------

    /// Rotation of queries and keys; keys and values into pages.
    RopeWrite(
        qkv: DevicePtr, rows: u32, width: u32, heads: u32, kv_heads: u32, head_dim: u32, positions: DevicePtr,
        cos: DevicePtr, sin: DevicePtr, slots: DevicePtr, page_size: u32, format: u32, keys: DevicePtr,
        values: DevicePtr, key_scales: DevicePtr, value_scales: DevicePtr
    ) overlaps { "kv": rope_write; }
    /// Attention with plain arithmetic.
    AttentionForward(
        qkv: DevicePtr, width: u32, heads: u32, group: u32, head_dim: u32, scale: f32, spans: DevicePtr,
        span_count: u32, pages: DevicePtr, page_size: u32, format: u32, keys: DevicePtr, values: DevicePtr,
        key_scales: DevicePtr, value_scales: DevicePtr, rows: u32, out: DevicePtr, lse: DevicePtr
    ) { "attention_plain": attention_forward; }
    /// Dot products of outputs and their gradients.
    AttentionDeltas(out: DevicePtr, dout: DevicePtr, count: u32, head_dim: u32, deltas: DevicePtr) {
        "attention_plain": attention_deltas;
    }
    /// Backward of attention with plain arithmetic.
    AttentionBackward(
        qkv: DevicePtr, width: u32, heads: u32, group: u32, head_dim: u32, scale: f32, spans: DevicePtr,
        span_count: u32, rows: u32, dout: DevicePtr, lse: DevicePtr, deltas: DevicePtr, dqkv: DevicePtr
    ) { "attention_plain": attention_backward_queries, attention_backward_keys; }
    /// Attention of many queries of a sequence.
    FlashPrefill(
        qkv: DevicePtr, keys: DevicePtr, values: DevicePtr, key_scales: DevicePtr, value_scales: DevicePtr,
        spans: DevicePtr, pages: DevicePtr, work: DevicePtr, out: DevicePtr, lse: DevicePtr, stride: u32, heads: u32,
        kv_heads: u32, page_shift: u32, scale: f32
    ) {
        "flash_prefill":
            flash_prefill_bf16_64, flash_prefill_bf16_128, flash_prefill_int8_64, flash_prefill_int8_128,
            flash_prefill_fp8_64, flash_prefill_fp8_128;
    }
    /// Attention of one new row of each sequence.
    FlashDecode(
        qkv: DevicePtr, keys: DevicePtr, values: DevicePtr, key_scales: DevicePtr, value_scales: DevicePtr,
        spans: DevicePtr, pages: DevicePtr, out: DevicePtr, lse: DevicePtr, partials: DevicePtr, counters: DevicePtr,
        stride: u32, heads: u32, kv_heads: u32, page_shift: u32, splits: u32, scale: f32, cos: DevicePtr,
        sin: DevicePtr, output: u32, out_scales: DevicePtr, absmax: DevicePtr
    ) overlaps {
        "flash_decode":
            flash_decode_bf16_64, flash_decode_bf16_128, flash_decode_int8_64, flash_decode_int8_128,
            flash_decode_fp8_64, flash_decode_fp8_128;
    }
    /// Operands of the backward pass, rounded.
    FlashBackwardPrepare(
        qkv: DevicePtr, out: DevicePtr, dout: DevicePtr, lse: DevicePtr, qkv_to: DevicePtr, dout_to: DevicePtr,
        facts: DevicePtr, stride: u32, heads: u32, head_dim: u32
    ) { "flash_backward": flash_backward_prepare; }
    /// Backward of attention on any tensor cores.
    FlashBackward(
        qkv: DevicePtr, dout: DevicePtr, facts: DevicePtr, spans: DevicePtr, work: DevicePtr, dqkv: DevicePtr,
        stride: u32, heads: u32, kv_heads: u32, scale: f32
    ) {
        "flash_backward":
            flash_backward_keys_64, flash_backward_keys_128, flash_backward_queries_64, flash_backward_queries_128;
    }
    /// Backward of attention on Hopper: gradients of keys and values.
    FlashBackwardHopperKeys(
        qkv: TensorMap, dout: TensorMap, facts_map: TensorMap, spans: DevicePtr, work: DevicePtr, dkeys: DevicePtr,
        dvalues: DevicePtr, stride: u64, heads: u32, kv_heads: u32, share: u32, scale: f32
    ) { "flash_backward_hopper": flash_backward_hopper_keys_64, flash_backward_hopper_keys_128; }
    /// Sums of these where blocks have parts of a group.
    FlashBackwardJoin(
        dkeys: DevicePtr, dvalues: DevicePtr, to: DevicePtr, stride: u64, parts: u32, kv_heads: u32, head_dim: u32
    ) { "flash_backward_hopper": flash_backward_join; }
    /// Backward of attention on Hopper: gradients of queries.
    FlashBackwardHopperQueries(
        qkv: TensorMap, dout: TensorMap, facts: DevicePtr, spans: DevicePtr, work: DevicePtr, dqueries: DevicePtr,
        stride: u64, heads: u32, kv_heads: u32, scale: f32
    ) { "flash_backward_hopper": flash_backward_hopper_queries_64, flash_backward_hopper_queries_128; }

    // ---- head and sampling ---------------------------------------------------------------------------------------

    /// Sums over chunks of logits.
    ReduceLogits(
        logits: DevicePtr, vocabulary: u32, rows: u32, chunks: u32, factor: f32, factors: DevicePtr,
        partials: DevicePtr
    ) overlaps { "head": reduce_logits; }
    /// Log-probabilities of targets.
    ScoreRows(
        logits: DevicePtr, vocabulary: u32, chunks: u32, partials: DevicePtr, targets: DevicePtr, logp: DevicePtr,
        entropy: DevicePtr, argmax: DevicePtr, lse: DevicePtr
    ) { "head": score_rows; }
    /// Logits become their gradients.
    LogitGradients(
        logits: DevicePtr, vocabulary: u32, targets: DevicePtr, inverse_temperature: f32, lse: DevicePtr,
        dlogp: DevicePtr, dentropy: DevicePtr, entropy: DevicePtr
    ) { "head": logit_gradients_f32; }
    /// Gradients of logits, rounded.
    LogitGradientsBf16(
        logits: DevicePtr, vocabulary: u32, targets: DevicePtr, inverse_temperature: f32, lse: DevicePtr,
        dlogp: DevicePtr, dentropy: DevicePtr, entropy: DevicePtr, out: DevicePtr
    ) { "head": logit_gradients_bf16; }
    /// Tokens of rows that keep all of them.
    SampleRows(
        logits: DevicePtr, vocabulary: u32, chunks: u32, partials: DevicePtr, samples: DevicePtr, out: DevicePtr
    ) overlaps { "sample": sample_rows; }
    /// Tokens of rows that keep some of them.
    SampleTruncated(
        logits: DevicePtr, vocabulary: u32, chunks: u32, partials: DevicePtr, samples: DevicePtr, which: DevicePtr,
        first: u32, rows: u32, all_keys: DevicePtr, key_capacity: u32, out: DevicePtr
    ) { "sample": sample_truncated; }

    // ---- whole tensors -------------------------------------------------------------------------------------------

    /// One update.
    AdamW(
        w: DevicePtr, g: DevicePtr, m: DevicePtr, v: DevicePtr, count: u64, grad_scale: f32, beta1: f32, beta2: f32,
        rest1: f32, rest2: f32, keep: f32, step_size: f32, root_correction: f32, eps: f32
    ) { "optim": adamw; }
    /// Sums of squares.
    SquarePartials(x: DevicePtr, count: u64, per: u32, partials: DevicePtr) { "optim": square_partials; }
    /// Their sum.
    SumDoubles(x: DevicePtr, count: u32, out: DevicePtr) { "optim": sum_doubles; }
    /// Checksums of blocks.
    BlockSums(x: DevicePtr, count: u64, sums: DevicePtr) { "checksum": block_sums; }
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
            _ if parameter.contains('*') => "DevicePtr",
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

    /// What is launched has the parameters of the sources, by name, order and type, and nothing there is never launched.
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
