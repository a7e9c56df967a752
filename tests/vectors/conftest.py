"""What the vectors are held against."""

from collections.abc import Iterator

import pytest

import zerocast


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests once on each backend; skipped where it cannot run, with the reason."""
    try:
        with zerocast.use_backend(request.param):
            yield
    except zerocast.BackendError as error:
        pytest.skip(str(error))
