#!/usr/bin/env bash
# Two and three hosts, which are namespaces of this machine: torchrun and mpiexec on them, every byte compared, and
# what ranks do when a link fails, loses packets or is cut. Half an hour on two busy cores.
#
#   scripts/hosts_check.sh [DIRECTORY [--only PATTERN ...]]     the environment, default .venv
#
# Needs Linux and root (CAP_SYS_ADMIN and CAP_NET_ADMIN), and the programs ip, unshare, mount, hostname and nft, of
# Debian's packages iproute2, util-linux, mount, hostname and nftables. Without them it says what is missing, and skips.
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment "${1:-.venv}" dev
OMP_NUM_THREADS=1 python scripts/hosts_check.py "${@:2}"
