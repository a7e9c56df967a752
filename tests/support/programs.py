"""Starting the repository's programs as a user does: alone, by mpiexec, by torchrun."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import zerocast


def mpiexec() -> str:
    """The launcher of the MPI that this Python uses; a skip with its reason where there is none."""
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("needs mpiexec; pip install mpich brings it")
    return found


def on_mpi_ranks(ranks: int, *program: object) -> list[object]:
    """The command that starts a Python program under mpiexec."""
    return [mpiexec(), "-n", ranks, sys.executable, *program]


def on_torchrun_ranks(ranks: int, *program: object) -> list[object]:
    """The command that starts a Python program under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", ranks, *program]


def output_of(command: Sequence[object], *, code: int = 0, timeout: int = 240) -> str:
    """What it printed, once it has ended with this exit code."""
    done = run(command, timeout=timeout)
    assert done.returncode == code, done.stderr
    return done.stdout


def run(command: Sequence[object], *, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Run it with the zerocast that this session tests, one thread a process, from nowhere near
    the repository.
    """
    launched = {"PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_"}  # of a session that mpiexec started
    environment = {k: v for k, v in os.environ.items() if not any(map(k.startswith, launched))}
    environment |= {"PYTHONPATH": str(Path(zerocast.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment,
        cwd="/", timeout=timeout, check=False,
    )  # fmt: skip
