#!/usr/bin/env bash
# Reference runs: losses, rewards and the final weights of a few steps of the default and the tiny recipes,
# bit for bit.
#
#   benches/references.sh QURL DEVICE LEVEL > crates/qurl/tests/cli/references/NAME.json
#
# LEVEL is one of CPU instructions (QURL_CPU) or "best"; NAME is that level, or the GPU's (h200). A test
# (crates/qurl/tests/cli/references.rs) makes the same runs at the level of its machine and compares. Whoever
# changes bits on purpose makes the files anew and names the change in CHANGELOG.md.
set -eu
qurl=${1:?usage: references.sh QURL DEVICE LEVEL} device=${2:-cpu} level=${3:-best}
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for recipe in default tiny-ppo tiny-grpo tiny-dapo; do
    QURL_CPU=$([ "$level" = best ] || echo "$level") "$qurl" train "$here/recipes/$recipe.toml" \
        --device "$device" --quiet --run "$folder/$recipe" --steps 3 --set sft.steps=120 \
        --set sft.batch_size=16 --set task.level=1 --set run.test_problems=8 > /dev/null 2> "$folder/log" ||
        { cat "$folder/log" >&2; exit 1; }
done
python3 - "$folder" <<'P'
import json, sys, zlib
folder, runs = sys.argv[1], {}
for recipe in ["default", "tiny-ppo", "tiny-grpo", "tiny-dapo"]:
    run = f"{folder}/{recipe}"
    lines = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    crc = zlib.crc32(open(f"{run}/model/model.safetensors", "rb").read())
    runs[recipe] = {"loss": [x["loss"] for x in lines], "reward": [x["reward"] for x in lines],
                    "model_crc32": f"{crc:08x}"}
print(json.dumps(runs, indent=1))
P
