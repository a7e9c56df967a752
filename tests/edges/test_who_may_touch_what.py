"""docs/EDGES.md is true: every cell of its tables of touches is run, on two ranks of gloo.

A cell that begins with "works" claims that after the touch the next weights are, byte for byte,
the cast of the masters; one that begins with "refused" that every rank raises a ZerocastError whose
message names what stands in backticks in the cell, and that the weights are what they were.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import zerocast
from tests.edges import taken_gradients, ways
from tests.edges.subjects import Fsdp2, Plan, Subject, Tensor, Zero
from tests.support.claims import message_of
from tests.support.ranks import on_gloo
from zerocast.comm import Communicator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "EDGES.md"
WAYS = ways.WAYS | taken_gradients.WAYS
COLUMNS: dict[str, type[Subject]] = {
    "`CastPlan`": Plan,
    "`ZeroOptimizer`": Zero,
    "FSDP2 masters": Fsdp2,
    "tensor parallelism": Tensor,
}


def cells() -> dict[tuple[str, str], str]:
    """(row, column) -> what the page says of it."""
    found = {}
    touches, _, _ = PAGE.read_text().partition("## Kinds of silent faults")
    tables = re.findall(r"(?:^\|.*\n)+", touches, re.MULTILINE)
    for table in tables:
        head, _, *rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
        ]
        assert head[1:] == list(COLUMNS), head
        for row, *said in rows:
            found |= {(row, column): cell for column, cell in zip(head[1:], said, strict=True)}
    return found


def test_every_way_has_a_row() -> None:
    """The page and the ways that are run name the same rows; every cell says works or refused, or
    has nothing that it could be done to.
    """
    table = cells()
    assert {row for row, _ in table} == set(WAYS)
    for place, cell in table.items():
        assert re.match(r"(works|refused: .*`|-$)", cell), (place, cell)


def _marked(row: str, column: str) -> Any:
    """Compiling takes many seconds, and torch's compiler warns of itself."""
    compiles = "torch.compile" in row
    marks = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")] if compiles else []
    return pytest.param(row, column, marks=marks)


@on_gloo(2)
@pytest.mark.parametrize(
    ("row", "column"), [_marked(*place) for place, cell in cells().items() if cell != "-"]
)
def test_a_cell_is_true(comm: Communicator, row: str, column: str) -> None:
    """What the cell says happens on both ranks."""
    cell, subject = cells()[row, column], COLUMNS[column](comm)
    subject.train()
    if cell.startswith("works"):
        WAYS[row](subject)
    else:
        message = message_of(zerocast.ZerocastError, WAYS[row], subject)
        assert all(remedy in message for remedy in re.findall(r"`(.*?)`", cell))
    subject.check()
