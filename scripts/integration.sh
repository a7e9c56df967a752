#!/usr/bin/env bash
# Tests beside other packages, as they are: the extra [integration] in an environment, and the tests of its packages.
# A test that is skipped is a failure, but beside Megatron-Core, whose older releases have no HybridModel.
#
#   scripts/integration.sh [DIRECTORY [ARGUMENT...]]     the environment, default .venv; arguments of pytest
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment "${1:-.venv}" integration
stage "tests beside other packages" without_skips tests/integration/test_{accelerate,deepspeed,mlx,modelopt}.py \
    tests/export/test_{pretrained,wrappers}.py \
    "tests/lab/conformance/test_conformance.py::test_every_difference_of_a_package_has_its_causes"{"[torchao]","[nvidia-modelopt]"} "${@:2}"
stage "tests beside Megatron-Core" python -m pytest -q -m integration \
    tests/integration/test_{megatron,megatron_functions}.py "${@:2}"
