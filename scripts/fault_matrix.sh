#!/usr/bin/env bash
# Faults on one of four ranks: by communicator and phase what the others do. Its table, and the reason of every bad cell.
#
#   scripts/fault_matrix.sh [--only PATTERN] [--communicators threads gloo mpi] [--out FILE]
cd "$(dirname "$0")/.."
. scripts/environment.sh

environment "${VENV:-.venv}" dev
MPIEXEC=$(dirname "$(command -v python)")/mpiexec OMP_NUM_THREADS=1 python scripts/fault_matrix.py "$@"
