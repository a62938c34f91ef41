#!/usr/bin/env bash
# What only a GPU shows of training in the rollout's format, and the studies there.
#
#   QURL=target/release/qurl benches/gpu/science.sh OUT          # under ten minutes: costs, rho = 1 in runs
#   QURL=target/release/qurl benches/gpu/science.sh OUT claims   # hours: the study of this name, resumed
#
# leaves its raw output in OUT. Expected: score-7b has int8 at 1.6 times the tokens/s of bf16 or more;
# on-policy.txt has kl 0 and rho 1 for every step of every format; gradients and parity pass (they compare
# with the CPU).
set -u
out=${1:?usage: benches/gpu/science.sh OUT [STUDY]}
mkdir -p "$out"
: "${QURL:?QURL names the release binary}"
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -gt 1 ]; then
    run=$out/$2
    resume=$([ -f "$run/study.toml" ] && echo --resume)
    exec "$QURL" study "$root/recipes/studies/$2.toml" --run "$run" $resume
fi
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } | tee "$out/machine.txt"
step() { # seconds, name, command...
    local seconds=$1 name=$2
    shift 2
    local began=$SECONDS
    timeout "$seconds" "$@" > "$out/$name.txt" 2> "$out/$name.err"
    echo "== $name: status $? after $((SECONDS - began)) s"
    tail -n 20 "$out/$name.txt"
    tail -n 3 "$out/$name.err"
}
score=(bench score --device cuda --formats bf16,int8,fp8 --batch 8 --length 4096)
step 120 score-7b "$QURL" "${score[@]}" --shape qwen2.5-7b
step 60 score-1.5b "$QURL" "${score[@]}" --shape qwen2.5-1.5b
# 20 steps of GRPO with four updates each; the lines say the smallest and largest KL and rho of all tokens.
for format in int8 fp8 int4 nvfp4; do
    rm -rf "$out/on-policy-$format"
    step 90 "on-policy-$format" "$QURL" train "$root/recipes/tiny-grpo.toml" --device cuda --quiet --steps 20 \
        --run "$out/on-policy-$format" --set trainer.forward=rollout --set rollout.format=$format \
        --set rollout.quantize_head=true --set rollout.uaq=1 --set actor.ppo_mini_batch_size=4
    python3 - "$format" "$out/on-policy-$format/metrics.jsonl" << 'EOF' | tee -a "$out/on-policy.txt"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[2])]
of = lambda key: [line["mismatch"][key] for line in lines]
tokens, updates = sum(of("tokens")), sum(line["updates"] for line in lines)
kl, rho = (min(of("kl")), max(of("kl"))), (min(of("rho_min")), max(of("rho_max")))
print(f"{sys.argv[1]}: {len(lines)} steps, {updates} updates, {tokens} tokens: kl {kl}, rho {rho}, "
      f"probabilities differ by at most {max(of('probs_diff_max'))}")
EOF
done
step 240 gradients cargo test --release --locked -p qurl-rollout --test rollout gradients_equal_the_cpu -- \
    --nocapture
