#!/usr/bin/env bash
# What a step costs on one GPU, part by part: decode over long contexts and in large batches, forward passes
# alone, training, whole steps, and PyTorch's decode beside, on the same machine.
#
#   benches/gpu/speed.sh OUT [decode] [forward] [train] [ppo] [grpo] [memory] [torch] [spread] [old]
#
# The first five take four minutes (grpo two of them), memory one, torch three. Only where they are asked for:
# spread, a step of 0.5B whose answers end at different lengths (512 x 8, 4k in the mean, 16k at most), seven
# minutes; old, decode, forward and training with the kernels of GPUs before Hopper, two.
all="decode forward train ppo grpo memory torch spread old"
out=${1:?usage: benches/gpu/speed.sh OUT [PART...], of $all}
shift
parts=${*:-decode forward train ppo grpo memory torch}
. "$(dirname "$0")/common.sh"
known $all
begin

bench() { # seconds, name, benchmark, shape, more...
    local seconds=$1 name=$2 what=$3 shape=$4
    shift 4
    [ -z "$small" ] || shape=5m
    TAIL=12 step "$seconds" "$name" "$QURL" bench "$what" --device "$device" --shape "$shape" "$@"
}
decode() { # name, shape, weights, cache, batch, context
    local head=()
    [ "$3" = bf16 ] || head=(--quantize-head)
    [ -z "$small" ] || set -- "$1" "$2" "$3" "$4" 2 64
    bench 45 "decode-$1" rollout "$2" --formats "$3" "${head[@]}" --kv "$4" --batch "$5" --context "$6" \
        --rounds 1
}
if wanted decode; then
    decode 7b-64x8k-bf16 qwen2.5-7b int8 bf16 64 8200
    decode 7b-64x8k-int8 qwen2.5-7b int8 int8 64 8200
    decode 1.5b-128x16k-bf16 qwen2.5-1.5b bf16 bf16 128 16400
    decode 1.5b-128x16k-int8 qwen2.5-1.5b bf16 int8 128 16400
    decode 7b-16x32k-int8 qwen2.5-7b int8 int8 16 32600
    decode 7b-256-eight qwen2.5-7b int8,fp8 int8 256 256
    decode 7b-64-eight qwen2.5-7b int8,fp8 int8 64 256
    decode 0.5b-256-eight qwen2.5-0.5b int8,fp8 int8 256 256
fi

short=8,1024 lengths=(8,4096 2,16384)
[ -z "$small" ] || short=4,32 lengths=(2,64 2,128)
if wanted forward; then
    for case in "${lengths[@]}"; do
        bench 45 "forward-${case/,/x}" score qwen2.5-1.5b --formats bf16 --batch "${case%,*}" \
            --length "${case#*,}" --rounds 3
    done
fi
if wanted train; then
    for case in $short "${lengths[@]}"; do
        length=${case#*,}
        bench 60 "train-${case/,/x}" train qwen2.5-1.5b --formats bf16 --batch "${case%,*}" \
            --length "$length" --micro-tokens $((length > 8192 ? length : 8192)) --steps 3
    done
fi
if wanted ppo; then
    size=(--prompts 32 --n 8 --length 512)
    [ -z "$small" ] || size=(--prompts 4 --n 2 --length 16 --prompt 16)
    bench 90 step-ppo-0.5b step qwen2.5-0.5b "${size[@]}" --critic
fi
if wanted grpo; then
    size=(--prompts 32 --n 8 --length 4096 --steps 1)
    [ -z "$small" ] || size=(--prompts 4 --n 2 --length 16 --prompt 16 --steps 1)
    bench 180 step-grpo-1.5b step qwen2.5-1.5b "${size[@]}"
fi
if wanted memory; then
    # What it costs to pack weights once, and to keep moments on the host; the weights at the end are the
    # same.
    size=(--prompts 8 --n 8 --length 512 --steps 2)
    [ -z "$small" ] || size=(--prompts 4 --n 2 --length 16 --prompt 16 --steps 1)
    for key in trainer.pack_once=false trainer.pack_once=true actor.optim.offload=true; do
        bench 45 "memory-${key//[.=]/-}" step qwen2.5-1.5b "${size[@]}" --set "$key"
    done
fi
if wanted torch && [ "$device" = cuda ]; then
    TAIL=4 step 200 torch python3 -u "$root/benches/peers/decode_torch.py" \
        7b,64,8200 1.5b,128,16400 7b,16,32600
    TAIL=6 step 120 torch-train python3 -u "$root/benches/peers/passes_torch.py" 1.5b
fi
if wanted spread; then
    size=(--prompts 512 --n 8 --length 16384)
    [ -z "$small" ] || size=(--prompts 4 --n 2 --length 32 --prompt 16)
    bench 500 step-spread-0.5b step qwen2.5-0.5b "${size[@]}" --spread --steps 1
fi
if wanted old; then
    export QURL_CUDA_NEWEST=80
    decode old-7b-64 qwen2.5-7b bf16,int8 int8 64 256
    decode old-7b-64x8k qwen2.5-7b int8 int8 64 8200
    bench 45 old-forward-8x4096 score qwen2.5-1.5b --formats bf16,int8 --batch 8 --length 4096 --rounds 2
    bench 60 old-train-8x1024 train qwen2.5-1.5b --formats bf16 --batch 8 --length 1024 --micro-tokens 8192 \
        --steps 3
    unset QURL_CUDA_NEWEST
fi
finish
