#!/usr/bin/env bash
# Weights in four bits on a GPU, in four minutes: their kernels against the naive twins, the CPU and
# themselves at other batches, on Hopper's instructions and on those of every tensor core; decode of 7B and
# 32B in int8, int4 and nvfp4, and beside adapters; every form of the GEMM timed beside int8.
#
#   benches/gpu/bits4.sh OUT
#
# leaves its raw output in OUT, and in OUT/summary.txt a line for every step. QURL and KERNEL_TESTS name
# binaries built elsewhere (`cargo build --release -p qurl`,
# `cargo test --no-run -p qurl-kernels --test kernels`). ONLY="tests" or "bench" or "gemms" runs a part. What
# fails or takes too long does not stop the rest; what does not fit into LIMIT seconds any more (230) is left
# out, and said so. The most telling steps come first.
set -u
out=${1:?usage: benches/gpu/bits4.sh OUT}
mkdir -p "$out"
only=${ONLY:-tests bench gemms}
here=$(cd "$(dirname "$0")/../.." && pwd)
QURL=${QURL:-$here/target/release/qurl}
until=$((SECONDS + ${LIMIT:-230}))
failed=0
say() { tee -a "$out/summary.txt"; }
step() { # seconds, name, command...
    local seconds=$1 name=$2 left=$((until - SECONDS))
    shift 2
    if [ $left -lt 5 ]; then
        echo "== $name: left out, no time" | say
        failed=1
        return
    fi
    local began=$SECONDS status=0
    # A kernel that waits for ever goes with its process.
    timeout -k 3 $((seconds < left ? seconds : left)) "$@" > "$out/$name.txt" 2>&1 || status=$?
    echo "== $name: status $status after $((SECONDS - began)) s" | say
    tail -n "${TAIL:-4}" "$out/$name.txt" | cut -c 1-300
    [ $status -eq 0 ] || failed=1
}
tests() { # seconds, name, generation, test, cases of the op table
    step "$1" "$2" env QURL_GENERATION="$3" QURL_CASES="${5:-}" \
        "${KERNEL_TESTS:?names the test binary of qurl-kernels}" --nocapture --test-threads 1 "$4"
}
: > "$out/summary.txt"
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } | tee "$out/machine.txt"

if [[ " $only " == *" tests "* ]]; then
    # The first compiles all kernels. What Hopper has of its own and what it has not fail apart.
    tests 60 compile "as it is" cuda::checksums_are_those_of_the_host
    for generation in "as it is" "as of 8.0"; do
        at=newest
        [ "$generation" = "as it is" ] || at=oldest
        for format in int4 nvfp4; do
            tests 15 "table-$format-$at" "$generation" cuda::op_table "linear $format"
        done
        tests 20 "cpu-$at" "$generation" cuda::four_bit_gemms_equal_the_cpu
        tests 30 "batch-$at" "$generation" cuda::gemms_do_not_depend_on_the_batch
    done
    tests 15 recorded "" cuda::recorded_steps_give_the_same_bits
    tests 40 mlp "" cuda_fused::an_mlp_equals_its_parts
fi
if [[ " $only " == *" bench "* ]]; then
    TAIL=9 step 45 rollout-7b "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 16,64 \
        --formats int8,int4,nvfp4 --prompt 128 --new 128 --rounds 1
    TAIL=9 step 60 rollout-32b "$QURL" bench rollout --device cuda --shape qwen2.5-32b --batch 16,64 \
        --formats int8,int4,nvfp4 --prompt 128 --new 64 --rounds 1
    TAIL=6 step 30 rollout-7b-lora "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 64 \
        --lora-rank 16 --formats int8,nvfp4 --prompt 128 --new 64 --rounds 1
fi
if [[ " $only " == *" gemms "* ]]; then
    TAIL=60 step 90 gemms python3 -u "$here/benches/gpu/bits4.py"
fi
exit $failed
