#!/usr/bin/env bash
# Steps of several ranks on one GPU, each with its own NCCL_HOSTID: weights that come out, bytes that each
# rank has sent beside the cost model, its memory beside its plan; and what shards cost one rank. In under six
# minutes, or a part of it:
#
#   benches/gpu/ranks_step.sh OUT [default] [half] [wide] [shards]
#
# default, half: a GRPO step of the default shape and of 0.5B on 1, 2 and 4 ranks, ZeRO-1 and ZeRO-3, by
# mpirun and torchrun; wide: the 7B model of recipes/aime-dapo.toml cut to 2 layers of full width on 4 ranks;
# shards: a step of 1.5B with 1 and 8 shards of the same micro-batches, alternating. Several ranks on a GPU
# are time-sliced: their times say nothing. Leaves its raw output in OUT; QURL names the binary, and
# DEVICE=cpu tries the parts that mpirun starts without a GPU.
set -u
out=${1:?usage: benches/gpu/ranks_step.sh OUT [default] [half] [wide] [shards]}
shift
parts=" ${*:-default half wide shards} "
mkdir -p "$out"
device=${DEVICE:-cuda}
here=$(cd "$(dirname "$0")/../.." && pwd)
QURL=${QURL:-$here/target/release/qurl}
export QURL NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# A rank with a host id of its own, so that NCCL does not see two ranks on one GPU of one machine.
rank='export NCCL_HOSTID=rank-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${RANK:-0}}}; exec "$QURL" "$@"'

failed=0
step() { # seconds, name, launcher (none, mpirun, torchrun), ranks, arguments...
    local seconds=$1 name=$2 launcher=$3 ranks=$4
    shift 4
    local began=$SECONDS
    case $launcher in
        none) set -- "$QURL" bench step --device $device --json "$@" ;;
        mpirun) set -- mpirun -n "$ranks" bash -c "$rank" qurl bench step --device $device --json "$@" ;;
        torchrun)
            set -- torchrun --no-python --nproc-per-node "$ranks" bash -c "$rank" qurl bench step \
                --device $device --json "$@"
            ;;
    esac
    timeout "$seconds" "$@" > "$out/$name.json" 2> "$out/$name.log"
    local status=$?
    echo "== $name: status $status after $((SECONDS - began)) s"
    [ $status -eq 0 ] || { failed=1; tail -5 "$out/$name.log"; }
}
same() { # names: one checksum of weights, bytes by the model
    python3 - "$out" "$@" <<'PY' || failed=1
import json, sys
out, names = sys.argv[1], sys.argv[2:]
sums, bad = set(), False
for name in names:
    lines = [line for line in open(f"{out}/{name}.json") if line.startswith("{")]
    if not lines:
        print(f"{name}: nothing came out")
        bad = True
        continue
    shared = json.loads(lines[-1])["results"][0]["ranks"]
    sums.add(shared["checksum"])
    print(f"{name}: weights {shared['checksum']}")
    for rank, of in enumerate(shared["ranks"]):
        exact = (of["gradients"], of["weights"]) == (of["gradients_by_model"], of["weights_by_model"])
        bad |= not exact
        print(f"  rank {rank}: gradients {of['gradients']} (model {of['gradients_by_model']}), weights"
              f" {of['weights']} (model {of['weights_by_model']}), host {of['host']},"
              f" {of['peak_bytes'] >> 20} MiB of {of['planned_bytes'] >> 20} planned"
              f"{'' if exact else ' DIFFERENT'}")
if len(sums) != 1:
    print("the weights differ:", sorted(sums))
    bad = True
sys.exit(bad)
PY
}

part() { # name: whether it is wanted
    case $parts in *" $1 "*) return 0 ;; esac
    return 1
}

small="--shape default --prompts 16 --n 4 --length 64 --prompt 16 --mini-batches 2 --steps 1 --max-num-seqs 64
    --micro-tokens 1024 --set trainer.shards=4"
if part default; then
    step 30 default-1 none 1 $small
    step 40 default-2 mpirun 2 $small
    step 40 default-4 torchrun 4 $small
    step 40 default-2-divided torchrun 2 $small --set trainer.zero_stage=3
    step 40 default-4-divided mpirun 4 $small --set trainer.zero_stage=3
    same default-1 default-2 default-4 default-2-divided default-4-divided
fi

half="--shape qwen2.5-0.5b --prompts 8 --n 4 --length 32 --prompt 32 --mini-batches 1 --steps 1
    --max-num-seqs 32 --micro-tokens 1024 --kv-cache-mb 256 --set trainer.shards=4"
if part half; then
    step 40 half-1 none 1 $half
    step 60 half-2 mpirun 2 $half
    step 60 half-2-divided mpirun 2 $half --set trainer.zero_stage=3
    step 60 half-4-divided torchrun 4 $half --set trainer.zero_stage=3
    same half-1 half-2 half-2-divided half-4-divided
fi

wide="--shape qwen2.5-7b --layers 2 --prompts 8 --n 4 --length 32 --prompt 32 --mini-batches 1 --steps 1
    --max-num-seqs 32 --micro-tokens 1024 --recompute --kv-cache-mb 256 --set trainer.shards=4"
if part wide; then
    step 120 wide-4-divided mpirun 4 $wide --set trainer.zero_stage=3
    same wide-4-divided
fi

# 256 sequences of 384 tokens in one update: a shard of eight is one micro-batch, so both compute the same
# micro-batches, and what differs is the tree of sums.
deep="--shape qwen2.5-1.5b --prompts 64 --n 4 --length 256 --prompt 128 --mini-batches 1 --steps 3
    --max-num-seqs 256 --micro-tokens 12288"
if part shards; then
    for round in 1 2; do
        for shards in 1 8; do
            step 60 shards-$shards-$round none 1 $deep --set trainer.shards=$shards
        done
    done
    python3 - "$out" <<'PY' || failed=1
import json, sys
seconds = {}
for shards in (1, 8):
    for round in (1, 2):
        lines = [line for line in open(f"{sys.argv[1]}/shards-{shards}-{round}.json") if line.startswith("{")]
        if not lines:
            sys.exit("nothing came out")
        row = json.loads(lines[-1])["results"][0]
        update = row["phases"]["update"]["seconds"]
        seconds.setdefault(shards, []).append((row["seconds"], update))
        print(f"{shards} shards: step {row['seconds']:.3f} s, update {update:.3f} s,"
              f" {row['ranks']['ranks'][0]['peak_bytes'] >> 20} MiB")
best = {shards: [min(of) for of in zip(*rows)] for shards, rows in seconds.items()}
step, update = (best[8][i] / best[1][i] - 1 for i in (0, 1))
print(f"eight shards cost {100 * step:.2f}% of a step, {100 * update:.2f}% of an update")
sys.exit(step > 0.03)
PY
fi
exit $failed
