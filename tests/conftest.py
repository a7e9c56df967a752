"""What all tests share: one test body, stamped on every communicator.

A test that takes ``ranks`` runs once for each kind of communicator and each small world size::

    def test_ranks_agree(ranks):
        results = ranks.run(lambda comm: comm.all_gather_object(comm.rank))
        assert results == [list(range(ranks.size))] * ranks.size

``ranks.split(comm, color)`` makes sub-groups. A test that chooses its own world sizes takes
``comm_kind`` and calls ``tests.support.ranks.run_ranks(comm_kind, world_size, fn)``.

A plain session runs the kind "in_process"; "mpi" and "torch_distributed" (gloo) run in a session of
4 MPI ranks, in which every rank runs the same tests::

    mpiexec -n 4 python -m mpi4py -m pytest --with-mpi -x -m mpi
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import BUILDS
from tests.support.ranks import KINDS, MPI_RANKS, run_ranks, split_ranks
from zerocast.comm import Communicator

# The same examples on every rank and in every run; nothing remembered between runs.
hypothesis.settings.register_profile("zerocast", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("zerocast")


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of compiled kernels, which pytest-xdist's workers share. Refuse an MPI
    session of another size: its tests would be skipped, or run one rank each.
    """
    if BUILDS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="zerocast-emulation-")
        os.environ[BUILDS] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(BUILDS))
    if not config.getoption("with_mpi", False):
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != MPI_RANKS:
        raise pytest.UsageError(
            f"--with-mpi takes {MPI_RANKS} ranks, got {MPI.COMM_WORLD.size}: start it with mpiexec "
            f"-n {MPI_RANKS}, the mpiexec of the MPI library that mpi4py uses here."
        )
    torch.set_num_threads(1)


def _stamp(kind: str, *values: Any) -> Any:
    marks = pytest.mark.mpi(min_size=MPI_RANKS) if kind in ("mpi", "torch_distributed") else ()
    return pytest.param(
        (kind, *values) if values else kind, marks=marks, id="-".join(map(str, (kind, *values)))
    )


@dataclass(frozen=True)
class Ranks:
    """A kind of communicator and a world size."""

    kind: str
    size: int

    def run(self, fn: Callable[[Communicator], Any]) -> list[Any]:
        """``fn(comm)`` on every rank; the results in rank order."""
        results = run_ranks(self.kind, self.size, fn)
        assert len(results) == self.size
        return results

    def split(self, comm: Communicator, color: int) -> Communicator:
        """The sub-group of ``comm`` with the same ``color``; every rank calls it."""
        return split_ranks(comm, color)


@pytest.fixture(
    params=[_stamp("single_rank", 1)]
    + [
        _stamp(kind, size)
        for kind in KINDS
        for size in ((1, 2, 3, 4, 5) if kind == "in_process" else range(1, MPI_RANKS + 1))
    ]
)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Every kind of communicator on 1 to 4 ranks, threads on 5 too, and SingleRank."""
    return Ranks(*request.param)


@pytest.fixture(params=[_stamp(kind) for kind in KINDS])
def comm_kind(request: pytest.FixtureRequest) -> str:
    """Every kind of communicator, for ``run_ranks``."""
    return request.param


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests once on each backend; skipped where it cannot run, with the reason."""
    try:
        with zerocast.use_backend(request.param):
            yield
    except zerocast.BackendError as error:
        pytest.skip(str(error))
