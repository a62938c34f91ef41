#!/usr/bin/env bash
# Ranks on GPUs: every exchange over NCCL against its expected content, with 2 and 4 ranks on one GPU (each
# process has its own NCCL_HOSTID, without which NCCL refuses two ranks on a GPU), started by mpirun, where
# MPI gives the rendezvous, and by torchrun, where its variables do. Then one rank is killed.
#
#   benches/gpu/ranks.sh OUT
#
# leaves its raw output in OUT. Where there is no cargo, RANK_TESTS names the test binary built elsewhere
# (`cargo test --no-run -p qurl-kernels --test ranks`); QURL_NCCL may name libnccl.so.2.
set -u
out=${1:?usage: benches/gpu/ranks.sh OUT}
mkdir -p "$out"
here=$(cd "$(dirname "$0")/../.." && pwd)
if [ -z "${RANK_TESTS:-}" ]; then
    RANK_TESTS=$(cd "$here" && cargo test --no-run -p qurl-kernels --test ranks 2>&1 \
        | sed -n 's/.*Executable.*(\(.*\))/\1/p' | tail -1)
fi
export RANK_TESTS NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# The rank itself: its own host id, so that NCCL does not see two ranks on one GPU of one machine.
rank='NCCL_HOSTID=rank-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${RANK:-0}}} exec "$RANK_TESTS" \
    --exact "$RANK_TEST" --ignored --nocapture --test-threads 1'

failed=0
check() { # name, ranks, command...: all ranks must say that it is as it should be
    local name=$1 ranks=$2
    shift 2
    echo "== $name: $*"
    local began=$SECONDS
    timeout 200 "$@" > "$out/$name.txt" 2>&1
    local status=$? good
    good=$(grep -c 'as it should be' "$out/$name.txt")
    grep -h 'as it should be' "$out/$name.txt" | sed 's/.*as it should be/   as it should be/'
    echo "   status $status, $good of $ranks ranks, after $((SECONDS - began)) s"
    [ $status -eq 0 ] && [ "$good" -eq "$ranks" ] || { failed=1; tail -20 "$out/$name.txt"; }
}

export RANK_TEST=nccl::as_a_gpu
for ranks in 2 4; do
    if command -v mpirun > /dev/null; then
        check "mpirun-$ranks" $ranks mpirun -n $ranks bash -c "$rank"
    else
        echo "== no mpirun"
        failed=1
    fi
    if command -v torchrun > /dev/null; then
        check "torchrun-$ranks" $ranks torchrun --no-python --nproc-per-node $ranks bash -c "$rank"
    else
        echo "== no torchrun"
        failed=1
    fi
done

# Rank 1 of 3 is killed while the others wait for it inside of NCCL: they must end and name it.
export RANK_TEST=nccl::as_a_gpu_that_waits
echo "== killed: mpirun -n 3"
began=$SECONDS
timeout 100 mpirun -n 3 bash -c "$rank" > "$out/killed.txt" 2>&1
status=$?
grep 'is lost' "$out/killed.txt" | head -3
echo "   status $status after $((SECONDS - began)) s"
if ! grep -q 'rank 1 of 3 is lost: its process has ended' "$out/killed.txt" \
    || [ $status -eq 0 ] || [ $status -eq 124 ]; then
    failed=1
    tail -20 "$out/killed.txt"
fi
exit $failed
