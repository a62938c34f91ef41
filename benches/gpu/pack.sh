#!/usr/bin/env bash
# Builds what the scripts run and packs it, stripped, into one archive that `session.sh` unpacks on a machine
# with no Rust: the release binary and four test binaries, some 25 MB.
#
#   benches/gpu/pack.sh [ARCHIVE]         # target/gpu/binaries.tar.gz
#
# QURL, KERNEL_TESTS, RANK_TESTS, PARITY_TESTS and GOLDEN_TESTS name binaries that are built already. The C
# library of the machine must not be older than the one here.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
archive=${1:-$root/target/gpu/binaries.tar.gz}
mkdir -p "$(dirname "$archive")"
to=$(mktemp -d)
trap 'rm -rf "$to"' EXIT
cd "$root"
built() { # package, test
    cargo test --no-run --locked -p "$1" --test "$2" 2>&1 | tee /dev/stderr \
        | sed -n 's/.*Executable.*(\(.*\))/\1/p' | tail -n 1
}
take() { # binary, name
    cp "$1" "$to/$2"
    strip "$to/$2"
}
if [ -z "${QURL:-}" ]; then
    cargo build --release --locked -p qurl
    QURL=${CARGO_TARGET_DIR:-target}/release/qurl
fi
take "$QURL" qurl
take "${KERNEL_TESTS:-$(built qurl-kernels kernels)}" kernels
take "${RANK_TESTS:-$(built qurl-kernels ranks)}" ranks
take "${PARITY_TESTS:-$(built qurl-rollout rollout)}" rollout
take "${GOLDEN_TESTS:-$(built qurl-model model)}" model
tar -C "$to" -c . | gzip -9 > "$archive"
ls -l "$to" "$archive"
