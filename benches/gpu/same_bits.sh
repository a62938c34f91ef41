#!/usr/bin/env bash
# The default recipe three times: as it is, again, and killed after its first checkpoint and resumed. All must
# end with the same model, byte for byte, and have the same metrics but for the seconds. Then with rollouts in
# the trainer's own bf16: the log-probability of every sampled token must have the trainer's bits, so that rho
# is 1.
#
#   benches/gpu/same_bits.sh QURL DEVICE FOLDER
set -eu
qurl=${1:?usage: same_bits.sh QURL DEVICE FOLDER} device=$2 folder=$3
train=("$qurl" train --device "$device" --steps 10 --set trainer.save_freq=2 --quiet --run)
mkdir -p "$folder"
"${train[@]}" "$folder/once"
"${train[@]}" "$folder/again"
"${train[@]}" "$folder/resumed" &
run=$!
while kill -0 $run && [ ! -d "$folder/resumed/checkpoints/step-2" ]; do sleep 0.05; done
kill -9 $run || true
wait $run || true
echo "killed after $(wc -l < "$folder/resumed/metrics.jsonl") of 10 steps"
"$qurl" train --device "$device" --run "$folder/resumed" --resume --quiet

metrics() { sed 's/"timing":{[^}]*}//' "$folder/$1/metrics.jsonl"; }
(cd "$folder" && sha256sum {once,again,resumed}/model/model.safetensors)
for other in again resumed; do
    cmp "$folder/once/model/model.safetensors" "$folder/$other/model/model.safetensors"
    cmp <(metrics once) <(metrics "$other")
done
echo "the same bits three times"

"${train[@]}" "$folder/bf16" --set rollout.format=bf16
apart=$(grep -vc '"kl":0.0,.*"rho_max":1.0,"rho_min":1.0,' "$folder/bf16/metrics.jsonl" || true)
echo "rollouts in bf16: rho is not exactly 1 in $apart of 10 steps"
[ "$apart" -eq 0 ]
