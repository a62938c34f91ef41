#!/usr/bin/env bash
# A tiny training in every format of rollouts under compute-sanitizer: memory that is not ours (memcheck), not
# initialised (initcheck), or read across a barrier that not all have reached (synccheck).
#
#   benches/gpu/sanitize.sh OUT
#
# QURL names the binary. OUT gets a file for each tool and format; the status is 1 where one found something.
set -u
out=${1:?usage: benches/gpu/sanitize.sh OUT}
here=$(cd "$(dirname "$0")/../.." && pwd)
qurl=${QURL:-$here/target/release/qurl}
mkdir -p "$out"
failed=0
for format in bf16 int8 fp8 int4; do
    for tool in memcheck initcheck synccheck; do
        log=$out/$tool-$format.txt
        timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$qurl" train \
            "$here/recipes/tiny-grpo.toml" --device cuda --set rollout.format="$format" --set sft.steps=40 \
            --set run.total_steps=1 --set run.test_problems=8 --run "$out/run" --quiet > "$log" 2>&1
        status=$?
        rm -rf "$out/run"
        echo "$tool $format: status $status, $(grep -h 'ERROR SUMMARY' "$log" | tail -1)"
        [ $status -eq 0 ] || failed=1
    done
done
exit $failed
