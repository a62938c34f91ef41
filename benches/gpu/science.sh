#!/usr/bin/env bash
# What only a GPU shows of training in the rollout's format and beside a quantized base, and the studies
# there.
#
#   benches/gpu/science.sh OUT [score] [forward] [adapters] [gradients]     # three minutes
#   benches/gpu/science.sh OUT study claims       # hours: the study of this name in recipes/studies, resumed
#
# score: scoring in the rollout's format, int8 at 1.6 times the tokens/s of bf16 or more at 7B. forward: with
# trainer.forward = "rollout" kl is 0 and rho 1 in every step of 20, in int8, fp8, int4 and nvfp4. adapters:
# so they are with LoRA beside a base in int8 and nvfp4. gradients: those of the rollout's forward pass beside
# the CPU's (PARITY_TESTS, or cargo, `cargo test --no-run -p qurl-rollout --test rollout`).
out=${1:?usage: benches/gpu/science.sh OUT [score] [forward] [adapters] [gradients] | study NAME}
shift
if [ "${1:-}" = study ]; then
    study=${2:?study: which one of recipes/studies}
    parts=
else
    parts=${*:-score forward adapters gradients}
fi
. "$(dirname "$0")/common.sh"
known score forward adapters gradients
begin
checks=(python3 "$root/benches/gpu/checks.py")

if [ -n "${study:-}" ]; then
    resume=()
    [ ! -f "$out/$study/study.toml" ] || resume=(--resume)
    exec "$QURL" study "$root/recipes/studies/$study.toml" --run "$out/$study" "${resume[@]}"
fi

if wanted score; then
    size=(--shape qwen2.5-7b --batch 16 --length 1024 --quantize-head) ratio=1.6
    [ -z "$small" ] || size=(--shape 5m --batch 4 --length 64 --rounds 2) ratio=0
    step 90 score.json "$QURL" bench score --device "$device" --formats bf16,int8,fp8 "${size[@]}" --json
    check score "${checks[@]}" score "$out/score.json" $ratio
fi

steps=20 tiny=()
[ -z "$small" ] || steps=2 tiny=(--set task.level=1 --set run.test_problems=4)
if wanted forward || wanted adapters; then
    # One warm start; what follows is the same recipe from its model.
    TAIL=1 step 90 warm "$QURL" train "$root/recipes/tiny-grpo.toml" --device "$device" --quiet --steps 1 \
        --run "$out/warm" --set actor.lr_warmup_steps=0 "${tiny[@]}" ${small:+--set sft.steps=400}
    awk '/^\[/ { skip = $0 == "[model.new]" || $0 == "[sft]" } !skip' "$root/recipes/tiny-grpo.toml" \
        > "$out/warm.toml"
fi
train() { # name, more...: steps whose metrics must be those of a run on-policy
    local name=$1
    shift
    TAIL=1 step 60 "$name" "$QURL" train "$out/warm.toml" --device "$device" --quiet --steps $steps \
        --run "$out/run" --set "model.path=\"$out/warm/model\"" --set actor.ppo_mini_batch_size=4 \
        --set actor.lr_warmup_steps=0 --set rollout.uaq=1 "${tiny[@]}" "$@"
    check "$name-on-policy" "${checks[@]}" on-policy "$name" "$out/run/metrics.jsonl"
    cp "$out/run/metrics.jsonl" "$out/$name.jsonl" 2> /dev/null
    rm -rf "$out/run"
}
if wanted forward; then
    for format in int8 fp8 int4 nvfp4; do
        train "forward-$format" --set trainer.forward=rollout --set rollout.format=$format \
            --set rollout.quantize_head=true
    done
fi
if wanted adapters; then
    for format in int8 nvfp4; do
        train "adapters-$format" --set 'lora={ rank = 8, alpha = 16 }' --set rollout.format=$format
    done
fi
rm -rf "$out/warm" "$out/warm.toml"

if wanted gradients && test_binary PARITY_TESTS qurl-rollout rollout; then
    TAIL=18 step 120 gradients "$PARITY_TESTS" --nocapture --test-threads 1 gradients_equal_the_cpu
    check gradients-ran ran gradients
fi
finish
