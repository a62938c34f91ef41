#!/usr/bin/env bash
# Runs a command on a GPU that is emulated (README.md):
#
#   benches/gpu/emulate/run.sh cargo test -p qurl-kernels --test kernels cuda::gemms
#
# The emulator is built with g++ into target/emulate, where compiled kernels are kept, too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${EMULATE_TO:-$(cd "$here/../../.." && pwd)/target/emulate}
mkdir -p "$to"
(
    # One of several builds it.
    flock 9
    key=$(cat "$here"/*.cpp "$here"/*.h | sha256sum)
    [ -f "$to/libemulate.so" ] && [ "$(cat "$to/key" 2> /dev/null)" = "$key" ] && exit
    g++ -O2 -g -march=native -std=c++20 -Wall -fPIC -shared -fno-strict-aliasing "$here"/*.cpp \
        -o "$to/libemulate.so" -ldl -lpthread
    cp "$here"/{kernel.h,runtime.h,compiler.cpp} "$to"
    echo "$key" > "$to/key"
) 9> "$to/lock"
export QURL_CUDA=$to/libemulate.so QURL_NVRTC=$to/libemulate.so
# Another one, such as /dev/null, is a machine that has none.
export QURL_CUBLASLT=${QURL_CUBLASLT-$to/libemulate.so}
export XDG_CACHE_HOME=$to/cache
exec "$@"
