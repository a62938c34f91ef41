#!/usr/bin/env bash
# A tiny training in every format of rollouts under compute-sanitizer: memory that is not ours (memcheck), not
# initialised (initcheck), or read across a barrier that not all have reached (synccheck).
#
#   benches/gpu/sanitize.sh OUT
#
# QURL names the binary, LIMIT the seconds of all of it (180). Six runs at a time share the GPU; each makes
# two steps of the warm start, one step of GRPO and one test, which is every kernel of its format at least
# once. OUT gets a file for each tool and format; the status is 1 where one found something or did not come to
# its end.
set -u
out=${1:?usage: benches/gpu/sanitize.sh OUT}
here=$(cd "$(dirname "$0")/../.." && pwd)
export QURL=${QURL:-$here/target/release/qurl} OUT=$out RECIPE=$here/recipes/tiny-grpo.toml
export UNTIL=$(($(date +%s) + ${LIMIT:-180}))
mkdir -p "$out"

train() { # format, folder, command before it...
    local format=$1 run=$2
    shift 2
    "$@" "$QURL" train "$RECIPE" --device "${DEVICE:-cuda}" --quiet --run "$run" --set rollout.format="$format" \
        --set sft.steps=2 --set sft.warmup_steps=1 --set sft.batch_size=4 --set data.train_batch_size=2 \
        --set data.max_response_length=6 --set rollout.n=2 --set actor.ppo_mini_batch_size=2 \
        --set actor.lr_warmup_steps=0 --set run.total_steps=1 --set run.test_problems=2
}
check() { # tool, format
    local tool=$1 format=$2
    local log=$OUT/$tool-$format.txt status=0 left=$((UNTIL - $(date +%s)))
    train "$format" "$OUT/run-$tool-$format" timeout $((left > 1 ? left : 1)) \
        compute-sanitizer --tool "$tool" --error-exitcode 9 > "$log" 2>&1 || status=$?
    rm -rf "$OUT/run-$tool-$format"
    echo "$tool $format: status $status, $(grep -h 'ERROR SUMMARY' "$log" | tail -1)"
    return $status
}
export -f train check

# Without the tool first: kernels are compiled once, and not under it.
train bf16 "$out/run" > "$out/plain.txt" 2>&1 || { cat "$out/plain.txt"; exit 1; }
rm -rf "$out/run"
for format in bf16 int8 fp8 fp8-block int4 nvfp4; do
    for tool in memcheck initcheck synccheck; do
        echo "$tool $format"
    done
done | xargs -P 6 -L 1 bash -c 'check "$@"' _ | tee "$out/summary.txt"
[ "${PIPESTATUS[1]}" -eq 0 ]
