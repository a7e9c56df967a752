#!/usr/bin/env bash
# Tests beside the releases of Megatron-Core that need Python 3.12, one after the other. PYTHON names that interpreter;
# default python3.12. A test that is skipped says why: 0.17 has no HybridModel.
#
#   scripts/megatron.sh [DIRECTORY [ARGUMENT...]]     the environment, default .venv-megatron; arguments of pytest
cd "$(dirname "$0")/.."
. scripts/environment.sh
PYTHON=${PYTHON:-python3.12}

# Not under constraints.txt, whose CUDA packages are not those of a torch that is built for CUDA.
install_megatron() {
    python -m pip install --quiet --no-compile torch==2.13.0 megatron-core==0.19.2 megatron-fsdp==0.6.1 triton numpy psutil \
        hypothesis pytest pytest-timeout scikit-build-core cmake ninja &&
        python -m pip install --quiet --no-compile --no-build-isolation --editable .
}

environment_of "Megatron-Core" "${1:-.venv-megatron}" install_megatron
for release in 0.17.1 0.18.2 0.19.2; do
    stage "Megatron-Core $release" python -m pip install --quiet --no-compile --no-deps megatron-core==$release
    stage "tests beside Megatron-Core $release" python -m pytest -q -m integration \
        tests/integration/test_megatron.py tests/integration/test_megatron_functions.py "${@:2}"
done
