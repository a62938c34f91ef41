#!/usr/bin/env bash
# A server under load on one GPU, in five minutes: 7B and 32B in bf16 and int8, rates of arrival up to
# saturation, then all requests at once (three times), beside the engine alone with the same lengths and the
# same number of places in the same process.
#
#   benches/gpu/serve.sh OUT [7b] [32b]
#
# The lines "saturated" answer two questions: tokens a second through HTTP as a share of the engine alone (95%
# is wanted), and how much longer a client waits between two tokens at batch 64 (2% at most). `bench rollout`
# comes after each, for its figure "all" at the same lengths and one full batch.
out=${1:?usage: benches/gpu/serve.sh OUT [7b] [32b]}
shift
parts=${*:-7b 32b}
. "$(dirname "$0")/common.sh"
known 7b 32b
begin

served() { # seconds, name, shape, new tokens, requests, rates
    local seconds=$1 name=$2 shape=$3 new=$4 requests=$5 rates=$6 prompt=128 places=64
    [ -z "$small" ] || shape=5m new=16 requests=16 rates=8,inf,inf,inf prompt=16 places=8
    local both=(--device "$device" --shape "$shape" --formats bf16,int8 --prompt $prompt --new "$new")
    TAIL=20 step "$seconds" "serve-$name" "$QURL" bench serve "${both[@]}" --max-num-seqs $places \
        --requests "$requests" --seconds 3 --rates "$rates" --plot "$out/serve-$name.html"
    step 45 "rollout-$name" "$QURL" bench rollout "${both[@]}" --batch $places --rounds 1
}
# A full batch makes about 15000 (bf16) and 23000 (int8) tokens a second at 7B, 3600 and 5900 at 32B.
! wanted 7b || served 130 7b qwen2.5-7b 256 192 8,16,32,48,64,96,inf,inf,inf
! wanted 32b || served 160 32b qwen2.5-32b 128 128 4,8,16,24,48,inf,inf,inf
grep -h saturated "$out"/serve-*.txt
finish
