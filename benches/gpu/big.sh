#!/usr/bin/env bash
# Big models on one GPU: 7B whole (GRPO, int8 rollouts, moments in 8 bits) and 32B with LoRA beside an int8
# base, each through rollout, score, update, evaluation, checkpoint and a resume that must end with the same
# weights, with the memory that was planned beside what was allocated and what the driver says is used.
#
#   benches/gpu/big.sh OUT [7b] [32b]
#
# LENGTH sets the tokens of an answer (256 for 7b, 128 for 32b): 64 x 8 and 32 x 8 answers. Each model makes
# three steps (one untimed, one timed, and that one again after the resume). What to expect on an H200, from
# steps of 16 x 8 and 8 x 8 answers that were measured there
# (`benches/runs/2026-11-18-h200/{moments,adapters}`):
#
#   LENGTH    a step of 7B    all of 7b    a step of 32B    all of 32b
#      128                                          24 s         2 min
#      256            22 s        4 min             48 s       3.5 min
#     1024            90 s        7 min            195 s        11 min
#     4096           420 s       25 min            790 s        42 min
#
# 7b loads, saves and reads 44 GiB, which takes 2 to 3 of its minutes.
#
# KV_MB sets the memory for keys and values. 7B takes 46 GB under SCRATCH (the working directory) and 80 GB of
# the host's memory. Where SCRATCH has no room, or writes so slowly that LIMIT does not suffice, the
# checkpoint goes to memory (/dev/shm), and where that has no room either, the step is made without one: the
# script says so and fails.
out=${1:?usage: benches/gpu/big.sh OUT [7b] [32b]}
shift
parts=${*:-32b 7b}
. "$(dirname "$0")/common.sh"
known 7b 32b
begin
scratch=
trap 'rm -rf "$scratch"' EXIT

room() { # folder: GB that are free there
    df -B1000000000 --output=avail "$1" | tail -n 1
}
in_time() { # GB, MB/s: whether the step, its checkpoint and the same step again fit into what is left
    [ $((140 + $1 * 1000 / $2)) -le $((deadline - SECONDS)) ]
}
place() { # GB: prints where a checkpoint of that size can go, and nothing where nowhere
    local gb=$1 to=${SCRATCH:-.} began rate
    [ "$gb" -gt 4 ] || { echo "$to"; return; }
    if [ "$(room "$to")" -ge $((gb + 2)) ]; then
        began=$(date +%s%N)
        dd if=/dev/zero of="$to/big.speed" bs=8M count=128 conv=fdatasync 2> /dev/null
        rate=$((1073741824 * 1000 / ($(date +%s%N) - began)))
        rm -f "$to/big.speed"
        echo "   $to: $rate MB/s" >&2
        ! in_time "$gb" $rate || { echo "$to"; return; }
    fi
    # There it stands beside the 80 GB of the process.
    local memory
    memory=$(awk '/^MemAvailable/ { print int($2 / 1e6) }' /proc/meminfo)
    if [ "$(room /dev/shm)" -ge $((gb + 2)) ] && [ "$memory" -ge $((gb + 84)) ] && in_time "$gb" 1500; then
        echo /dev/shm
    fi
}

model() { # name, GB of its checkpoint, tokens of an answer, arguments of `qurl bench step`...
    local name=$1 length=${LENGTH:-$3} to keep=() watcher=
    [ -z "$small" ] || length=16
    to=$(place "$2")
    shift 3
    echo "== $name, answers of $length tokens, checkpoint in ${to:-NO PLACE}"
    if [ -n "$to" ]; then
        scratch=$(mktemp -d -p "$to" big.XXXXXX)
        keep=(--checkpoint "$scratch/run")
    else
        fail "$name-checkpoint"
    fi
    if gpu; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 > "$out/$name.used" &
        watcher=$!
    fi
    step "${SECONDS_EACH:-3600}" "$name.json" "$QURL" bench step --device "$device" --json --steps 1 \
        "${keep[@]}" --n 8 --length "$length" --micro-tokens 8192 --recompute --format int8 \
        --set run.test_problems=32 "$@"
    [ -z "$watcher" ] || kill "$watcher"
    [ -z "$scratch" ] || rm -rf "$scratch"
    check "$name" python3 "$root/benches/gpu/checks.py" big "$out/$name"
    rm -f "$out/$name.used"
}

# 32 problems are evaluated.
if wanted 32b; then
    size=(--shape qwen2.5-32b --prompts 32 --mini-batches 4 --max-num-seqs 128 --prompt 128
        --kv-cache-mb "${KV_MB:-40000}")
    [ -z "$small" ] || size=(--shape 5m --prompts 4 --mini-batches 2 --max-num-seqs 16 --prompt 16)
    model 32b 4 128 "${size[@]}" --set 'lora={ rank = 32, alpha = 64 }'
fi

# No KL: a reference is 15 GB more, and a checkpoint would save it as f32.
if wanted 7b; then
    size=(--shape qwen2.5-7b --prompts 64 --mini-batches 4 --max-num-seqs 256 --prompt 128
        --kv-cache-mb "${KV_MB:-12000}") gb=46
    [ -z "$small" ] || size=(--shape 5m --prompts 4 --mini-batches 2 --max-num-seqs 16 --prompt 16) gb=5
    model 7b $gb 256 "${size[@]}" --set algorithm.kl_loss_coef=0.0 --set 'actor.optim.moments="8bit"'
fi
finish
