"""What all tests share: one test body, stamped on every communicator.

A test that takes ``ranks`` runs once for each kind of communicator and several small world sizes::

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
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import BUILDS
from tests.support import other_defaults
from tests.support.ranks import KINDS, MPI_RANKS, PROCESSES, run_ranks, split_ranks
from zerocast.comm import Communicator

# The same examples on every rank and in every run; nothing remembered between runs.
hypothesis.settings.register_profile("zerocast", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("zerocast")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the whole suite runs under another default dtype or device of torch."""
    parser.addoption("--torch-default", choices=other_defaults.CHOICES, help=other_defaults.__doc__)


ON_RANKS = re.compile(
    r'mark\.mpi|stamp\("mpi"|comm_kind|on_gloo|on_ranks\(\)|torch_distributed|\branks[:)]'
)
"""What a file with a test for an MPI session says somewhere."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In an MPI session, leave out the files that have no test for it: each of its ranks would
    import them.
    """
    if not config.getoption("with_mpi", False) or not collection_path.match("test_*.py"):
        return None
    return None if ON_RANKS.search(collection_path.read_text()) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that set or follow the default themselves, and let no test be one that an
    MPI session would not find.
    """
    for path in {item.path for item in items if item.get_closest_marker("mpi")}:
        assert ON_RANKS.search(path.read_text()), f"ON_RANKS in {__file__} does not find {path}"
    name = config.getoption("torch_default")
    if name is None:
        return
    marks = [item.get_closest_marker("own_defaults") for item in items]
    items[:] = [
        item
        for item, mark in zip(items, marks, strict=True)
        if mark is None or (mark.args and name not in mark.args)
    ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules have been imported, and what they made is of torch's own defaults."""
    if (name := session.config.getoption("torch_default")) is not None:
        other_defaults.set_default(name)


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


def stamp(kind: str, *values: Any) -> Any:
    """A parameter of the fixtures below: a kind, and a world size for ``ranks``."""
    marks = pytest.mark.mpi(min_size=MPI_RANKS) if kind in PROCESSES else ()
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


# What communicators do on other numbers of ranks, tests/comm shows.
THREADS = [stamp("single_rank", 1), *(stamp("in_process", size) for size in (2, 3, 5))]


def in_turn(cases: Mapping[str, tuple[Any, ...]], threads: Sequence[Any] = THREADS) -> list[Any]:
    """Parameters, ``ranks`` the last: each case on these numbers of threads, and on processes of
    one kind and number in turn, where the transport is not what a test is about.
    """
    return [
        pytest.param(*case, *on.values, marks=on.marks, id=f"{name}-{on.id}")
        for i, (name, case) in enumerate(cases.items())
        for on in [*threads, stamp(PROCESSES[i % 2], 3 + i // 2 % 2)]
    ]


@pytest.fixture(params=THREADS + [stamp(kind, 3 + i) for i, kind in enumerate(PROCESSES)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """SingleRank, threads on 2, 3 and 5 ranks, and every kind of processes, on 3 or 4."""
    return Ranks(*request.param)


@pytest.fixture(params=[stamp(kind) for kind in KINDS])
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
