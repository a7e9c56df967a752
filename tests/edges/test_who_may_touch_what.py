"""docs/edges.md is true: every cell of its tables of touches is run, on two ranks of gloo.

A cell that begins with "works" claims that after the touch the next weights are, byte for byte,
the cast of the masters; one that begins with "refused" that every rank raises a ZerocastError whose
message names what stands in backticks in the cell, and that the weights are what they were.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.edges import taken_gradients, ways
from tests.edges.moves import MOVES, Move
from tests.support.claims import assert_same_tensors, message_of, stored, told_all
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES
from tests.support.subjects import Fsdp2, OverlappingZero, Plan, Subject, Tensor, Zero
from zerocast.comm import Communicator, run_in_process
from zerocast.recipes import Recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "edges.md"
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
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
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
    assert {row for row, _ in table} == WAYS.keys() | MOVES.keys()
    for place, cell in table.items():
        assert re.match(r"(works|refused: .*`|-$)", cell), (place, cell)


def _marked(row: str, column: str) -> Any:
    """Compiling takes many seconds, and torch's compiler warns of itself."""
    compiles = "torch.compile" in row
    marks = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")] if compiles else []
    return pytest.param(row, column, marks=marks)


@on_gloo(2)
@pytest.mark.parametrize(
    ("row", "column"),
    [_marked(*place) for place, cell in cells().items() if cell != "-" and place[0] in WAYS],
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


# By day each on both backends, by an optimizer that overlaps its gathers and by one that does not.
ON = [("nvfp4", "cpu"), ("mxfp8", "reference"), ("nvfp4-4over6", "reference"), ("delayed", "cpu")]
MOVED = [
    pytest.param(
        row, column, move, *on, id=f"{row}-{column}-{move.__name__}-{on[0]}",
        marks=() if i % 2 == j // 2 else pytest.mark.nightly,
    )
    for (row, column), cell in cells().items()
    if row in MOVES and cell != "-"
    for i, move in enumerate(MOVES[row].moves)
    for j, on in enumerate(ON)
]  # fmt: skip


@pytest.mark.parametrize(("row", "column", "move", "recipe", "backend"), MOVED)
def test_a_cell_of_moved_memory_is_true(
    row: str, column: str, move: Move, recipe: str, backend: str
) -> None:
    """Moved on one rank alone, and then on both: training goes on as that of a subject without the
    move. A refusal is one message on both ranks, and the weights are what they were.
    """
    with zerocast.use_backend(backend):
        run_in_process(2, lambda comm: _moved(comm, row, column, move, RECIPES[recipe]))


def codes(subject: Subject) -> torch.Tensor:
    """Of the first weight."""
    return next(subject.model.parameters()).rowwise_data.clone()


def _moved(comm: Communicator, row: str, column: str, move: Move, recipe: Recipe) -> None:
    cell = cells()[row, column]
    kind = COLUMNS[column]
    if kind is Zero and recipe in (RECIPES["mxfp8"], RECIPES["nvfp4-4over6"]):
        kind = OverlappingZero
    subject, other = (kind(comm, recipe) for _ in range(2))
    if cell.startswith("refused"):
        found = MOVES[row].find(subject)
        before, values = codes(subject), [m.detach().clone() for m in subject.masters()]
        for tensor in found if comm.rank == 1 else ():
            move(tensor)
        message = told_all(comm, zerocast.InputError, subject.publish)
        assert comm.rank == 1 or before.equal(codes(subject))
        assert all(remedy in message for remedy in re.findall(r"`(.*?)`", cell))
        if "no longer fits" in row:  # once the master is mended, the plan goes on
            for master, value in zip(subject.masters(), values, strict=True):
                master.data = value
            for each in (subject, other):
                each.publish()
            assert_same_tensors(stored(subject.model), stored(other.model), "once mended")
        return
    for movers in ((0,), (0, 1)):
        for each in (subject, other):
            found = MOVES[row].find(each)
            for tensor in found if each is subject and comm.rank in movers else ():
                move(tensor)
            each.publish()
            each.train()
            if isinstance(each, Zero):
                each.optimizer.wait_for_all_gather()
        assert_same_tensors(stored(subject.model), stored(other.model), f"moved by {movers}")
        whole = [dict(enumerate(each.whole_masters())) for each in (subject, other)]
        assert_same_tensors(*whole, f"masters, moved by {movers}")
