#!/usr/bin/env bash
# Everything about the CUDA backend in one go, in under nine minutes on one GPU: that it builds and its
# kernels compile, the op table against the naive twins and the CPU, parity of trainer, prefill and decode,
# the golden models, then all benchmarks, the default recipe, that a run repeated or resumed has the same
# bits, and the commands on the model it made.
#
#   benches/gpu/run.sh OUT [tests] [bench] [train]
#
# Where there is no cargo, QURL, KERNEL_TESTS, PARITY_TESTS and GOLDEN_TESTS name binaries built elsewhere
# (README.md). DEVICE=cpu tries the script: tests pass without a GPU, shapes are small.
out=${1:?usage: benches/gpu/run.sh OUT [tests] [bench] [train]}
shift
parts=${*:-tests bench train}
. "$(dirname "$0")/common.sh"
known tests bench train
if [ ! -x "$QURL" ]; then
    (cd "$root" && cargo build --release --locked -p qurl) > "$out/build.log" 2>&1 \
        || { echo "the build failed: $out/build.log"; exit 1; }
fi
begin

refused() { # name, command...: must end with status 2
    local name=$1
    shift
    # shellcheck disable=SC2016
    TAIL=2 step 60 "$name" bash -c '"$@" 2>&1; status=$?; echo "status $status of 2"; [ $status -eq 2 ]' \
        _ "$@"
}
rollout() { # seconds, shape, batch, formats, more...
    local seconds=$1 shape=$2 batch=$3 formats=$4 name=${name:-rollout-$2-$3}
    shift 4
    [ -z "$small" ] || shape=5m batch=4
    TAIL=8 step "$seconds" "$name" "$QURL" bench rollout --device "$device" --shape "$shape" \
        --batch "$batch" --formats "$formats" "$@"
}

if wanted tests; then
    tests() { # seconds, name, binary, filter
        step "$1" "$2" "$3" --nocapture --test-threads 1 "$4"
        check "$2-ran" ran "$2"
    }
    test_binary KERNEL_TESTS qurl-kernels kernels && tests 240 kernels "$KERNEL_TESTS" cuda
    test_binary PARITY_TESTS qurl-rollout rollout && TAIL=30 tests 90 parity "$PARITY_TESTS" cuda::
    export CARGO_MANIFEST_DIR=$root/crates/qurl-model
    test_binary GOLDEN_TESTS qurl-model model && TAIL=4 tests 60 goldens "$GOLDEN_TESTS" device_goldens::
    unset CARGO_MANIFEST_DIR
fi
if wanted bench; then
    # The contexts of the comparison: 384 tokens at most.
    rollout 40 qwen2.5-0.5b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 2
    rollout 40 qwen2.5-1.5b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-7b 64 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-7b 256 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    rollout 60 qwen2.5-14b 64 bf16,int8,fp8 --prompt 128 --new 128 --rounds 1
    rollout 90 qwen2.5-32b 64 bf16,int8,fp8 --prompt 128 --new 256 --rounds 1
    # The head in eight bits, too, then the keys and values.
    name=rollout-head-7b rollout 60 qwen2.5-7b 64 int8 --quantize-head --prompt 128 --new 256 --rounds 1
    all=(int8 --quantize-head --kv int8 --prompt 128 --new 256)
    name=rollout-8bit-7b rollout 60 qwen2.5-7b 64,256 "${all[@]}" --rounds 1
    name=rollout-8bit-32b rollout 60 qwen2.5-32b 64 "${all[@]}" --rounds 1
    name=rollout-8bit-0.5b rollout 60 qwen2.5-0.5b 256 "${all[@]}" --rounds 2
    # Through the whole engine with longer answers.
    name=rollout-long rollout 60 qwen2.5-7b 64 int8 --prompt 128 --new 512 --rounds 1
    # PyTorch on the same device, where there is one: decoding in bf16 runs at the power limit, and devices
    # differ.
    if python3 -c 'import torch' 2> /dev/null; then
        TAIL=5 step 180 torch-decode python3 "$root/benches/peers/decode_torch.py"
    fi
fi
if wanted train; then
    size=(--shape qwen2.5-1.5b --micro-tokens 8192) long=4096 tiny=()
    [ -z "$small" ] || size=(--shape 5m) long=256 tiny=(--set sft.steps=60)
    bench=("$QURL" bench train --device "$device" --formats bf16 --batch 8 "${size[@]}")
    step 60 train-1.5b "${bench[@]}" --length $long --steps 3
    step 60 train-1.5b-1024 "${bench[@]}" --length $((long / 4)) --steps 5
    step 60 recipe "$QURL" train --device "$device" --steps 10 --run "$out/run" --json "${tiny[@]}"
    TAIL=1 step 60 recipe-ppo "$QURL" train "$root/recipes/tiny-ppo.toml" --device "$device" \
        --run "$out/ppo" --json "${tiny[@]}"
    rm -rf "$out/ppo"
    model=$out/run/model
    made=(--device "$device" --model "$model" --max-new 48)
    step 30 generate "$QURL" generate "${made[@]}" --format int8 --n 2 "478+356="
    TAIL=1 step 30 eval "$QURL" eval "${made[@]}" --format int8 --task addition:3 --k 4 --limit 200 \
        --out "$out/eval" --json
    for on in "$device" cpu; do
        TAIL=1 step 30 "score-$on" "$QURL" score --device "$on" --model "$model" --format int8 \
            <<< '{"ids":[4,5,6,7,8,9]}'
    done
    TAIL=16 step 300 same-bits bash "$root/benches/gpu/same_bits.sh" "$out/same" default
    # Without a place to keep compiled kernels.
    XDG_CACHE_HOME=/dev/null step 180 no-cache "$QURL" generate "${made[@]}" "478+356="
    # Larger micro-batches than there is memory for: said before the run starts. And a driver that is not
    # there.
    if [ "$device" = cuda ]; then
        refused no-memory "$QURL" train --device cuda --set trainer.micro_tokens=8000000 --run "$out/refused"
    fi
    export QURL_CUDA=/there/is/no/libcuda.so
    refused no-driver "$QURL" generate --device cuda --model "$model" "1+1="
    step 30 no-driver-auto "$QURL" generate --model "$model" --max-new 48 "478+356="
    unset QURL_CUDA
    cp "$out/run/metrics.jsonl" "$out/recipe-metrics.jsonl"
    rm -rf "$out/run" "$out/eval"
fi
finish
