#!/usr/bin/env bash
# Hashes of the final models of small recipes: the same before and after a change that means to change no bit.
#
#   benches/hashes.sh QURL DEVICE FOLDER [LEVEL..]
#
# prints one line for each recipe and level of CPU instructions (QURL_CPU; "best" by default). STEPS steps (6)
# are made after a warm start of SFT_STEPS (60); with STEPS=all, all that the recipe says. SET holds more
# settings ("rollout.kv_cache=bf16": the bits of before int8 rollouts kept keys and values in 8 bits).
set -eu
qurl=${1:?usage: hashes.sh QURL DEVICE FOLDER [LEVEL..]} device=$2 folder=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
for level in "${@:-best}"; do
    for recipe in tiny-ppo tiny-grpo tiny-dapo default; do
        more=(--steps "${STEPS:-6}" --set "sft.steps=${SFT_STEPS:-60}" --set run.test_problems=32)
        [ "${STEPS:-}" = all ] && more=()
        for setting in ${SET:-}; do more+=(--set "$setting"); done
        run=$folder/$recipe-$level
        rm -rf "$run"
        QURL_CPU=$([ "$level" = best ] || echo "$level") "$qurl" train "$here/recipes/$recipe.toml" \
            --device "$device" \
            --quiet --run "$run" "${more[@]}" > /dev/null 2> "$folder/log" || { cat "$folder/log"; exit 1; }
        echo "$(sha256sum < "$run/model/model.safetensors" | cut -c1-64) $recipe $device $level"
    done
done
