"""What holds of indices of any size, proved by z3 of the functions themselves.

tests/support/symbolic.py says how. Each claim is also tried on a copy of the function with a
mistake, which it has to refute.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from z3 import And, If, Implies, Ints, Or, Sum

from tests.support.symbolic import Refuted, Symbol, assume, in_range, prove
from zerocast.numerics import E2M1, E4M3

BLOCKS = [(1, 16), (16, 16), (1, 32), (32, 1), (32, 32), (1, 128), (128, 128)]
MOST = 2**55
"""Elements of a weight up to which nothing overflows: no machine holds more."""
TORCH = types.SimpleNamespace(
    where=lambda condition, one, other: one if condition else other, minimum=min, maximum=max
)
"""In place of ``torch`` where its functions of tables are run on one entry."""


def range_of(*ends: Any) -> Any:
    """``range`` of numbers; a slice, which only has both ends, of symbols."""
    is_known = not any(isinstance(end, Symbol) for end in ends)
    return range(*ends) if is_known else slice(*ends)


def modules(**mistakes: tuple[str, str]) -> types.SimpleNamespace:
    """The modules of indices, run anew, each with what ``mistakes`` says for it: the right text and
    the wrong one.
    """
    found = types.SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        for path in ("layout.extent", "layout.block_grid", "layout.flat_layout",
                     "layout.whole_rows", "layout.shared_blocks", "numerics.packing",
                     "backends.cuda.tiling"):  # fmt: skip
            name = path.rpartition(".")[2]
            original = importlib.import_module(f"zerocast.{path}")
            source = inspect.getsource(original)
            right, wrong = mistakes.get(name, ("", ""))
            assert not right or source.count(right) == 1, right
            made = types.ModuleType(original.__name__)
            vars(made)["range"] = range_of
            patch.setitem(sys.modules, original.__name__, made)  # for those that import it
            exec(source.replace(right, wrong) if right else source, vars(made))
            vars(made)["torch"] = TORCH
            setattr(found, name, made)
    is_any = found.extent.Extent.__bool__
    found.extent.Extent.__bool__ = lambda extent: bool(is_any(extent))  # which Python asks for
    return found


def within(number: Any, start: Any, end: Any) -> Any:
    """Whether it lies in ``[start, end)``."""
    return And(start <= number, number < end)


# --- Claims: of modules, of a grid of blocks, or of the rows of a row of blocks and of a tile, and
# the columns of the tile. Their other parameters are any integers. ---


def numbers_belong_to_one_block(grid, one, other):
    """Every element's block is one of the grid's, and elements with one number lie in the same rows
    of blocks and the same columns of blocks.
    """
    assume(within(one, 0, grid.numel), within(other, 0, grid.numel))
    yield within(grid.block_of(one), 0, grid.num_blocks)
    same = grid.block_of(one) == grid.block_of(other)
    yield Implies(same, one // grid.cols // grid.block_h == other // grid.cols // grid.block_h)
    yield Implies(same, one % grid.cols // grid.block_w == other % grid.cols // grid.block_w)


def owners_have_one_block_each(grid, element, i, j):
    """A block is among the first ``blocks_before(e)`` exactly where its first element is before e:
    so the ranges of :meth:`BlockGrid.owned` of shards that cover a weight cover its blocks, once.
    """
    assume(element >= 0, element <= grid.numel, within(i, 0, grid.blocks_h), j >= 0)
    is_first = i * (grid.cols * grid.block_h) + j * grid.block_w < element
    counted = i * grid.blocks_w + j < grid.blocks_before(element)
    yield Implies(j < grid.blocks_w, is_first == counted)


def touched_blocks_hold_all_elements(m, grid, start, end, index):
    """A rank keeps the amaxes of the blocks of all of its elements."""
    assume(start >= 0, within(index, start, end), end <= grid.numel)
    found = grid.touched(m.extent.Extent(start, end))
    yield within(grid.block_of(index), found.start, found.stop)


def cut_by(m, grid, element):
    """What it says of a boundary at ``element``."""
    fields = grid.rows, grid.cols, grid.block_h, grid.block_w, grid.blocks_w
    return m.shared_blocks.cut_by(element, *fields)


def boundaries_cut_blocks_of_both_sides(m, grid, element, i, j):
    """``cut_by`` gives exactly the blocks with elements before a boundary and others behind it."""
    assume(element > 0, element < grid.numel, i >= 0, j >= 0)
    start, end = cut_by(m, grid, element)
    h, w, cols = grid.block_h, grid.block_w, grid.cols
    last_row, last_col = min((i + 1) * h, grid.rows) - 1, min((j + 1) * w, cols) - 1
    is_cut = And(i * h * cols + j * w < element, element <= last_row * cols + last_col)
    exists = And(i < grid.blocks_h, j < grid.blocks_w)
    yield Implies(exists, is_cut == within(i * grid.blocks_w + j, start, end))
    yield start <= end


def later_boundaries_cut_later_blocks(m, grid, one, other):
    """Both ends of what ``cut_by`` gives ascend: what boundary after boundary cuts beyond the
    largest end so far, and nothing else of it, is cut for the first time.
    """
    assume(one > 0, one <= other, other < grid.numel)
    a, b = cut_by(m, grid, one), cut_by(m, grid, other)
    yield And(a[0] <= b[0], a[1] <= b[1])


def tile_of(m, grid, side, group, column):
    """The row of blocks and the rectangle of a tile."""
    block_row, part = divmod(group, m.block_grid.ceil_div(*side[:2]))
    return block_row, m.tiling.rectangle(block_row, part, column, grid.rows, grid.cols, *side)


def tiles_hold_their_elements(m, grid, side, row, col, after):
    """The tile of an element's group of rows and column holds it, and lies in one row of blocks;
    groups ascend with rows.
    """
    assume(within(row, 0, grid.rows), within(col, 0, grid.cols), row <= after)
    block_h, height, width = side
    group = m.tiling.group_of(row, block_h, height)
    yield group <= m.tiling.group_of(after, block_h, height)
    block_row, (top, high, left, wide) = tile_of(m, grid, side, group, col // width)
    yield block_row == row // block_h
    yield And(within(row, top, top + high), within(col, left, left + wide))
    yield And(high <= height, wide <= width, top + high <= grid.rows, left + wide <= grid.cols)
    yield (top + high - 1) // block_h == block_row


def tiles_share_no_element(m, grid, side, row, col, group, column):
    """A tile that holds an element is the one of the element's group and column."""
    assume(group >= 0, column >= 0, row >= 0, col >= 0)
    block_h, height, width = side
    _, (top, high, left, wide) = tile_of(m, grid, side, group, column)
    holds = And(within(row, top, top + high), within(col, left, left + wide))
    is_own = And(group == m.tiling.group_of(row, block_h, height), column == col // width)
    yield Implies(holds, is_own)


def tiles_with_elements_are_met(
    m, row, col, top, high, left, wide, first_row, first_col, last_row, last_col
):
    """A tile that holds an element between the first place and the last one is in the table."""
    assume(within(row, top, top + high), within(col, left, left + wide))
    assume(Or(first_row < row, And(first_row == row, first_col <= col)))
    assume(Or(row < last_row, And(row == last_row, col <= last_col)))
    yield m.tiling.is_met(top, high, left, wide, first_row, first_col, last_row, last_col)


def chunks_cover_once(m, length, size, rank, row):
    """``chunk`` gives every row to one rank, in order, and none outside."""
    assume(within(rank, 0, size), within(row, 0, length))
    first, last, own, following = (
        m.extent.chunk(length, each, size) for each in (0, size - 1, rank, rank + 1)
    )
    yield And(first.start == 0, last.end == length, own.end == following.start)
    yield And(own.start <= own.end, own.end <= length)
    # Which rank has a row: the one that says so.
    yield within(row, own.start, own.end) == (row // -(-length // size) == rank)


def extents_intersect_as_sets(m, a, b, c, d, element):
    """An element is in the intersection exactly where it is in both."""
    assume(a >= 0, a <= b, c >= 0, c <= d)
    found = m.extent.Extent(a, b).intersect(m.extent.Extent(c, d))
    in_both = And(within(element, a, b), within(element, c, d))
    yield And(within(element, found.start, found.end) == in_both, found.start >= a)


def flat_ranges_share_no_byte(m, first, second, size, rank, element):
    """Ranks' ranges of a flat buffer follow each other, cover all weights, and begin on bytes of
    4-bit codes; each rank's shard of a weight is what its range holds of it.
    """
    assume(first >= 0, within(element, 0, second), within(rank, 0, size))
    layout = m.flat_layout.FlatLayout((first, second), size)
    own, following = layout.rank_extent(rank), layout.rank_extent(rank + 1)
    yield And(own.end == following.start, own.start % 2 == 0)
    yield layout.numel >= first + second
    shard = layout.shards(rank)[1]
    is_owned = within(first + element, own.start, own.end)
    yield is_owned == within(element, shard.start, shard.end)


def whole_rows_hold_whole_blocks(m, grid, start, end, index, peer):
    """Elements of ``whole_rows`` lie in the shard, with all elements of their rows of blocks."""
    assume(start >= 0, start <= end, end <= grid.numel, index >= 0, within(peer, 0, grid.numel))
    found = m.whole_rows.whole_rows([grid], m.extent.Extent(start, end))
    width = grid.cols * grid.block_h
    is_in, peer_is_in = (within(each, found.start, found.end) for each in (index, peer))
    yield Implies(is_in, within(index, start, end))
    yield Implies(And(is_in, index // width == peer // width), peer_is_in)


def accepted_partitions_cover_once(m, numel, element, a, b, c, d, e, f):
    """Where ``check_partition`` accepts three ranks' extents, each element has one owner. The
    extents are in the order that ``sorted`` gives them.
    """
    assume(numel >= 0, a >= 0, a <= b, c >= 0, c <= d, e >= 0, e <= f)
    assume(Or(a < c, And(a == c, b <= d)), Or(c < e, And(c == e, d <= f)))
    extents = [m.extent.Extent(*ends) for ends in ((a, b), (c, d), (e, f))]
    if m.flat_layout.check_partition(numel, extents) is None:
        holders = [If(within(element, each.start, each.end), 1, 0) for each in extents]
        yield Sum(holders) == If(within(element, 0, numel), 1, 0)


def bytes_have_one_writer(m, start, end, after, element):
    """Shards that follow each other write different bytes of codes, but for one where an odd
    element of 4 bits begins the second; each writes all bytes of its elements, and no other.
    """
    assume(start >= 0, start <= end, end <= after)
    for fmt in (E4M3, E2M1):
        per_byte = 8 // fmt.bits
        own, following = m.packing.byte_span(fmt, start, end), m.packing.byte_span(fmt, end, after)
        holds = within(element, start, end)
        yield Implies(holds, within(element // per_byte, *own))
        first, last = own[0] * per_byte, own[1] * per_byte
        yield Implies(start < end, And(first > start - per_byte, last < end + per_byte))
        both_write = And(start < end, end < after)
        yield Implies(both_write, own[1] - following[0] == end % per_byte)


# --- No number on the way to a result reaches 2^63. ---


def whole_rows_do_not_overflow(m, grid, start, end):
    """Nor numbers of blocks, and entries of amaxes."""
    assume(start >= 0, start < end, end <= grid.numel, grid.numel <= MOST)
    m.whole_rows.whole_rows([grid], m.extent.Extent(start, end))
    assert [grid.amax_slots, grid.blocks_before(end)]
    yield from in_range(2**63)


def blocks_of_elements_do_not_overflow(m, grid, element):
    """Nor blocks that are cut."""
    assume(within(element, 0, grid.numel), grid.numel <= MOST)
    assert [grid.block_of(element), cut_by(m, grid, element)]
    yield from in_range(2**63)


def touched_blocks_do_not_overflow(m, grid, start, end):
    """Nor the rows on the way to them."""
    assume(start >= 0, start < end, end <= grid.numel, grid.numel <= MOST)
    grid.touched(m.extent.Extent(start, end))
    yield from in_range(2**63)


def tiles_do_not_overflow(m, grid, side, row, col):
    """Of any row and column."""
    assume(*(within(each, 0, MOST + 1) for each in (grid.rows, grid.cols, row, col)))
    tile_of(m, grid, side, m.tiling.group_of(row, *side[:2]), col // side[2])
    yield from in_range(2**63)


def ranges_do_not_overflow(m, first, second, size, rank):
    """On up to 2^31 ranks; nor bytes."""
    numel = first + second
    assume(first >= 0, second > 0, numel <= MOST, within(rank, 0, size), size <= 2**31)
    for fmt in (E4M3, E2M1):
        m.packing.byte_span(fmt, first, numel)
    yield from in_range(2**63)
    layout = m.flat_layout.FlatLayout((first, second), size)
    yield layout.rank_numel * size <= (-(-numel // size) + m.flat_layout.ALIGNMENT) * size
    assert [layout.numel, layout.shard_slices(rank), m.extent.chunk(numel, rank, size)]
    yield from in_range(2**63)


CLAIMS = {name: each for name, each in vars().items()
          if inspect.isgeneratorfunction(each) and each.__module__ == __name__}  # fmt: skip
OF_BLOCKS = [name for name in CLAIMS if "grid" in inspect.signature(CLAIMS[name]).parameters]


def check(name: str, h: int, w: int, **mistakes: tuple[str, str]) -> None:
    """Prove a claim of matrices of any size in blocks of this one, and of their tiles."""
    m, claim = modules(**mistakes), CLAIMS[name]
    t, grid = m.tiling, m.block_grid.BlockGrid(*map(Symbol, Ints("rows cols")), h, w)
    of_rows = [(height, t.ROW_BLOCK_TILE_ROWS, t.ROW_BLOCK_TILE_COLS) for height in (1, 32)]
    sides = [(h, *t.side_of(h, w)), *(of_rows if h == 1 else [])]
    for side in sides if "side" in inspect.signature(claim).parameters else [None]:
        prove(claim, grid.rows > 0, grid.cols > 0, m=m, grid=grid, side=side)


@pytest.mark.parametrize(
    ("claim", "block"),
    [(name, block) for name in CLAIMS for block in (BLOCKS if name in OF_BLOCKS else BLOCKS[:1])],
    ids=str,
)
def test_claims(claim: str, block: tuple[int, int]) -> None:
    """Of any numbers."""
    check(claim, *block)


MISTAKES = Path(__file__).with_name("planted_mistakes.txt").read_text().splitlines()
"""Of which claim, in which module, and the right text -> the wrong one."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refuted(mistake: str) -> None:
    """The solver finds numbers for which a wrong line gives something wrong."""
    place, _, change = mistake.partition(": ")
    claim, module = place.split(", ")
    right, wrong = change.split(" -> ")
    with pytest.raises(Refuted, match="does not follow: \\["):
        check(claim, 16, 16, **{module: (right, wrong)})
