"""Communicators on every small number of ranks."""

import pytest

from tests.conftest import THREADS, Ranks, stamp
from tests.support.ranks import MPI_RANKS, PROCESSES


@pytest.fixture(
    params=THREADS + [stamp(kind, n) for kind in PROCESSES for n in range(1, MPI_RANKS + 1)]
)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """SingleRank, threads on 1 to 5 ranks, every other kind on 1 to 4."""
    return Ranks(*request.param)
