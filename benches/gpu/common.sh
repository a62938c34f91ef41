# Sourced by the scripts beside it, which have set `out`, the folder for raw output.
#
# A script is a list of steps. Each has a time limit and writes what it says to a file of its name; none hides
# the ones after it, and `finish` names those that failed and ends with status 1. What all scripts heed:
#
#   QURL     the binary (target/release/qurl)
#   DEVICE   cuda; with cpu the script tries itself: small shapes, and what needs a GPU left out
#   SMALL    1: small shapes on a GPU, too (for an emulated one)
#   LIMIT    seconds of the whole script; steps that no longer fit are left out, and named as failed
# shellcheck shell=bash disable=SC2034,SC2154
set -u
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
device=${DEVICE:-cuda}
small=${SMALL:-}
[ "$device" = cuda ] || small=1
export QURL=${QURL:-$root/target/release/qurl}
deadline=$((SECONDS + ${LIMIT:-36000}))
failed=()
trap stop TERM INT

stop() { # ends what runs, and the script with it
    trap - TERM INT
    # shellcheck disable=SC2046
    kill $(jobs -p) 2> /dev/null
    wait
    echo "FAILED: ${failed[*]} stopped after $SECONDS s"
    exit 143
}

fail() { # name: is among those that failed
    failed+=("$1")
}

gpu() { # whether there is a GPU to ask
    [ "$device" = cuda ] && command -v nvidia-smi > /dev/null
}

step() { # seconds, name, command...: output in NAME.txt (or NAME, if that ends in .json), errors in NAME.log
    local seconds=$1 name=$2 left=$((deadline - SECONDS)) began=$SECONDS
    local to=$out/$2.txt log=$out/${2%.json}.log status=0 ending=
    [[ $name == *.json ]] && to=$out/$name
    shift 2
    if [ $left -lt 5 ]; then
        echo "== $name: left out, no time"
        fail "$name"
        return 1
    fi
    [ "$seconds" -lt $left ] || seconds=$left
    # A kernel that waits for ever goes with its process.
    timeout -k 10 "$seconds" "$@" > "$to" 2> "$log" <&0 &
    wait $! || status=$?
    [ $status -ne 124 ] || ending=", its limit"
    echo "== $name: status $status after $((SECONDS - began)) s$ending"
    [[ $name == *.json ]] || tail -n "${TAIL:-6}" "$to" | cut -c 1-300
    if [ $status -ne 0 ]; then
        fail "$name"
        tail -n 5 "$log" | cut -c 1-300
    fi
    [ -s "$log" ] || rm -f "$log"
    return $status
}

check() { # name, command...: of what steps have left
    local name=$1
    shift
    "$@" || { echo "   $name: NOT AS IT SHOULD BE"; fail "$name"; }
}

wanted() { # part: whether it is among `parts`
    [[ " $parts " == *" $1 "* ]]
}

known() { # parts...: that `parts` are among these
    local part
    for part in $parts; do
        [[ " $* " == *" $part "* ]] || { echo "no part is called $part, but: $*" >&2; exit 2; }
    done
}

test_binary() { # variable, package, test: what it names, or what cargo builds
    local -n names=$1
    [ -n "${names:-}" ] || names=$(cd "$root" && cargo test --no-run --locked -p "$2" --test "$3" 2>&1 \
        | sed -n 's/.*Executable.*(\(.*\))/\1/p' | tail -1)
    [ -x "$names" ] && return
    echo "== no test binary $3: $1 names none, and cargo built none"
    fail "$1"
    return 1
}

ran() { # name of a step of tests: some ran, and none was skipped for want of a GPU
    grep -q 'test result: ok. [1-9]' "$out/$1.txt" || return 1
    [ "$device" != cuda ] || ! grep -qs '^skipped' "$out/$1.log"
}

begin() { # what machine this is; and all kernels compiled, once, outside of the limits of other steps
    local version
    version=$("$QURL" --version) || { echo "QURL=$QURL does not run" >&2; exit 1; }
    {
        date -u
        echo "$version"
        ! gpu || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
        free -g | sed -n 2p
        df -h "$out" /dev/shm 2> /dev/null | tail -n +2
    } > "$out/machine.txt"
    [ -z "$small" ] || return 0
    TAIL=1 step "${COMPILE_LIMIT:-180}" compile "$QURL" bench rollout --device cuda --shape default \
        --formats int8 --batch 1 --prompt 16 --new 8 --rounds 1
}

# How ranks start on one GPU: each has a host id of its own, or NCCL takes two of them for a mistake. `ranks
# mpirun 2` puts into `launch` what stands before the command of each rank.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
# An exchange that stays away is named within the limit of its step; NCCL speaks into files of its own, since
# its standard output is the results'.
export QURL_RANK_TIMEOUT=${QURL_RANK_TIMEOUT:-40}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$out/nccl-%h-%p.log}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
# shellcheck disable=SC2016
own_host='export NCCL_HOSTID=rank-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${RANK:-0}}}; exec "$@"'
ranks() { # none, mpirun or torchrun; how many
    local rank=(bash -c "$own_host" rank)
    # On CPUs bytes travel by MPI, which torchrun does not start.
    [ "$device" = cuda ] || [ "$1" = none ] || set -- mpirun "$2"
    case $1 in
        none) launch=() ;;
        mpirun) launch=(mpirun --bind-to none -n "$2" "${rank[@]}") ;;
        torchrun)
            launch=(torchrun)
            command -v torchrun > /dev/null || launch=(python3 -m torch.distributed.run)
            launch+=(--no-python --nproc-per-node "$2" "${rank[@]}")
            ;;
    esac
}

finish() { # the last line of a script
    if [ ${#failed[@]} -eq 0 ]; then
        echo "all passed"
        exit 0
    fi
    echo "FAILED: ${failed[*]}"
    exit 1
}
