#!/usr/bin/env bash
# Tests beside torchtitan, as it is. Its default way of splitting tensors needs a later torch than constraints.txt has,
# so it has an environment of its own. A test that is skipped is a failure here.
#
#   scripts/torchtitan.sh [DIRECTORY [ARGUMENT...]]     the environment, default .venv-torchtitan; arguments of pytest
cd "$(dirname "$0")/.."
. scripts/environment.sh

# torchtitan imports triton also where no product runs by it; CPU builds of torch do not bring that.
install_torchtitan() {
    python -m pip install --quiet --no-compile torch==2.14.1 torchtitan==0.3.0 triton mpi4py mpich \
        hypothesis ml_dtypes pytest pytest-mpi pytest-timeout scikit-build-core cmake ninja &&
        python -m pip install --quiet --no-compile --no-build-isolation --editable .
}

environment_of "torchtitan" "${1:-.venv-torchtitan}" install_torchtitan
stage "adapter of torchtitan" python -m pytest -q -m "not mpi" tests/adapters/torchtitan \
    "tests/test_readme.py::test_the_python_of_a_page_runs[torchtitan.md]"
stage "adapter on 4 MPI ranks" env OMP_NUM_THREADS=1 mpiexec -n 4 python -m mpi4py -m pytest -q -x \
    -p no:cacheprovider --with-mpi -m mpi tests/adapters/torchtitan
stage "tests beside torchtitan" without_skips tests/integration/test_torchtitan.py "${@:2}"
