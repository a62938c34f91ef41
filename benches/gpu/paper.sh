#!/usr/bin/env bash
# The paper's recipes on one GPU, on random models of the real shapes with a real tokenizer and real problems:
# evaluation, a step, the speed probe, model and report, with the memory that was planned beside what was
# allocated.
#
#   benches/gpu/paper.sh QURL DATA OUT
#
# DATA has tokenizers/qwen2, gsm8k, deepscaler and aime24 as JSON lines. gsm8k-ppo runs as it is but for its
# length (two steps). deepscaler-grpo keeps its KV budget, its micro-batches and its stages (so the memory of
# 24k responses), with fewer prompts and shorter responses in the one step, which would otherwise take a
# quarter of an hour. Its evaluation samples twice, at a temperature that makes the random model as sure as a
# real one: top-p of a flat distribution sorts half of the vocabulary.
set -u
qurl=${1:?usage: paper.sh QURL DATA OUT} data=$2 out=$3
here=$(cd "$(dirname "$0")/../.." && pwd)
models=$(mktemp -d)
mkdir -p "$out"
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } \
    | tee "$out/machine.txt"
failed=0

train() { # name, recipe, shape, more...
    local name=$1 recipe=$2 shape=$3
    shift 3
    python3 "$here/benches/gpu/paper_model.py" "$shape" "$data/tokenizers/qwen2" "$models/$shape" || return 1
    echo "== $name"
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 > "$models/$name.used" &
    local watcher=$!
    local began=$SECONDS
    "$qurl" train "$here/recipes/$recipe.toml" --device cuda --set model.path="$models/$shape" \
        --run "$models/$name" "$@" > "$out/$name.txt" 2>&1
    local status=$?
    kill $watcher
    tail -n 12 "$out/$name.txt"
    used=$(sort -n "$models/$name.used" | tail -1)
    echo "   used on the whole device, driver included, at most: $used MiB"
    echo "   status $status after $((SECONDS - began)) s"
    cp "$models/$name/metrics.jsonl" "$out/$name.metrics.jsonl"
    cp "$models/$name/summary.json" "$out/$name.summary.json"
    ls -l "$models/$name/report.html" "$models/$name/model/model.safetensors" || failed=1
    python3 - "$out/$name.summary.json" << 'END' || failed=1
import json, sys
memory = json.load(open(sys.argv[1]))["memory"]
share = memory["planned"] / memory["peak"]
planned, peak = memory["planned"] >> 20, memory["peak"] >> 20
print(f"   memory: {planned} MiB planned, {peak} MiB allocated at most: {share:.3f} (0.95 to 1.05)")
sys.exit(not 0.95 <= share <= 1.05)
END
    rm -rf "$models/$name" "${models:?}/$shape"
    [ $status -eq 0 ] || failed=1
}

train gsm8k-ppo gsm8k-ppo Qwen2.5-0.5B-Instruct --steps 2 \
    --set task.files="[\"$data/gsm8k/train.jsonl.gz\"]" \
    --set task.test_files="[\"$data/gsm8k/test.jsonl\"]" --set trainer.save_freq=0
train deepscaler-grpo deepscaler-grpo DeepSeek-R1-Distill-Qwen-1.5B --steps 1 \
    --set task.files="[\"$data/deepscaler/train_partial.jsonl.gz\"]" \
    --set task.test_files="[\"$data/aime24/test.jsonl\"]" \
    --set data.train_batch_size=32 --set actor.ppo_mini_batch_size=32 --set data.max_response_length=2048 \
    --set run.test_k=2 --set run.test_temperature=0.05 \
    --set trainer.save_freq=0
exit $failed
