#!/usr/bin/env bash
# Our speed on this machine's CPU beside llama.cpp's and TRL's, with everything a reader needs to judge it.
#
#   benches/peers/cpu.sh QURL PYTHON DIR OUT [options of compare_cpu.py]
#   benches/peers/cpu.sh target/release/qurl venv/bin/python /tmp/peers benches/runs/DATE-MACHINE/peers
#   benches/peers/cpu.sh prepare PYTHON DIR     llama.cpp's model files and contexts, on a machine still busy
#
# PYTHON has llama-cpp-python, gguf, torch, transformers, trl and datasets. DIR keeps 3 GB of llama.cpp's
# files from one call to the next. OUT gets `cpu.txt`, what is printed, and `cpu.jsonl`, all that runs said.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

prepare() {
    for weights in bf16 f16 q8_0; do
        caches=(f16)
        [ "$weights" = q8_0 ] && caches=(f16 q8_0)
        "$1" "$here/decode_llama_cpp.py" --dir "$2" --weights "$weights" --cache "${caches[@]}" \
            --flash on off --context 8192 --batch 8 --new 1
    done
}

if [ "${1-}" = prepare ] && [ $# -eq 3 ]; then
    prepare "$2" "$3"
    exit
fi
if [ $# -lt 4 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
qurl=$1 python=$2 dir=$3 out=$4
shift 4
mkdir -p "$out"
{
    date -u '+%Y-%m-%d %H:%M UTC'
    echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
    lscpu | grep -E '^(Model name|CPU\(s\)|L[123]d? cache)'
    commit=$(git -C "$here" rev-parse --short HEAD)
    echo "project at $commit; $("$qurl" --version | head -n 2 | paste -sd ' ')"
    "$python" - <<'PYTHON'
import importlib.metadata as metadata
names = ("llama-cpp-python", "gguf", "torch", "transformers", "trl", "accelerate")
print(", ".join(f"{name} {metadata.version(name)}" for name in names))
import llama_cpp
print("llama.cpp:", llama_cpp.llama_print_system_info().decode().strip(" |\n"))
PYTHON
    "$python" "$here/compare_cpu.py" --qurl "$qurl" --python "$python" --dir "$dir" \
        --log "$out/cpu.jsonl" "$@"
    echo
    echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)"
} | tee "$out/cpu.txt"
