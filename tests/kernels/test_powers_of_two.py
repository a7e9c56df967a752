"""Both planes of blocks under powers of two, measured and cast in one pass by the CPU library in
lanes of 16 bits: the reference's bytes, of every BF16 value under scales from near and far.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.support.claims import assert_same_tensors
from tests.support.compiled import on_cpu
from tests.support.operations import Scheme, Weight, run_together
from tests.support.values import KINDS, draw_values
from zerocast.backends.reference import ReferenceBackend
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.numerics import E2M1, E4M3, E5M2, MXNumerics

BLOCK = 32
NUMERICS = [MXNumerics(E4M3), MXNumerics(E5M2)]
NUMERICS += [MXNumerics(E2M1, rounding) for rounding in ("up", "floor", "even")]
every_numerics = pytest.mark.parametrize("numerics", NUMERICS, ids=str)


def assert_one_pass(numerics: MXNumerics, master: torch.Tensor, *, start: int = 0) -> None:
    """What one pass writes of [rows, cols] on every instruction set is what the reference does;
    with ``start`` of the elements from there on.
    """
    rows, cols = master.shape
    grids = BlockGrid(rows, cols, 1, BLOCK), BlockGrid(rows, cols, BLOCK, 1)
    weight = Weight(Scheme(numerics, *map(ScaleLayout, grids)), [Extent(start, rows * cols)])
    steps = [[master.reshape(-1)]]
    expected = run_together(ReferenceBackend(), [weight], steps=steps)
    for name, backend in on_cpu(2).items():
        written = run_together(backend, [weight], steps=steps, reads_once=True)
        assert_same_tensors(written, expected, f"on {name}")


def values_under_amaxes() -> Iterator[torch.Tensor]:
    """Every finite BF16 value, of both signs, in [n, 32]: each row after an amax that is 2^gap of
    its largest value's exponent or more.
    """
    bits = torch.arange(0x7F80, dtype=torch.int32)
    values = torch.stack([bits << 16, bits << 16 | -(2**31)], 1).reshape(-1).view(torch.float32)
    values = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1)))
    rows = values.reshape(-1, BLOCK - 1)
    largest = rows.abs().amax(1, keepdim=True)
    for gap in range(20):
        amax = (largest * (1 + gap % 8 / 8) * 2.0**gap).bfloat16().float()
        kept = amax.isfinite().squeeze(1)
        yield torch.cat([amax, rows], 1)[kept]


@every_numerics
def test_every_value_under_amaxes_from_near_and_far(numerics):
    """In rows and, transposed, in columns; the other plane's blocks are mixtures of exponents."""
    blocks = torch.cat(list(values_under_amaxes()))
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 64))
    assert_one_pass(numerics, blocks.reshape(-1, 2 * BLOCK))
    assert_one_pass(numerics, blocks.T.contiguous())


@every_numerics
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_kind(numerics, kind):
    """Of shapes with a last row of blocks that is cut, with one row of them, with a shard that
    begins inside of one; with rows and columns of zeros, and one value below 2^-90.
    """
    for i, (rows, cols, start) in enumerate(
        ((96, 192, 0), (40, 64, 0), (7, 128, 0), (70, 320, 99))
    ):
        master = draw_values(kind, rows * cols, i).reshape(rows, cols)
        assert_one_pass(numerics, master, start=start)
        master[1::3], master[:, 2::5] = 0.0, -0.0
        assert_one_pass(numerics, master, start=start)
        master[rows // 2, cols // 2] = 2.0**-100
        assert_one_pass(numerics, master, start=start)
