#!/usr/bin/env bash
# Big models on one GPU: 7B whole (GRPO, int8 rollouts, moments in 8 bits) and 32B with LoRA beside an int8
# base, each through rollout, score, update, evaluation, checkpoint and a resume that must end with the same
# weights, with the memory that was planned beside what was allocated and what the driver says is used.
#
#   benches/gpu/big.sh OUT [7b] [32b]
#
# LENGTH sets the tokens of an answer, 256 by default: 64 x 8 and 32 x 8 answers. Each model makes three steps
# (one untimed, one timed, and that one again after the resume). What to expect on an H200, from steps of 16 x
# 8 and 8 x 8 answers that were measured there (`benches/runs/2026-11-18-h200/{moments,adapters}`):
#
#   LENGTH    a step of 7B    of 32B    the whole script
#      256            22 s      48 s     6 min, 2 of which load, save and read 44 GiB
#      512            44 s      95 s    10 min
#     1024            90 s     195 s    17 min
#     4096           420 s     790 s    the largest sizes: 25 min for 7b, 42 for 32b
#
# One call of ten minutes holds the default, or LENGTH=512 for one of the models, or LENGTH=1024 for 7b. KV_MB
# sets the memory for keys and values. 7B takes 46 GB under SCRATCH (by default the working directory) and 80
# GB of the host's memory.
#
# QURL names the binary. DEVICE=cpu tries the script where there is no GPU: small shapes, the same parts.
set -u
out=${1:?usage: benches/gpu/big.sh OUT [7b] [32b]}
shift
parts=" ${*:-7b 32b} "
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")/../.." && pwd)
QURL=${QURL:-$here/target/release/qurl}
device=${DEVICE:-cuda}
length=${LENGTH:-256}
scratch=$(mktemp -d -p "${SCRATCH:-.}" big.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
failed=0

if [ "$device" = cuda ]; then
    { date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } \
        | tee "$out/machine.txt"
fi

part() { # name: whether it is wanted
    case $parts in *" $1 "*) return 0 ;; esac
    return 1
}

run() { # name, arguments of `qurl bench step`...
    local name=$1 watcher=
    shift
    echo "== $name, answers of $length tokens"
    if [ "$device" = cuda ]; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 > "$out/$name.used" &
        watcher=$!
    fi
    local began=$SECONDS
    "$QURL" bench step --device "$device" --json --steps 1 --checkpoint "$scratch/$name" "$@" \
        > "$out/$name.json" 2> "$out/$name.log"
    local status=$?
    [ -n "$watcher" ] && kill "$watcher"
    echo "   status $status after $((SECONDS - began)) s"
    rm -rf "${scratch:?}/$name"
    if [ $status -ne 0 ]; then
        failed=1
        tail -5 "$out/$name.log"
        return
    fi
    python3 - "$out/$name" << 'END' || failed=1
import json, os, sys
name = sys.argv[1]
row = json.load(open(f"{name}.json"))["results"][0]
for phase, of in row["phases"].items():
    limit = f" of {of['limit_s']:.2f} s at least" if of["limit_s"] else ""
    print(f"   {phase:9} {of['seconds']:8.2f} s{limit}")
tokens, seconds = row["response_tokens"], row["seconds"]
print(f"   step      {seconds:8.2f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s;"
      f" rollout {row['rollout']['tokens_per_s']:.0f} tokens/s")
resumed = row["resumed"]
print(f"   evaluate  {resumed['evaluation_s']:8.2f} s")
print(f"   save      {resumed['save_s']:8.2f} s, {resumed['checkpoint_bytes'] >> 20} MiB")
print(f"   resume    {resumed['resume_s']:8.2f} s, then the same weights: {resumed['checksum']}")
planned, peak = row["ranks"]["ranks"][0]["planned_bytes"], resumed["peak_bytes"]
if peak == 0:
    sys.exit(0)  # a CPU
used = max(int(line) for line in open(f"{name}.used") if line.strip().isdigit())
print(f"   memory: {planned >> 20} MiB planned, {peak >> 20} allocated at most: {planned / peak:.3f}"
      f" (0.95 to 1.05); {used} MiB used on the whole device")
os.remove(f"{name}.used")
sys.exit(not 0.95 <= planned / peak <= 1.05)
END
}

# 32 problems are evaluated. No KL: a reference is 15 GB more, and a checkpoint would save it as f32.
if part 7b; then
    if [ "$device" = cuda ]; then
        size="--shape qwen2.5-7b --prompts 64 --mini-batches 4 --max-num-seqs 256
            --kv-cache-mb ${KV_MB:-12000} --prompt 128"
    else
        size="--shape 5m --prompts 4 --mini-batches 2 --max-num-seqs 16 --prompt 16"
    fi
    # shellcheck disable=SC2086
    run 7b $size --n 8 --length "$length" --micro-tokens 8192 --recompute --format int8 \
        --set algorithm.kl_loss_coef=0.0 --set 'actor.optim.moments="8bit"' --set run.test_problems=32
fi

if part 32b; then
    if [ "$device" = cuda ]; then
        size="--shape qwen2.5-32b --prompts 32 --mini-batches 4 --max-num-seqs 128
            --kv-cache-mb ${KV_MB:-40000} --prompt 128"
    else
        size="--shape 5m --prompts 4 --mini-batches 2 --max-num-seqs 16 --prompt 16"
    fi
    # shellcheck disable=SC2086
    run 32b $size --n 8 --length "$length" --micro-tokens 8192 --recompute --format int8 \
        --set 'lora={ rank = 32, alpha = 64 }' --set run.test_problems=32
fi
exit $failed
