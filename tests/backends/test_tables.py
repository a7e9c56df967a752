"""A row that Python writes has the fields of the C struct that reads it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.operations import operand, plane
from zerocast.backends.fused_op_rows import fused_row
from zerocast.backends.tables import (
    adamw_row,
    cast_row,
    comparison_row,
    copy_row,
    dequantize_row,
    digest_rows,
    numerics_fields,
    runs_row,
    scale_row,
    transpose_row,
)
from zerocast.layout import BlockGrid, SharedBlocks, Source
from zerocast.numerics import (
    E4M3,
    AdamWNumbers,
    AdamWUpdate,
    CodeCopy,
    Comparison,
    DelayedState,
    DigestedBytes,
    Float8DelayedNumerics,
    Float8Numerics,
    FourOverSixErrors,
    FusedOp,
    FusedOperand,
    Masters,
    MXNumerics,
    NVFP4Numerics,
    Rounding,
    TensorOperand,
)

SOURCES = Path(__file__).parents[2] / "cuda_src"
GRID = BlockGrid(16, 16, 16, 16)
ONE = torch.zeros(1)
COMPARISON = Comparison(ONE, ONE, 0)
FULL = plane(GRID, ONE, ONE, ONE)
COPY = plane(GRID, None, ONE, ONE, Source.ROWWISE)
BARE = operand(GRID, scale_inv=ONE)


def sizes() -> dict[str, int]:
    """Of each struct, as many words as the headers' own assertions say."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.h"))
    found = re.findall(r"static_assert\(sizeof\((\w+)\) == (\d+) \* sizeof\(i64\)", text)
    return {name: int(words) for name, words in found}


def everything() -> TensorOperand:
    """An operand that has all that a row can hold."""
    candidates = FourOverSixErrors.carve(torch.zeros(1, dtype=torch.int32), GRID, SharedBlocks())
    return TensorOperand(
        (FULL, FULL), tensor_amax=ONE, amax=ONE, delayed=DelayedState(ONE, ONE, ONE),
        candidates=candidates, rounding=Rounding(ONE), values=ONE,
    )  # fmt: skip


def address(tensor: torch.Tensor | None) -> int:
    """Of no matter."""
    return 0 if tensor is None else tensor.data_ptr()


NUMERICS = (Float8Numerics(E4M3), Float8DelayedNumerics(E4M3), MXNumerics(), NVFP4Numerics())
TARGET = FusedOperand(FusedOp("relu"), torch.zeros(16, 16), torch.zeros(16, 16))
UPDATE = AdamWUpdate(ONE, ONE, ONE, ONE, ONE, AdamWNumbers(1, 1, 1, False, 1, 1, 1, 1, 1))
WRITERS = {
    "Master": lambda o: Masters(1).table[0].tolist(),
    "CastShard": lambda o: cast_row(o, GRID, 0, address, address),
    "ScaleTarget": lambda o: scale_row(o, address),
    "TransposeTarget": lambda o: transpose_row(
        NUMERICS[0], replace(o, planes=(o.planes[0], COPY)), address
    ),
    "DequantizeTarget": lambda o: dequantize_row(o, GRID, address),
    "DigestTarget": lambda o: digest_rows([DigestedBytes(ONE)], ONE, address)[0],
    "CopyTarget": lambda o: copy_row(CodeCopy(ONE, 0), address),
    "Comparison": lambda o: comparison_row(COMPARISON, ONE, ONE, address),
    "RunsTarget": lambda o: runs_row(COMPARISON, ONE, ONE, ONE, address),
    "AdamWUpdate": lambda o: adamw_row(None if o is BARE else UPDATE, address),
    "FusedTable": lambda o: fused_row(TARGET, address),
}


def test_every_row_is_here():
    """What a header asserts of a row is compared below."""
    assert sizes().keys() == {*WRITERS, "NumericsTable"}


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_has_the_fields_of_its_struct(name):
    """Of a tensor that has everything, and of one that has next to nothing."""
    for each in (BARE, everything()):
        assert len(WRITERS[name](each)) == sizes()[name]


@pytest.mark.parametrize("numerics", NUMERICS, ids=str)
def test_a_law_has_the_fields_of_its_struct(numerics):
    """Whichever it is."""
    assert len(numerics_fields(numerics, "cpu")) == sizes()["NumericsTable"]
