#!/usr/bin/env bash
# Runs a command on a GPU that is emulated (README.md):
#
#   benches/gpu/emulate/run.sh cargo test -p qurl-kernels --test kernels cuda::
#
# The emulator is built with g++ into target/emulate, where compiled kernels are kept, too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${EMULATE_TO:-$(cd "$here/../../.." && pwd)/target/emulate}
mkdir -p "$to"
for file in "$here"/*.cpp "$here"/*.h; do
    [ "$to/libemulate.so" -nt "$file" ] && continue
    g++ -O2 -g -march=native -std=c++20 -Wall -fPIC -shared -fno-strict-aliasing "$here"/*.cpp \
        -o "$to/libemulate.so.new" -ldl -lpthread
    cp "$here"/{kernel,runtime}.h "$to"
    mv "$to/libemulate.so.new" "$to/libemulate.so"
    break
done
export QURL_CUDA=$to/libemulate.so QURL_NVRTC=$to/libemulate.so QURL_CUBLASLT=/dev/null
export XDG_CACHE_HOME=$to/cache
exec "$@"
