#!/usr/bin/env bash
# A tiny training in every format of rollouts under compute-sanitizer: memory that is not ours (memcheck), not
# initialised (initcheck), or read across a barrier that not all have reached (synccheck).
#
#   benches/gpu/sanitize.sh OUT [FORMAT...]
#
# In three minutes, alone on the GPU: JOBS runs at a time share it (3), and blocks that spin-wait for each
# other wait long beside many. Each makes two steps of the warm start, one step of GRPO and one test, with
# heads of 64, which flash attention takes: every kernel of its format at least once. OUT gets a file for each
# tool and format; the status is 1 where one found something, or did not come to its end. With DEVICE=cpu
# nothing stands before the runs.
out=${1:?usage: benches/gpu/sanitize.sh OUT [FORMAT...]}
shift
parts=${*:-int8 nvfp4 bf16 fp8 int4}
. "$(dirname "$0")/common.sh"
known bf16 int8 fp8 int4 nvfp4
begin
export out root device
# What is left at the end is killed: a run that hangs takes no other's time.
until=$(($(date +%s) + ${LIMIT:-240} - 10))
export until

# shellcheck disable=SC2329
train() { # format, folder, command before it...
    local format=$1 run=$2
    shift 2
    "$@" "$QURL" train "$root/recipes/tiny-grpo.toml" --device "$device" --quiet --run "$run" \
        --set model.new.hidden_size=128 --set model.new.num_attention_heads=2 \
        --set model.new.num_key_value_heads=1 --set rollout.format="$format" --set sft.steps=2 \
        --set sft.warmup_steps=1 --set sft.batch_size=4 \
        --set data.train_batch_size=2 --set data.max_response_length=6 --set rollout.n=2 \
        --set actor.ppo_mini_batch_size=2 --set actor.lr_warmup_steps=0 --set run.total_steps=1 \
        --set run.test_problems=2
}
# shellcheck disable=SC2329
under() { # tool, format
    local tool=$1 format=$2 before=() run=$out/run-$1-$2
    local log=$out/$tool-$format.txt status=0 left=$((until - $(date +%s)))
    if [ "$left" -lt 5 ]; then
        echo "$tool $format: left out, no time"
        return 1
    fi
    [ "$device" != cuda ] || before=(compute-sanitizer --tool "$tool" --error-exitcode 9)
    train "$format" "$run" timeout -k 10 "$left" "${before[@]}" > "$log" 2>&1 || status=$?
    rm -rf "$run"
    echo "$tool $format: status $status, $(grep -h 'ERROR SUMMARY' "$log" | tail -n 1)"
    return "$status"
}
export -f train under

# Without the tool first: the recipe runs here.
step 120 plain bash -c 'train bf16 "$out/run"'
rm -rf "$out/run"
for tool in memcheck synccheck initcheck; do
    for format in $parts; do
        echo "$tool $format"
    done
done > "$out/runs"
# A function of bash has no process of its own that `step` could limit: xargs has.
TAIL=30 step 3600 all xargs -a "$out/runs" -P "${JOBS:-3}" -L 1 bash -c 'under "$@"' _
rm -f "$out/runs"
while read -r tool format _; do
    fail "$tool-${format%:}"
done < <(grep -v ': status 0,' "$out/all.txt")
finish
