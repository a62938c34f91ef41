#!/usr/bin/env bash
# Steps of several ranks on one GPU: weights that come out, bytes that each rank has sent beside the cost
# model, its memory beside its plan; and what shards cost one rank. In seven minutes, or a part of it:
#
#   benches/gpu/ranks_step.sh OUT [default] [half] [wide] [shards]
#
# default, half: a GRPO step of the default shape and of 0.5B on 1, 2 and 4 ranks, ZeRO-1 and ZeRO-3, by
# mpirun and torchrun; wide: the 7B model of recipes/aime-dapo.toml cut to 2 layers of full width on 4 ranks;
# shards: a step of 1.5B with 1 and 8 shards of the same micro-batches, alternating. Several ranks on a GPU
# are time-sliced: their times say nothing.
out=${1:?usage: benches/gpu/ranks_step.sh OUT [default] [half] [wide] [shards]}
shift
parts=${*:-default half wide shards}
. "$(dirname "$0")/common.sh"
known default half wide shards
begin

stuck=
of_ranks() { # seconds, name, launcher, ranks, more arguments than those in `shape`...
    local seconds=$1 name=$2 count=$4 began=$SECONDS
    # Where several ranks have run out of their time, others would, too.
    if [ -n "$stuck" ] && [ "$count" -gt 1 ]; then
        echo "== $name: left out, since $stuck ran out of time"
        fail "$name"
        return 1
    fi
    ranks "$3" "$count"
    shift 4
    step "$seconds" "$name.json" "${launch[@]}" "$QURL" bench step --device "$device" --json \
        "${shape[@]}" "$@" && return
    [ "$count" -eq 1 ] || [ $((SECONDS - began)) -lt "$seconds" ] || stuck=$name
}
checks=(python3 "$root/benches/gpu/checks.py")
divided=(--set trainer.zero_stage=3)

if wanted default; then
    shape=(--shape default --prompts 16 --n 4 --length 64 --prompt 16 --mini-batches 2 --max-num-seqs 64
        --steps 1 --micro-tokens 1024 --set trainer.shards=4)
    of_ranks 60 default-1 none 1
    of_ranks 60 default-2 mpirun 2
    of_ranks 60 default-4 torchrun 4
    of_ranks 60 default-2-divided torchrun 2 "${divided[@]}"
    of_ranks 60 default-4-divided mpirun 4 "${divided[@]}"
    check default "${checks[@]}" same "$out" default-{1,2,4,2-divided,4-divided}
fi

if wanted half; then
    size=(--shape qwen2.5-0.5b --n 4 --length 32)
    [ -z "$small" ] || size=(--shape 5m --n 2 --length 8)
    shape=("${size[@]}" --prompts 8 --prompt 32 --mini-batches 1 --steps 1
        --max-num-seqs 32 --micro-tokens 1024 --kv-cache-mb 256 --set trainer.shards=4)
    of_ranks 60 half-1 none 1
    of_ranks 90 half-2 mpirun 2
    of_ranks 90 half-4-divided torchrun 4 "${divided[@]}"
    of_ranks 90 half-2-divided mpirun 2 "${divided[@]}"
    check half "${checks[@]}" same "$out" half-{1,2,4-divided,2-divided}
fi

if wanted wide; then
    size=(--shape qwen2.5-7b --n 4 --length 32)
    [ -z "$small" ] || size=(--shape 5m --n 2 --length 8)
    shape=("${size[@]}" --layers 2 --prompts 8 --prompt 32 --mini-batches 1 --steps 1
        --max-num-seqs 32 --micro-tokens 1024 --recompute --kv-cache-mb 256 --set trainer.shards=4)
    of_ranks 120 wide-4-divided mpirun 4 "${divided[@]}"
    check wide "${checks[@]}" same "$out" wide-4-divided
fi

if wanted shards; then
    # 256 sequences of 384 tokens in one update: a shard of eight is one micro-batch, so both compute the same
    # micro-batches, and what differs is the tree of sums.
    size=(--shape qwen2.5-1.5b --prompts 64 --length 256 --prompt 128 --micro-tokens 12288) most=0.03
    [ -z "$small" ] || size=(--shape 5m --prompts 8 --length 32 --prompt 16 --micro-tokens 192) most=9
    shape=("${size[@]}" --n 4 --mini-batches 1 --max-num-seqs 256 --steps 3)
    for turn in 1 2; do
        for shards in 1 8; do
            of_ranks 60 shards-$shards-$turn none 1 --set trainer.shards=$shards
        done
    done
    check shards "${checks[@]}" shards "$out" $most
fi
finish
