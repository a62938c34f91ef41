#!/usr/bin/env bash
# Whether everything works at all, in a minute and a half on one GPU: what has to be known before half an hour
# of it is spent. Kernels compile and load, a few operations against their twins, steps recorded and replayed,
# moments on the host, decoding in every format, a step of training, an exchange of two ranks.
#
#   benches/gpu/smoke.sh OUT
#
# What fails is run once more, so that its log says more: with launches that wait for their kernels, and with
# the kernels of older GPUs, which tells those of Hopper alone from the common ones.
out=${1:?usage: benches/gpu/smoke.sh OUT}
. "$(dirname "$0")/common.sh"
begin

some() { # name, filter...: tests of the kernels
    local name=$1
    shift
    TAIL=3 step 60 "$name" env QURL_GENERATION="${generation:-as it is}" "$KERNEL_TESTS" --nocapture \
        --test-threads 1 "$@" && check "$name-ran" ran "$name"
}
again() { # name, command...: what failed, twice more
    local name=$1
    shift
    CUDA_LAUNCH_BLOCKING=1 "$@" "$name-blocking"
    generation="as of 8.0" QURL_CUDA_NEWEST=80 "$@" "$name-8.0"
}
operations() { # name
    some "$1" cuda::op_table cuda::recorded_steps cuda::owners cuda_attention::prefill_with
}
decode() { # name
    local shape=qwen2.5-0.5b
    [ -z "$small" ] || shape=5m
    TAIL=8 step 60 "$1" "$QURL" bench rollout --device "$device" --shape "$shape" \
        --formats bf16,int8,fp8,int4,nvfp4 --batch 64 --prompt 128 --new 32 --rounds 1
}
train() { # name
    TAIL=2 step 60 "$1" "$QURL" train "$root/recipes/tiny-grpo.toml" --device "$device" --quiet --json \
        --run "$out/run-$1" --steps 2 --set sft.steps=20 --set sft.warmup_steps=2 \
        --set model.new.hidden_size=128 \
        --set model.new.num_attention_heads=2 --set model.new.num_key_value_heads=1
    rm -rf "$out/run-$1"
}
try() { # what it is called above; once more where it fails
    "$1" "$1" || { [ "$device" = cuda ] && again "$1" "$1"; }
}

test_binary KERNEL_TESTS qurl-kernels kernels && try operations
try decode
try train
if test_binary RANK_TESTS qurl-kernels ranks && [ "$device" = cuda ]; then
    ranks mpirun 2
    QURL_RANK_TIMEOUT=25 step 45 exchange "${launch[@]}" "$RANK_TESTS" --exact nccl::as_a_gpu --ignored \
        --nocapture --test-threads 1
fi
finish
