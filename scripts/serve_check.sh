#!/usr/bin/env bash
# A real vLLM, as it is built for CPUs, serves what zerocast exports and is refitted while a trainer trains: see
# scripts/serve_check.py. Minutes. It prints each dialect's mean difference of log probabilities, or vLLM's refusal.
#
#   scripts/serve_check.sh [DIRECTORY]     the environment, shared with scripts/serving.sh; default .venv-serving
cd "$(dirname "$0")/.."
. scripts/environment.sh
. scripts/readers.sh

environment_of "readers" "${1:-.venv-serving}" install_readers
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
stage "exports" python scripts/serve_check.py export "$folder"
timeout 7200 python -u scripts/serve_check.py serve "$folder"
timeout 3600 python -u scripts/serve_check.py live "$folder/live"
