#!/usr/bin/env bash
# Some of the scripts beside it under one limit of time, on a machine that is there for minutes only:
#
#   LIMIT=540 benches/gpu/session.sh OUT ranks_step:default,half=170 serve:7b=130 sanitize=180+same_bits=120
#
# A part is a script without `.sh`, its arguments after a colon, and the seconds that it may take. Parts
# joined by + run side by side: such as measure nothing. Each part's raw output is packed into OUT/PART.tar.gz
# as soon as it ends, and gets a line in OUT/summary.txt, so what is there when the time is over is whole; the
# lines are printed again at the end. At most seven parts: eight files are few enough to carry home. A part
# that no longer fits into LIMIT seconds (540) gets what is left, but not less than 20.
#
# BINARIES names an archive of `pack.sh` (target/gpu/binaries.tar.gz) with what to run, where QURL names
# nothing.
usage="usage: benches/gpu/session.sh OUT SCRIPT[:ARGUMENT,...]=SECONDS[+...] ..."
results=${1:?$usage}
shift
here=$(cd "$(dirname "$0")" && pwd)
count=0
for part in ${*//+/ }; do
    count=$((count + 1))
    if ! [[ $part =~ ^[a-z0-9_]+(:[A-Za-z0-9_,.-]+)?=[0-9]+$ && -f $here/${part%%[:=]*}.sh ]]; then
        echo "$part is no part; $usage" >&2
        exit 2
    fi
done
[ $count -ge 1 ] && [ $count -le 7 ] || { echo "$count parts, expected 1 to 7; $usage" >&2; exit 2; }
mkdir -p "$results"
results=$(cd "$results" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
archive=${BINARIES:-$here/../../target/gpu/binaries.tar.gz}
if [ -z "${QURL:-}" ] && [ -f "$archive" ]; then
    mkdir "$work/bin"
    tar -C "$work/bin" -xzf "$archive" || { echo "$archive cannot be unpacked" >&2; exit 1; }
    export QURL=$work/bin/qurl KERNEL_TESTS=$work/bin/kernels RANK_TESTS=$work/bin/ranks \
        PARITY_TESTS=$work/bin/rollout GOLDEN_TESTS=$work/bin/model
fi

# Which machine it is, and its kernels compiled, before anything is timed.
LIMIT=${LIMIT:-540} out=$work/machine
. "$here/common.sh"
summary=$results/summary.txt
(exec "$QURL" --version) > /dev/null || { echo "QURL=$QURL does not run on this machine" >&2; exit 1; }
begin > "$work/begin.txt" || fail kernels
cat "$out/machine.txt" "$work/begin.txt" | tee "$summary"
line() { # part, seconds, status, more
    printf '%-36s %7s %6s  %s\n' "$@" >> "$summary"
}
line part seconds status ""

part() { # one: its script, within its seconds; then its archive and its line
    local script=${1%%[:=]*} seconds=${1##*=} name=${1%=*} arguments=() left began=$SECONDS status=0
    [[ $name != *:* ]] || IFS=, read -ra arguments <<< "${name#*:}"
    name=${name//[:,]/-}
    left=$((deadline - SECONDS))
    if [ $left -lt 20 ]; then
        line "$name" 0 - "left out, no time"
        return 1
    fi
    [ "$seconds" -lt $left ] || seconds=$left
    echo "#### $name, for $seconds s"
    mkdir -p "$work/$name"
    # The script heeds its limit and names what it left out; one that does not is ended. What this one is told
    # to stop for, it packs first.
    trap 'kill $! 2> /dev/null' TERM
    LIMIT=$((seconds - 8)) timeout -k 12 "$seconds" bash "$here/$script.sh" "$work/$name" "${arguments[@]}" \
        > "$work/$name/output.txt" 2>&1 &
    wait $! || status=$?
    wait
    tar -C "$work" -czf "$results/$name.tar.gz" "$name"
    line "$name" $((SECONDS - began)) $status "$(grep '^FAILED: ' "$work/$name/output.txt" | tail -n 1)"
    { echo "#### $name"; cat "$work/$name/output.txt"; } > "$work/$name.txt"
    cat "$work/$name.txt"
    rm -rf "${work:?}/$name"
    return $status
}

for group; do
    running=()
    for one in ${group//+/ }; do
        part "$one" &
        running+=($!)
    done
    for process in "${running[@]}"; do
        wait "$process" || fail part
    done
done
echo
echo "#### after $SECONDS of $LIMIT s"
cat "$summary"
[ ${#failed[@]} -eq 0 ]
