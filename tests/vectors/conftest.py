"""What the vectors are held against."""

from collections.abc import Iterator

import pytest

import zerocast


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test once on each backend; skipped, with the reason, on one that cannot run here."""
    try:
        with zerocast.use_backend(request.param):
            yield
    except zerocast.BackendError as error:
        pytest.skip(str(error))
