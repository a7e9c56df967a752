#!/usr/bin/env bash
# Tests beside other packages, as they are: the extra [integration] in an environment, and the tests of that marker.
#
#   scripts/integration.sh [DIRECTORY [ARGUMENT...]]     the environment, default .venv; arguments of pytest
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment "${1:-.venv}" integration
stage "tests beside other packages" python -m pytest -q -m integration "${@:2}"
