#!/usr/bin/env bash
# A long run under watch: memory, descriptors, threads and disk of one process, sampled every ten seconds.
#
#   benches/soak.sh train SECONDS OUT [ARGUMENTS]    the default recipe, steps without end, ended by Ctrl-C
#
# QURL names the binary. OUT gets train.csv (the samples), train.log (what the program said) and summary.txt,
# with the means of the second and of the last quarter of the time: whatever grows shows there.
set -euo pipefail
usage="usage: benches/soak.sh train SECONDS OUT [ARGUMENTS]"
what=${1:?$usage} seconds=${2:?$usage} out=${3:?$usage}
shift 3
qurl=${QURL:-target/release/qurl}
mkdir -p "$out"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

sample() { # pid, second: a line of the samples
    local rss threads
    rss=$(awk '/^VmRSS/ { print $2 }' "/proc/$1/status")
    threads=$(awk '/^Threads/ { print $2 }' "/proc/$1/status")
    echo "$2,$(steps),$rss,$(find "/proc/$1/fd" -mindepth 1 | wc -l),$threads,$(du -sk "$folder" | cut -f1)"
}
watch() { # pid, file: samples until the time is over or the process has ended
    local began=$SECONDS
    echo "second,steps,rss_kib,descriptors,threads,disk_kib" > "$2"
    while [ $((SECONDS - began)) -lt "$seconds" ] && kill -0 "$1" 2> /dev/null; do
        sleep 10
        sample "$1" $((SECONDS - began)) >> "$2" || true
    done
}
summary() { # file: means of its second and its last quarter
    awk -F, -v file="$(basename "$1")" '
        NR > 1 { for (i = 1; i <= NF; i++) cell[NR - 1, i] = $i; rows = NR - 1; columns = NF }
        NR == 1 { for (i = 1; i <= NF; i++) name[i] = $i }
        function mean(column, from, to,   r, sum, n) {
            for (r = from; r <= to; r++) { sum += cell[r, column]; n++ }
            return n ? sum / n : 0
        }
        END {
            printf "%s: %d samples in %d s, %d done\n", file, rows, cell[rows, 1], cell[rows, 2]
            for (i = 3; i <= columns; i++)
                printf "  %-12s second quarter %10.1f   last quarter %10.1f\n", name[i],
                    mean(i, int(rows / 4) + 1, int(rows / 2)), mean(i, int(rows * 3 / 4) + 1, rows)
        }' "$1"
}

case $what in
train)
    steps() { wc -l 2> /dev/null < "$folder/run/metrics.jsonl" || echo 0; }
    "$qurl" train --steps 1000000 --run "$folder/run" "$@" > "$out/train.log" 2>&1 &
    process=$!
    watch "$process" "$out/train.csv"
    kill -INT "$process" 2> /dev/null || true
    status=0
    wait "$process" || status=$?
    { echo "$("$qurl" --version | head -1) train $*: status $status"; summary "$out/train.csv"; } | tee "$out/summary.txt"
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
