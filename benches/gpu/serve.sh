#!/usr/bin/env bash
# A server under load on one GPU, in under five minutes: 7B and 32B in bf16 and int8, rates of arrival up to
# saturation, then all requests at once (three times), beside the engine alone with the same lengths and the
# same number of places in the same process.
#
#   QURL=target/release/qurl benches/gpu/serve.sh OUT
#
# leaves its raw output in OUT. The lines "saturated" answer two questions: tokens a second through HTTP as a
# share of the engine alone (95% is wanted), and how much longer a client waits between two tokens at batch 64
# (2% at most). `bench rollout` comes last, for its figure "all" at the same lengths and one full batch.
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
    tail -n 20 "$out/$name.txt"
    tail -n 3 "$out/$name.err"
}
# A full batch makes about 15000 (bf16) and 23000 (int8) tokens a second at 7B, 3600 and 5900 at 32B.
step 110 serve-7b "$QURL" bench serve --device cuda --shape qwen2.5-7b --formats bf16,int8 --max-num-seqs 64 \
    --requests 192 --seconds 3 --prompt 128 --new 256 --rates 8,16,32,48,64,96,inf,inf,inf \
    --plot "$out/serve-7b.html"
step 130 serve-32b "$QURL" bench serve --device cuda --shape qwen2.5-32b --formats bf16,int8 --max-num-seqs 64 \
    --requests 128 --seconds 3 --prompt 128 --new 128 --rates 4,8,16,24,48,inf,inf,inf \
    --plot "$out/serve-32b.html"
step 30 rollout-7b "$QURL" bench rollout --device cuda --shape qwen2.5-7b --formats bf16,int8 --batch 64 \
    --prompt 128 --new 256 --rounds 1
step 30 rollout-32b "$QURL" bench rollout --device cuda --shape qwen2.5-32b --formats bf16,int8 --batch 64 \
    --prompt 128 --new 128 --rounds 1
grep -h saturated "$out"/serve-*.txt
