#!/usr/bin/env bash
# A server under load on one GPU, in under five minutes: 7B and 32B in bf16 and int8, rates of arrival up to
# saturation, and beside them `bench rollout` at the same batch and lengths.
#
#   QURL=target/release/qurl benches/gpu/serve.sh OUT
#
# leaves its raw output in OUT.
set -u
out=${1:?usage: benches/gpu/serve.sh OUT}
mkdir -p "$out"
: "${QURL:?QURL names the release binary}"
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; } | tee "$out/machine.txt"
step() { # seconds, name, command...
    local seconds=$1 name=$2
    shift 2
    local began=$SECONDS
    timeout "$seconds" "$@" > "$out/$name.txt" 2> "$out/$name.err"
    echo "== $name: status $? after $((SECONDS - began)) s"
    tail -n 12 "$out/$name.txt"
}
# Saturated at batch 64, as `bench rollout` measures it: the engine alone, then through HTTP.
for shape in qwen2.5-7b qwen2.5-32b; do
    step 60 "rollout-$shape" "$QURL" bench rollout --device cuda --shape "$shape" --formats bf16,int8 --batch 64 \
        --prompt 128 --new 128 --rounds 1
done
step 75 serve-7b "$QURL" bench serve --device cuda --shape qwen2.5-7b --formats bf16,int8 --requests 64 \
    --prompt 128 --new 128 --rates 16,64,inf,inf --plot "$out/serve-7b.html"
step 75 serve-32b "$QURL" bench serve --device cuda --shape qwen2.5-32b --formats bf16,int8 --requests 64 \
    --prompt 128 --new 128 --rates 8,inf,inf --plot "$out/serve-32b.html"
