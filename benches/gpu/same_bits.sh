#!/usr/bin/env bash
# The same bits again: default, the default recipe three times, as it is, again, and killed after its first
# checkpoint and resumed. All must end with the same model, byte for byte, and have the same metrics but for
# the seconds. Then with rollouts in the trainer's own bf16: the log-probability of every sampled token must
# have the trainer's bits, so that rho is 1. references: the runs of ../references.sh, twice, and beside the
# committed ones, if there are any for this kind of device; OUT/NAME.json is what would be committed. hashes:
# the final models of small recipes (../hashes.sh).
#
#   benches/gpu/same_bits.sh OUT [default] [references] [hashes]
#
# REFERENCE names the file of crates/qurl/tests/cli/references that the runs are compared with (h200).
out=${1:?usage: benches/gpu/same_bits.sh OUT [default] [references] [hashes]}
shift
parts=${*:-default references}
. "$(dirname "$0")/common.sh"
known default references hashes
begin

train() { # name, more...
    local name=$1
    shift
    TAIL=1 step "${RUN_LIMIT:-90}" "$name" "$QURL" train --device "$device" --quiet --run "$out/$name" "$@"
}
# shellcheck disable=SC2329
same() { # a run whose model and metrics must be those of `once`
    cmp "$out/once/model/model.safetensors" "$out/$1/model/model.safetensors" \
        && cmp <(metrics once) <(metrics "$1") && echo "   $1: the model and the metrics of the first"
}
# shellcheck disable=SC2329
metrics() { sed 's/"timing":{[^}]*}//' "$out/$1/metrics.jsonl"; }
# shellcheck disable=SC2329
killed() { # a run that is killed once it has a checkpoint
    local run=$out/resumed process
    "$QURL" train --device "$device" --quiet --run "$run" "$@" &
    process=$!
    while kill -0 "$process" && [ ! -d "$run/checkpoints/step-2" ]; do sleep 0.05; done
    kill -9 "$process"
    wait "$process"
    echo "killed after $(wc -l < "$run/metrics.jsonl") of 10 steps"
    [ -d "$run/checkpoints/step-2" ]
}

if wanted default; then
    rm -rf "$out"/{once,again,resumed,bf16}
    all=(--steps 10 --set trainer.save_freq=2)
    [ -z "$small" ] || all+=(--set sft.steps=60 --set run.test_problems=16)
    train once "${all[@]}"
    train again "${all[@]}"
    export out device
    export -f killed
    step 90 killed bash -c 'killed "$@"' _ "${all[@]}"
    train resumed --resume
    (cd "$out" && sha256sum {once,again,resumed}/model/model.safetensors | tee models.txt)
    check again same again
    check resumed same resumed
    train bf16 "${all[@]}" --set rollout.format=bf16
    apart=$(grep -vc '"kl":0.0,.*"rho_max":1.0,"rho_min":1.0,' "$out/bf16/metrics.jsonl")
    echo "   rollouts in bf16: rho is not exactly 1 in $apart of 10 steps"
    check bf16-rho [ "$apart" -eq 0 ]
    rm -rf "$out"/{once,again,resumed,bf16}
fi

if wanted references; then
    name=${REFERENCE:-h200}
    step 120 "$name.json" bash "$root/benches/references.sh" "$QURL" "$device" best
    step 120 again.json bash "$root/benches/references.sh" "$QURL" "$device" best
    check references-again cmp "$out/$name.json" "$out/again.json"
    committed=$root/crates/qurl/tests/cli/references/$name.json
    if [ -f "$committed" ]; then
        check references-committed diff "$committed" "$out/$name.json"
    else
        echo "   no references of $name are committed yet"
    fi
fi

if wanted hashes; then
    TAIL=4 step 150 hashes bash "$root/benches/hashes.sh" "$QURL" "$device" "$out/hashes"
    rm -rf "$out/hashes"
fi
finish
