#!/usr/bin/env bash
# A long run under watch: memory, descriptors, threads and disk of one process, sampled sixty times.
#
#   benches/soak.sh train SECONDS OUT [ARGUMENTS] the default recipe, steps without end, ended by Ctrl-C
#   benches/soak.sh serve SECONDS OUT [ARGUMENTS] the server of a tiny model and its callers (soak_callers.py)
#
# QURL names the binary. OUT gets train.csv or serve.csv (the samples), a log of what the program said and
# train.txt or serve.txt, with the means of the second and of the last quarter of the time: whatever grows
# shows there.
set -euo pipefail
usage="usage: benches/soak.sh train|serve SECONDS OUT [ARGUMENTS]"
what=${1:?$usage} seconds=${2:?$usage} out=${3:?$usage}
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
qurl=${QURL:-$here/target/release/qurl}
every=$(((seconds + 59) / 60))
mkdir -p "$out"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

sample() { # pid, second: a line of the samples
    local rss threads descriptors
    rss=$(awk '/^VmRSS/ { print $2 }' "/proc/$1/status")
    threads=$(awk '/^Threads/ { print $2 }' "/proc/$1/status")
    descriptors=$(find "/proc/$1/fd" -mindepth 1 | wc -l)
    echo "$2,$(finished),$rss,$descriptors,$threads,$(du -sk "$folder" | cut -f1)"
}
watch() { # pid, file: samples until the time is over or the process has ended
    local began=$SECONDS
    echo "second,finished,rss_kib,descriptors,threads,disk_kib" > "$2"
    while [ $((SECONDS - began)) -lt "$seconds" ] && kill -0 "$1" 2> /dev/null; do
        sleep "$every"
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
            printf "%s: %d samples in %d s, %d finished\n", file, rows, cell[rows, 1], cell[rows, 2]
            for (i = 3; i <= columns; i++)
                printf "  %-12s second quarter %10.1f   last quarter %10.1f\n", name[i],
                    mean(i, int(rows / 4) + 1, int(rows / 2)), mean(i, int(rows * 3 / 4) + 1, rows)
        }' "$1"
}
finish() { # pid, arguments: asks it to end and says how it did
    local pid=$1 status=0
    shift
    kill -INT "$pid" 2> /dev/null || true
    wait "$pid" || status=$?
    echo "$("$qurl" --version | head -1) $what $*: status $status" > "$out/$what.txt"
    summary "$out/$what.csv" >> "$out/$what.txt"
    cat "$out/$what.txt"
}

case $what in
train)
    finished() { wc -l 2> /dev/null < "$folder/run/metrics.jsonl" || echo 0; }
    "$qurl" train --steps 1000000 --run "$folder/run" "$@" > "$out/train.log" 2>&1 &
    process=$!
    watch "$process" "$out/train.csv"
    finish "$process" "$@"
    ;;
serve)
    finished() { cat "$folder/answered" 2> /dev/null || echo 0; }
    "$qurl" train "$here/recipes/tiny-grpo.toml" --steps 1 --set sft.steps=40 --set run.test_problems=8 \
        --quiet --device cpu --run "$folder/model" > "$out/serve.log" 2>&1
    "$qurl" serve --model "$folder/model/model" --served-model-name tiny --port 0 --json "$@" \
        > "$folder/address" 2>> "$out/serve.log" &
    process=$!
    for _ in $(seq 600); do [ -s "$folder/address" ] && break || sleep 0.1; done
    url=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$folder/address")
    model=$folder/model/model
    python3 "$here/benches/soak_callers.py" "$url" "$model" "$folder/answered" > "$out/callers.txt" &
    callers=$!
    watch "$process" "$out/serve.csv"
    kill -INT "$callers"
    wait "$callers" || true
    finish "$process" "$@"
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
