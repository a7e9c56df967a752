#!/usr/bin/env bash
# Everything that CI checks, on a machine with Python 3.10 to 3.14 and a C++ compiler: environment, build, style, types,
# all tests, those on 4 MPI ranks, and the built wheel. Run again, it reuses the environment.
#
#   scripts/test.sh [DIRECTORY]     the environment; default .venv
cd "$(dirname "$0")/.."
. scripts/environment.sh

RANKS=4
# There may be fewer cores than ranks: MPICH's ranks that wait have to give theirs up, not to poll first.
export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
# What one process compiles is read by the others: there are hundreds, and pytest rewrites each file of tests.
unset PYTHONDONTWRITEBYTECODE

style() {
    PRE_COMMIT_HOME=$(python -c 'import sys; print(sys.prefix)')/pre-commit \
        pre-commit run --all-files --color never
}

# Run by mpi4py, so that a rank that fails ends the others, which wait for it in a collective. The
# launcher is that of mpi4py's MPI; another would start four jobs of one rank (tests/conftest.py
# refuses that). The slow ones are run by hand: CONTRIBUTING.md says how. Those of
# sharded models have a session of their own: what followed them in one was seen to run much slower.
SHARDED=(tests/sharded tests/tensor_parallel tests/adapters/torchtitan)
tests_on_ranks() {
    local temporary status=0
    temporary=$(mktemp -d)  # where no rank tidies what sessions before have left while another one does
    PYTEST_DEBUG_TEMPROOT=$temporary OMP_NUM_THREADS=1 "$MPIEXEC" -n "$RANKS" python -m mpi4py -m pytest -q -x \
        -p no:cacheprovider -o "tmp_path_retention_count=$RANKS" --with-mpi -m "mpi and not slow and not nightly" "$@" ||
        status=$?
    rm -rf "$temporary"
    return "$status"
}

# Three processes for two cores, because a third of the time is spent on waiting: for ranks, timeouts
# and programs. Threads that wait do so passively, for others need their core.
tests() {
    local cores
    cores=$(nproc)
    OMP_WAIT_POLICY=passive python -m pytest -q -n $((cores < 6 ? cores * 3 / 2 : 8)) --dist worksteal \
        --durations 15 -m "not mpi and not integration and not nightly" "$@"
}

environment "${1:-.venv}" dev
MPIEXEC=$(dirname "$(command -v python)")/mpiexec
stage "style and types" style
stage "documentation" mkdocs build --strict
stage "tests" tests --ignore tests/test_wheel.py tests
stage "tests on $RANKS MPI ranks" tests_on_ranks "${SHARDED[@]/#/--ignore=}" tests
stage "sharded models on $RANKS ranks" tests_on_ranks "${SHARDED[@]}"
stage "tests of the built wheel" python -m pytest -q -m "not nightly" tests/test_wheel.py
printf 'all passed in %d s\n' "$SECONDS"
