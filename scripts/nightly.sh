#!/usr/bin/env bash
# Everything that scripts/test.sh checks, the site in a browser (where PATH has chromium), the slow tests on ranks,
# several hosts, the library for AArch64 under an emulator (which needs g++-aarch64-linux-gnu and qemu-user on PATH),
# and the tests beside other packages (transformers' Trainer, accelerate, peft, torchao, Megatron-Core, DeepSpeed, vLLM,
# torchtitan, verl), which it installs: pinned, then the newest.
# Hours on a small machine.
#
#   scripts/nightly.sh [DIRECTORY]     the environment; default .venv
cd "$(dirname "$0")/.."
scripts/test.sh "${1:-.venv}" || exit
. scripts/environment.sh

slow_tests_on_ranks() {
    OMP_NUM_THREADS=1 "$MPIEXEC" -n 4 python -m mpi4py -m pytest -q -x -p no:cacheprovider \
        --with-mpi -m "mpi and (slow or nightly)" "$@"
}

under_default() {
    OMP_WAIT_POLICY=passive python -m pytest -q -n auto --maxprocesses 8 --dist worksteal \
        -m "not mpi and not integration and not nightly" --torch-default "$1" \
        --ignore tests/test_wheel.py --ignore tests/examples --ignore tests/scripts tests
}

environment "${1:-.venv}" integration
MPIEXEC=$(dirname "$(command -v python)")/mpiexec
stage "tests of minutes" python -m pytest -q -n auto --maxprocesses 8 --dist worksteal -o timeout=1800 -m nightly
for default in bfloat16 float64 meta; do
    stage "tests under default $default" under_default "$default"
done
stage "slow tests on 4 MPI ranks" slow_tests_on_ranks
stage "AArch64 under an emulator" python scripts/arm_check.py
scripts/hosts_check.sh "${1:-.venv}"
scripts/integration.sh "${1:-.venv}"
scripts/serving.sh "${1:-.venv}-serving"
scripts/serve_check.sh "${1:-.venv}-serving"
scripts/torchtitan.sh "${1:-.venv}-torchtitan"
if command -v python3.12 >/dev/null; then
    scripts/megatron.sh "${1:-.venv}-megatron"
else
    echo "skipped: Megatron-Core 0.17 to 0.19 need python3.12"
fi
scripts/newest.sh
stage "adapters of peft" python -m pytest -q tests/nn/test_convert.py
printf 'all passed in %d s\n' "$SECONDS"
