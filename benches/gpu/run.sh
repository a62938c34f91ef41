#!/usr/bin/env bash
# Everything about the CUDA backend in one go, in under eight minutes on one GPU: that it builds and its
# kernels compile, the op table against the naive twins and the CPU, parity of trainer, prefill and decode,
# the golden models, then all benchmarks, the default recipe, that a run repeated or resumed has the same
# bits, and the commands on the model it made.
#
#   benches/gpu/run.sh OUT
#
# leaves its raw output in OUT. Where there is no cargo, QURL, KERNEL_TESTS, PARITY_TESTS and GOLDEN_TESTS
# name binaries built elsewhere (`cargo build --release -p qurl`,
# `cargo test --no-run -p qurl-kernels --test kernels`, `... -p qurl-rollout --test rollout`,
# `... -p qurl-model --test model`). ONLY="tests" or "bench" or "train" runs a part.
set -u
out=${1:?usage: benches/gpu/run.sh OUT}
mkdir -p "$out"
only=${ONLY:-tests bench train}
here=$(cd "$(dirname "$0")/../.." && pwd)

if [ -z "${QURL:-}" ]; then
    (cd "$here" && cargo build --release -p qurl) > "$out/build.log" 2>&1 \
        || { echo "the build failed: $out/build.log"; exit 1; }
    QURL=$here/target/release/qurl
fi
test_binary() { # package, test
    (cd "$here" && cargo test --no-run -p "$1" --test "$2" 2>&1) \
        | sed -n 's/.*Executable.*(\(.*\))/\1/p' | tail -1
}

failed=0
step() { # seconds, name, command...
    local seconds=$1 name=$2
    shift 2
    echo "== $name: $*"
    local began=$SECONDS
    timeout "$seconds" "$@" > "$out/$name.txt" 2>&1
    local status=$?
    tail -n "${TAIL:-6}" "$out/$name.txt"
    echo "   status $status after $((SECONDS - began)) s"
    [ $status -eq 0 ] || failed=1
}
refused() { # name, command...: must end with status 2
    local name=$1
    shift
    echo "== $name: $*"
    timeout 30 "$@" > "$out/$name.txt" 2>&1
    local status=$?
    tail -n 2 "$out/$name.txt"
    echo "   status $status, expected 2"
    [ $status -eq 2 ] || failed=1
}
rollout() { # seconds, shape, batch, formats, more...
    local seconds=$1 shape=$2 batch=$3 formats=$4
    shift 4
    TAIL=8 step "$seconds" "rollout-$shape-$batch" "$QURL" bench rollout --device cuda --shape "$shape" \
        --batch "$batch" --formats "$formats" "$@"
}

{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } \
    | tee "$out/machine.txt"

if [[ " $only " == *" tests "* ]]; then
    step 240 kernels "${KERNEL_TESTS:-$(test_binary qurl-kernels kernels)}" --nocapture --test-threads 1 cuda
    TAIL=30 step 60 parity "${PARITY_TESTS:-$(test_binary qurl-rollout rollout)}" --nocapture \
        --test-threads 1 cuda::
    TAIL=4 step 60 goldens env CARGO_MANIFEST_DIR="$here/crates/qurl-model" \
        "${GOLDEN_TESTS:-$(test_binary qurl-model model)}" --nocapture --test-threads 1 device_goldens::
fi
if [[ " $only " == *" bench "* ]]; then
    # The contexts of the comparison: 384 tokens at most.
    rollout 40 qwen2.5-0.5b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 2
    rollout 40 qwen2.5-1.5b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-7b 64 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-7b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-14b 64 bf16,int8,fp8 --prompt 128 --new 128 --rounds 1
    rollout 90 qwen2.5-32b 64 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    # The head in eight bits, too, then the keys and values.
    TAIL=4 step 60 rollout-head-7b "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 64 \
        --formats int8 --quantize-head --prompt 128 --new 256 --rounds 1
    TAIL=4 step 60 rollout-8bit-7b "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 64,256 \
        --formats int8 --quantize-head --kv int8 --prompt 128 --new 256 --rounds 1
    TAIL=4 step 60 rollout-8bit-32b "$QURL" bench rollout --device cuda --shape qwen2.5-32b --batch 64 \
        --formats int8 --quantize-head --kv int8 --prompt 128 --new 256 --rounds 1
    TAIL=4 step 60 rollout-8bit-0.5b "$QURL" bench rollout --device cuda --shape qwen2.5-0.5b --batch 256 \
        --formats int8 --quantize-head --kv int8 --prompt 128 --new 256 --rounds 2
    # Through the whole engine with longer answers.
    TAIL=8 step 60 rollout-long "$QURL" bench rollout --device cuda --shape qwen2.5-7b --batch 64 \
        --formats int8 --prompt 128 --new 512 --rounds 1
    # PyTorch on the same device, where there is one: decoding in bf16 runs at the power limit, and devices
    # differ.
    if python3 -c 'import torch' 2> /dev/null; then
        TAIL=5 step 180 torch-decode python3 "$here/benches/peers/decode_torch.py"
    fi
fi
if [[ " $only " == *" train "* ]]; then
    step 60 train-1.5b "$QURL" bench train --device cuda --shape qwen2.5-1.5b --formats bf16 --batch 8 \
        --length 4096 --micro-tokens 8192 --steps 3
    step 60 train-1.5b-1024 "$QURL" bench train --device cuda --shape qwen2.5-1.5b --formats bf16 \
        --batch 8 --length 1024 --micro-tokens 8192 --steps 5
    step 60 recipe "$QURL" train --device cuda --steps 10 --run "$out/run" --json
    TAIL=1 step 60 recipe-ppo "$QURL" train "$here/recipes/tiny-ppo.toml" --device cuda --run "$out/ppo" \
        --json
    rm -rf "$out/ppo"
    model=$out/run/model
    step 30 generate "$QURL" generate --device cuda --model "$model" --format int8 --n 2 --max-new 48 \
        "478+356="
    TAIL=1 step 30 eval "$QURL" eval --device cuda --model "$model" --format int8 --task addition:3 --k 4 \
        --limit 200 --max-new 48 --out "$out/eval" --json
    for device in cuda cpu; do
        TAIL=1 step 30 "score-$device" "$QURL" score --device $device --model "$model" --format int8 \
            <<< '{"ids":[4,5,6,7,8,9]}'
    done
    TAIL=12 step 90 same-bits "$here/benches/gpu/same_bits.sh" "$QURL" cuda "$out/same"
    rm -rf "$out/same"
    # Without a place to keep compiled kernels.
    XDG_CACHE_HOME=/dev/null step 60 no-cache "$QURL" generate --device cuda --model "$model" --max-new 48 \
        "478+356="
    # Larger micro-batches than there is memory for: said before the run starts. And a driver that is not
    # there.
    refused no-memory "$QURL" train --device cuda --set trainer.micro_tokens=8000000 --run "$out/refused"
    QURL_CUDA=/there/is/no/libcuda.so refused no-driver "$QURL" generate --device cuda --model "$model" "1+1="
    QURL_CUDA=/there/is/no/libcuda.so step 30 no-driver-auto "$QURL" generate --model "$model" \
        --max-new 48 "478+356="
    cp "$out/run/metrics.jsonl" "$out/recipe-metrics.jsonl"
    rm -rf "$out/run" "$out/eval"
fi
[ $failed -eq 0 ] && echo "all steps passed" || echo "SOME STEPS FAILED"
exit $failed
