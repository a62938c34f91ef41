#!/usr/bin/env bash
# Ranks on GPUs: every exchange over NCCL against its expected content, with 2 and 4 ranks on one GPU, started
# by mpirun, where MPI gives the rendezvous, and by torchrun, where its variables do. Then one rank is killed.
#
#   benches/gpu/ranks.sh OUT
#
# Without cargo RANK_TESTS names the test binary (`cargo test --no-run -p qurl-kernels --test ranks`);
# QURL_NCCL may name libnccl.so.2. DEVICE=cpu tries the script: ranks that find no GPU say so and end.
out=${1:?usage: benches/gpu/ranks.sh OUT}
. "$(dirname "$0")/common.sh"
test_binary RANK_TESTS qurl-kernels ranks || finish
begin

exchange() { # name, launcher, ranks: all ranks must say that it is as it should be
    local name=$1 count=$3
    ranks "$2" "$count"
    step 100 "$name" "${launch[@]}" "$RANK_TESTS" --exact nccl::as_a_gpu --ignored --nocapture \
        --test-threads 1
    local good
    good=$(cat "$out/$name.txt" "$out/$name.log" 2> /dev/null | grep -c 'as it should be')
    echo "   $good of $count ranks are as they should be"
    check "$name-content" [ "$good" -eq "$count" ]
}
for count in 2 4; do
    exchange "mpirun-$count" mpirun $count
    exchange "torchrun-$count" torchrun $count
done

# Rank 1 of 3 is killed while the others wait for it inside of NCCL: they must end and name it.
ranks mpirun 3
# shellcheck disable=SC2016
step 100 killed bash -c '"$@"; status=$?; [ $status -ne 0 ] && [ $status -ne 124 ]' _ \
    "${launch[@]}" "$RANK_TESTS" --exact nccl::as_a_gpu_that_waits --ignored --nocapture --test-threads 1
# NCCL may notice first: then the ranks that it told name themselves.
check killed-named grep -Eq 'rank 1 of 3 is lost: its process has ended|rank . of 3 failed: NCCL' \
    "$out/killed.txt" "$out/killed.log"
finish
