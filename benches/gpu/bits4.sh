#!/usr/bin/env bash
# Weights in four bits on a GPU, in five minutes: their kernels against the naive twins, the CPU and
# themselves at other batches, on Hopper's instructions and on those of every tensor core; decode of 7B and
# 32B in int8, int4 and nvfp4, and beside adapters; every form of the GEMM timed beside int8.
#
#   benches/gpu/bits4.sh OUT [tests] [bench] [gemms]
#
# Without cargo KERNEL_TESTS names the test binary (`cargo test --no-run -p qurl-kernels --test kernels`). The
# most telling steps come first. DEVICE=cpu tries the script: tests pass without a GPU, shapes are small.
out=${1:?usage: benches/gpu/bits4.sh OUT [tests] [bench] [gemms]}
shift
parts=${*:-tests bench gemms}
. "$(dirname "$0")/common.sh"
known tests bench gemms
begin

tests() { # seconds, name, generation, test, cases of the op table
    TAIL=4 step "$1" "$2" env QURL_GENERATION="$3" QURL_CASES="${5:-}" "$KERNEL_TESTS" --nocapture \
        --test-threads 1 "$4"
    check "$2-ran" ran "$2"
}
if wanted tests && test_binary KERNEL_TESTS qurl-kernels kernels; then
    # The first compiles the kernels of both generations, and none of its cases has that name. What Hopper has
    # of its own and what it has not fail apart.
    tests 180 compiled "" cuda::op_table "no case"
    for generation in "as it is" "as of 8.0"; do
        at=newest
        [ "$generation" = "as it is" ] || at=oldest
        for format in int4 nvfp4; do
            tests 40 "table-$format-$at" "$generation" cuda::op_table "linear $format"
        done
        tests 40 "cpu-$at" "$generation" cuda::four_bit_gemms_equal_the_cpu
        tests 40 "batch-$at" "$generation" cuda::gemms_do_not_depend_on_the_batch
    done
    tests 30 recorded "" cuda::recorded_steps_give_the_same_bits
    tests 60 mlp "" cuda_fused::an_mlp_equals_its_parts
fi
if wanted bench; then
    rollout() { # seconds, name, shape, batches, more...
        local seconds=$1 name=$2 shape=$3 batch=$4
        shift 4
        [ -z "$small" ] || shape=5m batch=4
        TAIL=12 step "$seconds" "$name" "$QURL" bench rollout --device "$device" --shape "$shape" \
            --batch "$batch" --prompt 128 --rounds 1 "$@"
    }
    rollout 60 rollout-7b qwen2.5-7b 16,64 --formats int8,int4,nvfp4 --new 128
    rollout 90 rollout-32b qwen2.5-32b 16,64 --formats int8,int4,nvfp4 --new 64
    rollout 45 rollout-7b-lora qwen2.5-7b 64 --formats int8,nvfp4 --new 64 --lora-rank 16
fi
if wanted gemms && [ "$device" = cuda ]; then
    TAIL=60 step 120 gemms python3 -u "$root/benches/gpu/bits4.py"
fi
finish
