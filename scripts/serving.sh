#!/usr/bin/env bash
# Tests beside programs that read what is exported: vLLM, as it is built for CPUs, and llama.cpp's package gguf. vLLM's
# pins are not those of constraints.txt, so it has an environment of its own. A test that is skipped is a failure here.
#
#   scripts/serving.sh [DIRECTORY [ARGUMENT...]]     the environment, default .venv-serving; arguments of pytest
cd "$(dirname "$0")/.."
. scripts/environment.sh
. scripts/readers.sh

environment_of "readers" "${1:-.venv-serving}" install_readers
stage "tests beside readers" without_skips tests/integration/test_vllm.py \
    tests/integration/test_vllm_online.py tests/integration/test_vllm_refit.py tests/export/test_gguf.py \
    "tests/lab/conformance/test_conformance.py::test_every_difference_of_a_package_has_its_causes[vllm]" "${@:2}"
