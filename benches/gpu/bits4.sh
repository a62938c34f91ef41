#!/usr/bin/env bash
# Weights in four bits on a GPU, in under four minutes: their kernels against the naive twins, the CPU and
# themselves at other batches, every form of the GEMM timed beside int8, decode of 7B and 32B in int8, int4 and
# nvfp4, and beside adapters.
#
#   benches/gpu/bits4.sh OUT
#
# leaves its raw output in OUT. QURL and KERNEL_TESTS name binaries built elsewhere (`cargo build --release -p
# qurl`, `cargo test --no-run -p qurl-kernels --test kernels`). ONLY="tests" or "gemms" or "bench" runs a part.
# What fails does not stop the rest.
set -u
out=${1:?usage: benches/gpu/bits4.sh OUT}
mkdir -p "$out"
only=${ONLY:-tests gemms bench}
here=$(cd "$(dirname "$0")/../.." && pwd)
QURL=${QURL:-$here/target/release/qurl}
failed=0
step() { # seconds, name, command...
    local seconds=$1 name=$2
    shift 2
    local began=$SECONDS
    timeout "$seconds" "$@" > "$out/$name.txt" 2>&1
    local status=$?
    echo "== $name: status $status after $((SECONDS - began)) s"
    tail -n "${TAIL:-4}" "$out/$name.txt" | cut -c 1-300
    [ $status -eq 0 ] || failed=1
}
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } | tee "$out/machine.txt"

if [[ " $only " == *" tests "* ]]; then
    # One at a time: a kernel that waits for ever, or a fault, is that test's alone.
    for name in cuda::four_bit_gemms_equal_the_cpu cuda::gemms_do_not_depend_on_the_batch cuda::op_table \
        cuda::recorded_steps_give_the_same_bits cuda_fused::an_mlp_equals_its_parts \
        cuda_fused::a_decode_step_equals_its_parts; do
        step 45 "test-${name#*::}" "${KERNEL_TESTS:?names the test binary of qurl-kernels}" --nocapture \
            --test-threads 1 "$name"
    done
fi
if [[ " $only " == *" gemms "* ]]; then
    TAIL=60 step 75 gemms python3 "$here/benches/gpu/bits4.py"
fi
if [[ " $only " == *" bench "* ]]; then
    TAIL=9 step 60 rollout-7b "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 16,64 \
        --formats int8,int4,nvfp4 --prompt 128 --new 128 --rounds 1
    TAIL=9 step 75 rollout-32b "$QURL" bench rollout --device cuda --shape qwen2.5-32b --batch 16,64 \
        --formats int8,int4,nvfp4 --prompt 128 --new 64 --rounds 1
    TAIL=6 step 45 rollout-7b-lora "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 64 \
        --lora-rank 16 --formats int8,nvfp4 --prompt 128 --new 64 --rounds 1
fi
exit $failed
