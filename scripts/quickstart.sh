#!/usr/bin/env bash
# From nothing to a comparison: on a machine with Python 3.10 to 3.14 and a C++ compiler, make an environment, build
# zerocast, and train a small GPT on 4 MPI ranks with BF16, FP8 and NVFP4 weights. Ends with the table of the three and
# says whether the sharded weights equal the unsharded cast on every rank; fails where they do not.
#
#   scripts/quickstart.sh [DIRECTORY]     the environment; default .venv
cd "$(dirname "$0")/.."
. scripts/environment.sh

environment "${1:-.venv}" mpi,examples
# One thread a rank: four ranks on two cores have nothing to gain from more.
OMP_NUM_THREADS=1 mpiexec -n 4 python -m mpi4py examples/train_gpt.py --compare bf16,current,nvfp4 --check </dev/null
