"""Parameters of tests that only the nightly run takes."""

from collections.abc import Sequence
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """A parameter of a test."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def first_of_each(
    names: Sequence[str], rows: Sequence[tuple[Any, ...]], columns: int = 1
) -> pytest.MarkDecorator:
    """A test's parameters, of which CI takes the first row with any values of the first
    ``columns``.
    """
    keys = [row[:columns] for row in rows]
    given = [row if keys.index(row[:columns]) == i else nightly(*row) for i, row in enumerate(rows)]
    return pytest.mark.parametrize(names, given)
