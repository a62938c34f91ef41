#!/usr/bin/env bash
# The paper's recipes on one GPU, on random models of the real shapes with a real tokenizer and real problems:
# evaluation, a step, the speed probe, model and report, with the memory that was planned beside what was
# allocated.
#
#   benches/gpu/paper.sh OUT DATA
#
# DATA has tokenizers/qwen2, gsm8k, deepscaler and aime24 as JSON lines. gsm8k-ppo runs as it is but for its
# length (two steps). deepscaler-grpo keeps its KV budget, its micro-batches and its stages (so the memory of
# 24k responses), with fewer prompts and shorter responses in the one step, which would otherwise take a
# quarter of an hour. Its evaluation samples twice, at a temperature that makes the random model as sure as a
# real one: top-p of a flat distribution sorts half of the vocabulary.
out=${1:?usage: benches/gpu/paper.sh OUT DATA}
data=${2:?usage: benches/gpu/paper.sh OUT DATA}
. "$(dirname "$0")/common.sh"
begin
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT

train() { # name, recipe, shape, more...
    local name=$1 recipe=$2 shape=$3 used watcher=
    shift 3
    step 120 "$name-model" python3 "$root/benches/gpu/paper_model.py" "$shape" "$data/tokenizers/qwen2" \
        "$models/$shape" || return
    if gpu; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 > "$models/used" &
        watcher=$!
    fi
    TAIL=12 step 400 "$name" "$QURL" train "$root/recipes/$recipe.toml" --device "$device" \
        --set model.path="$models/$shape" --set trainer.save_freq=0 --run "$models/run" "$@"
    if [ -n "$watcher" ]; then
        kill $watcher
        used=$(sort -n "$models/used" | tail -n 1)
        echo "   used on the whole device, driver included, at most: $used MiB"
    fi
    cp "$models/run/metrics.jsonl" "$out/$name.metrics.jsonl"
    cp "$models/run/summary.json" "$out/$name.summary.json"
    check "$name-left" ls -l "$models/run/report.html" "$models/run/model/model.safetensors"
    check "$name-memory" python3 "$root/benches/gpu/checks.py" summary "$out/$name.summary.json"
    rm -rf "$models/run" "${models:?}/$shape"
}

train gsm8k-ppo gsm8k-ppo Qwen2.5-0.5B-Instruct --steps 2 \
    --set task.files="[\"$data/gsm8k/train.jsonl.gz\"]" \
    --set task.test_files="[\"$data/gsm8k/test.jsonl\"]"
train deepscaler-grpo deepscaler-grpo DeepSeek-R1-Distill-Qwen-1.5B --steps 1 \
    --set task.files="[\"$data/deepscaler/train_partial.jsonl.gz\"]" \
    --set task.test_files="[\"$data/aime24/test.jsonl\"]" \
    --set data.train_batch_size=32 --set actor.ppo_mini_batch_size=32 --set data.max_response_length=2048 \
    --set run.test_k=2 --set run.test_temperature=0.05
finish
