"""What holds of indices of any size, proved by z3 of the functions themselves.

tests/support/symbolic.py says how. Each claim is also tried on a copy of the function with a
mistake, which it has to refute.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import z3

from tests.support.symbolic import Refuted, Symbol, in_range, ordered, prove, symbols, term
from zerocast.formats import E2M1, E4M3, ElementFormat

BLOCKS = [(1, 16), (16, 16), (1, 32), (32, 1), (32, 32), (1, 128), (128, 128)]
MOST = 2**55
"""Elements of a weight up to which nothing overflows: no machine holds more."""
TORCH = types.SimpleNamespace(
    where=lambda condition, one, other: one if condition else other, minimum=min, maximum=max
)
"""In place of ``torch`` where its functions of tables are run on one entry."""


@dataclass(frozen=True)
class Span:
    """In place of ``range``, which takes no symbols."""

    start: Any
    stop: Any = None

    def __contains__(self, number: Any) -> bool:
        raise TypeError("ask z3")


def range_of(*ends: Any) -> Any:
    """``range`` of numbers, a :class:`Span` of symbols."""
    return Span(*ends) if any(isinstance(end, Symbol) for end in ends) else builtins.range(*ends)


def modules(**mistakes: tuple[str, str]) -> types.SimpleNamespace:
    """The modules of indices, run anew, each with what ``mistakes`` says for it: the right text and
    the wrong one.
    """
    found = types.SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        for path in ("layout.extent", "layout.block_grid", "layout.flat_layout",
                     "layout.whole_rows", "layout.shared_blocks", "formats.packing",
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
    return found


def both(*conditions: Any) -> Any:
    """Whether all ``conditions`` hold."""
    return z3.And(*conditions)


def numbers_are_in_range(m: Any, h: int, w: int) -> None:
    """Every element's block is one of the grid's."""
    rows, cols, index = symbols("rows cols index")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        row = index // cols
        ordered(rows, row, cols)
        ordered(row // h, grid.blocks_h, grid.blocks_w)
        number = grid.block_of(index)
        yield both(number.term >= 0, number.term < grid.num_blocks.term)

    prove(claim, rows.term > 0, cols.term > 0, index.term >= 0, index.term < (rows * cols).term)


def numbers_belong_to_one_block(m: Any, h: int, w: int) -> None:
    """Elements with one number lie in the same rows of blocks and the same columns of blocks."""
    rows, cols, one, other = symbols("rows cols one other")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        ordered(one // cols // h, other // cols // h, grid.blocks_w)
        same = grid.block_of(one).term == grid.block_of(other).term
        yield z3.Implies(same, (one // cols // h).term == (other // cols // h).term)
        yield z3.Implies(same, (one % cols // w).term == (other % cols // w).term)

    inside = [both(each.term >= 0, each.term < (rows * cols).term) for each in (one, other)]
    prove(claim, rows.term > 0, cols.term > 0, *inside)


def owners_have_one_block_each(m: Any, h: int, w: int) -> None:
    """A block is among the first ``blocks_before(e)`` exactly where its first element is before e:
    so the ranges of :meth:`BlockGrid.owned` of shards that cover a weight cover its blocks, once.
    """
    rows, cols, element, i, j = symbols("rows cols element i j")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        first = i * (cols * h) + j * w
        row, _ = divmod(element, cols * h)
        for factor in (cols * h, grid.blocks_w):
            ordered(i, row, factor)
        before = grid.blocks_before(element)
        exists = both(i.term >= 0, i.term < grid.blocks_h.term, j.term >= 0)
        number = (i * grid.blocks_w + j).term
        yield z3.Implies(
            both(exists, j.term < grid.blocks_w.term),
            (first.term < element.term) == (number < before.term),
        )

    inside = both(element.term >= 0, element.term <= (rows * cols).term)
    prove(claim, rows.term > 0, cols.term > 0, inside)


def touched_blocks_hold_all_elements(m: Any, h: int, w: int) -> None:
    """A rank keeps the amaxes of the blocks of all of its elements."""
    rows, cols, start, end, index = symbols("rows cols start end index")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        found = grid.touched(m.extent.Extent(start, end))
        row, number = index // cols, grid.block_of(index)
        first, last = start // cols, -(-end // cols)
        for edge in (first, last, rows):
            ordered(row, edge, cols)
        if isinstance(found, Span):
            block_row = row // h
            for edge in edges(grid, start, end, cols, h, m):
                ordered(edge, block_row, grid.blocks_w)
            yield both(term(found.start) <= number.term, number.term < term(found.stop))
        else:
            yield z3.BoolVal(False)  # no block at all

    inside = both(start.term >= 0, start.term <= index.term, index.term < end.term)
    prove(claim, rows.term > 0, cols.term > 0, inside, end.term <= (rows * cols).term)


def edges(grid: Any, start: Any, end: Any, cols: Any, h: int, m: Any) -> list[Any]:
    """The rows of blocks that :meth:`BlockGrid.touched` begins and ends with."""
    tile = m.block_grid.TILE_ROWS
    first = start // cols // tile * tile
    last = m.block_grid.round_up(m.block_grid.ceil_div(end, cols), tile)
    return [first // h, m.block_grid.ceil_div(last, h), grid.blocks_h]


def boundaries_cut_blocks_of_both_sides(m: Any, h: int, w: int) -> None:
    """``cut_by`` gives exactly the blocks with elements before a boundary and others behind it."""
    rows, cols, element, i, j = symbols("rows cols element i j")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        start, end = m.shared_blocks.cut_by(element, rows, cols, h, w, grid.blocks_w)
        row = element // cols
        last_row, last_col = min((i + 1) * h, rows) - 1, min((j + 1) * w, cols) - 1
        for one, other in ((i * h, row), (last_row, row), (row, rows)):
            ordered(one, other, cols)
        ordered(i, row // h, grid.blocks_w)
        first, last, number = (
            i * h * cols + j * w,
            last_row * cols + last_col,
            i * grid.blocks_w + j,
        )
        cut = both(first.term < element.term, element.term <= last.term)
        is_in = both(start.term <= number.term, number.term < end.term)
        exists = both(i.term < grid.blocks_h.term, j.term < grid.blocks_w.term)
        yield z3.Implies(exists, cut == is_in)
        yield start.term <= end.term

    inside = both(element.term > 0, element.term < (rows * cols).term, i.term >= 0, j.term >= 0)
    prove(claim, rows.term > 0, cols.term > 0, inside)


def later_boundaries_cut_later_blocks(m: Any, h: int, w: int) -> None:
    """Both ends of what ``cut_by`` gives ascend: what boundary after boundary cuts beyond the
    largest end so far, and nothing else of it, is cut for the first time.
    """
    rows, cols, one, other = symbols("rows cols one other")

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        ordered(one // cols, other // cols, cols)
        ordered(other // cols, rows, cols)
        ordered(one // cols // h, other // cols // h, grid.blocks_w)
        a, b = (m.shared_blocks.cut_by(e, rows, cols, h, w, grid.blocks_w) for e in (one, other))
        yield both(a[0].term <= b[0].term, a[1].term <= b[1].term)

    inside = both(one.term > 0, one.term <= other.term, other.term < (rows * cols).term)
    prove(claim, rows.term > 0, cols.term > 0, inside)


def sides(m: Any, h: int, w: int) -> list[tuple[int, int, int]]:
    """Rows of a row of blocks, rows and columns of a tile: of tilings that take such blocks."""
    t = m.tiling
    of_rows = [(height, t.ROW_BLOCK_TILE_ROWS, t.ROW_BLOCK_TILE_COLS) for height in (1, 32)]
    return [(h, *t.side_of(h, w)), *(of_rows if h == 1 else [])]


def tiles_hold_their_elements(m: Any, h: int, w: int) -> None:
    """The tile of an element's group of rows and column holds it, and lies in one row of blocks;
    groups ascend with rows.
    """
    rows, cols, row, col, after = symbols("rows cols row col after")

    def claim(block_h: int, height: int, width: int) -> Iterator[Any]:
        group, later = (m.tiling.group_of(each, block_h, height) for each in (row, after))
        yield group.term <= later.term
        block_row, part = divmod(group, m.block_grid.ceil_div(block_h, height))
        yield block_row.term == (row // block_h).term
        top, high, left, wide = m.tiling.rectangle(
            block_row, part, col // width, rows, cols, block_h, height, width
        )
        yield both(top.term <= row.term, row.term < (top + high).term, term(high) <= height)
        yield both(left.term <= col.term, col.term < (left + wide).term, term(wide) <= width)
        yield both((top + high).term <= rows.term, (left + wide).term <= cols.term)
        yield ((top + high - 1) // block_h).term == block_row.term

    inside = both(row.term >= 0, row.term < rows.term, col.term >= 0, col.term < cols.term)
    for side in sides(m, h, w):
        prove(lambda side=side: claim(*side), inside, row.term <= after.term)


def tiles_share_no_element(m: Any, h: int, w: int) -> None:
    """A tile that holds an element is the one of the element's group and column."""
    rows, cols, row, col, group, column = symbols("rows cols row col group column")

    def claim(block_h: int, height: int, width: int) -> Iterator[Any]:
        block_row, part = divmod(group, m.block_grid.ceil_div(block_h, height))
        top, high, left, wide = m.tiling.rectangle(
            block_row, part, column, rows, cols, block_h, height, width
        )
        holds = both(top.term <= row.term, row.term < (top + high).term,
                     left.term <= col.term, col.term < (left + wide).term)  # fmt: skip
        own = m.tiling.group_of(row, block_h, height)
        yield z3.Implies(holds, both(group.term == own.term, column.term == (col // width).term))

    inside = both(rows.term > 0, cols.term > 0, group.term >= 0, column.term >= 0)
    for side in sides(m, h, w):
        prove(lambda side=side: claim(*side), inside, row.term >= 0, col.term >= 0)


def blocks_do_not_overflow(m: Any, h: int, w: int) -> None:
    """No number on the way to what blocks, shards and tiles are reaches 2^63."""
    rows, cols, start, end = symbols("rows cols start end")

    def bounded(*block_rows: Any) -> Any:
        """A grid, and that its products with its rows of blocks are at most its elements."""
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        for block_row in block_rows:
            ordered(block_row * h, rows, cols)
            ordered(block_row, rows, grid.blocks_w)
        ordered(grid.blocks_w, cols, rows)
        return grid

    def of_shards() -> Iterator[Any]:
        m.whole_rows.whole_rows([bounded()], m.extent.Extent(start, end))
        yield from in_range(2**63)

    def of_blocks() -> Iterator[Any]:
        grid = bounded(-(-rows // h) - 1, end // (cols * h))
        ordered(-(-rows // h), rows, grid.blocks_w)
        assert [grid.amax_slots, grid.blocks_before(end)]
        yield from in_range(2**63)

    def of_elements() -> Iterator[Any]:
        ordered(start // cols, rows, cols)
        grid = bounded(start // cols // h)
        grid.block_of(start)
        m.shared_blocks.cut_by(start, rows, cols, h, w, grid.blocks_w)
        yield from in_range(2**63)

    def of_touched() -> Iterator[Any]:
        for row in (start // cols, -(-end // cols)):
            ordered(row, rows, cols)
        grid = bounded()
        for edge in edges(grid, start, end, cols, h, m):
            ordered(edge, rows, grid.blocks_w)
        grid.touched(m.extent.Extent(start, end))
        yield from in_range(2**63)

    def of_tiles() -> Iterator[Any]:  # of a row and a column: start and end
        for side in sides(m, h, w):
            parts = m.block_grid.ceil_div(*side[:2])
            block_row, part = divmod(m.tiling.group_of(start, *side[:2]), parts)
            m.tiling.rectangle(block_row, part, end // side[2], rows, cols, *side)
        yield from in_range(2**63)

    inside = both(start.term >= 0, start.term < end.term, end.term <= (rows * cols).term)
    for claim in (of_shards, of_blocks, of_elements, of_touched):
        prove(claim, rows.term > 0, cols.term > 0, inside, (rows * cols).term <= MOST)
    places = [both(each.term >= 0, each.term <= MOST) for each in (rows, cols, start, end)]
    prove(of_tiles, *places)


OF_BLOCKS = [
    numbers_are_in_range, numbers_belong_to_one_block, owners_have_one_block_each,
    touched_blocks_hold_all_elements, boundaries_cut_blocks_of_both_sides,
    later_boundaries_cut_later_blocks, tiles_hold_their_elements, tiles_share_no_element,
    blocks_do_not_overflow,
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block[0]}x{block[1]}")
@pytest.mark.parametrize("claim", OF_BLOCKS, ids=lambda claim: claim.__name__)
def test_blocks(claim: Callable[..., None], block: tuple[int, int]) -> None:
    """Over matrices of any size, in blocks of these sizes."""
    claim(modules(), *block)


def chunks_cover_once(m: Any) -> None:
    """``chunk`` gives every row to one rank, in order, and none outside."""
    length, size, rank, row = symbols("length size rank row")

    def claim() -> Iterator[Any]:
        own, following = m.extent.chunk(length, rank, size), m.extent.chunk(length, rank + 1, size)
        most = -(-length // size)
        yield own.end.term == following.start.term
        yield both(own.start.term <= own.end.term, own.end.term <= length.term)
        first, last = m.extent.chunk(length, 0, size), m.extent.chunk(length, size - 1, size)
        yield both(term(first.start) == 0, term(last.end) == length.term)
        # Which rank has a row: the one that says so.
        ordered(rank, row // most, most)
        holds = both(term(own.start) <= row.term, row.term < term(own.end))
        yield holds == ((row // most).term == rank.term)

    ranks = both(rank.term >= 0, rank.term < size.term)
    prove(claim, length.term > 0, ranks, row.term >= 0, row.term < length.term)


def tiles_with_elements_are_met(m: Any) -> None:
    """A tile that holds an element between the first place and the last one is in the table."""
    row, col, top, high, left, wide = symbols("row col top high left wide")
    places = symbols("first_row first_col last_row last_col")

    def claim() -> Iterator[Any]:
        yield z3.BoolVal(m.tiling.is_met(top, high, left, wide, *places))

    first_row, first_col, last_row, last_col = (place.term for place in places)
    holds = both(top.term <= row.term, row.term < (top + high).term,
                 left.term <= col.term, col.term < (left + wide).term)  # fmt: skip
    begun = z3.Or(first_row < row.term, both(first_row == row.term, first_col <= col.term))
    prove(
        claim,
        holds,
        begun,
        z3.Or(row.term < last_row, both(row.term == last_row, col.term <= last_col)),
    )


def extents_intersect_as_sets(m: Any) -> None:
    """An element is in the intersection exactly where it is in both."""
    a, b, c, d, element = symbols("a b c d element")

    def claim() -> Iterator[Any]:
        one, other = m.extent.Extent(a, b), m.extent.Extent(c, d)
        found = one.intersect(other)
        inside = both(term(found.start) <= element.term, element.term < term(found.end))
        in_one = both(a.term <= element.term, element.term < b.term)
        yield inside == both(in_one, c.term <= element.term, element.term < d.term)
        yield term(found.start) >= a.term

    prove(claim, a.term >= 0, a.term <= b.term, c.term >= 0, c.term <= d.term)


def flat_ranges_share_no_byte(m: Any) -> None:
    """Ranks' ranges of a flat buffer follow each other, cover all weights, and begin on bytes of
    4-bit codes; each rank's shard of a weight is what its range holds of it.
    """
    first, second, size, rank, element = symbols("first second size rank element")

    def claim() -> Iterator[Any]:
        layout = m.flat_layout.FlatLayout((first, second), size)
        own, following = layout.rank_extent(rank), layout.rank_extent(rank + 1)
        yield both(own.end.term == following.start.term, own.start.term % 2 == 0)
        ordered(-(-(first + second) // size), layout.rank_numel, size)
        yield layout.numel.term >= (first + second).term
        shard = layout.shards(rank)[1]
        place = element.term + first.term
        owned = both(own.start.term <= place, place < own.end.term)
        mine = both(term(shard.start) <= element.term, element.term < term(shard.end))
        yield owned == mine

    weights = both(first.term >= 0, second.term > 0, element.term >= 0)
    ranks = both(rank.term >= 0, rank.term < size.term)
    prove(claim, weights, element.term < second.term, ranks)


def whole_rows_hold_whole_blocks(m: Any) -> None:
    """Elements of ``whole_rows`` lie in the shard, with all elements of their rows of blocks."""
    rows, cols, start, end, index, peer = symbols("rows cols start end index peer")
    h, w = 32, 32

    def claim() -> Iterator[Any]:
        grid = m.block_grid.BlockGrid(rows, cols, h, w)
        found = m.whole_rows.whole_rows([grid], m.extent.Extent(start, end))
        inside = both(term(found.start) <= index.term, index.term < term(found.end))
        yield z3.Implies(inside, both(start.term <= index.term, index.term < end.term))
        # A peer is an element of the same rows of blocks.
        row, _ = divmod(index, cols * h)
        other, _ = divmod(peer, cols * h)
        for edge in (-(-start // (cols * h)), end // (cols * h), other):
            ordered(edge, row, cols * h)
        same = both(row.term == other.term, peer.term >= 0, peer.term < (rows * cols).term)
        peer_inside = both(term(found.start) <= peer.term, peer.term < term(found.end))
        yield z3.Implies(both(inside, same), peer_inside)

    inside = both(start.term >= 0, start.term <= end.term, end.term <= (rows * cols).term)
    prove(claim, rows.term > 0, cols.term > 0, inside, index.term >= 0)


def accepted_partitions_cover_once(m: Any) -> None:
    """Where ``check_partition`` accepts three ranks' extents, each element has one owner. The
    extents are in the order that ``sorted`` gives them.
    """
    numel, element, *bounds = symbols("numel element a b c d e f")

    def claim() -> Iterator[Any]:
        extents = [m.extent.Extent(*bounds[i : i + 2]) for i in (0, 2, 4)]
        if m.flat_layout.check_partition(numel, extents) is None:
            holders = [
                z3.If(both(e.start.term <= element.term, element.term < e.end.term), 1, 0)
                for e in extents
            ]
            exists = both(element.term >= 0, element.term < numel.term)
            yield z3.Sum(holders) == z3.If(exists, 1, 0)

    given = [both(bounds[i].term >= 0, bounds[i].term <= bounds[i + 1].term) for i in (0, 2, 4)]
    a, b, c, d, e, f = (bound.term for bound in bounds)
    in_order = [z3.Or(a < c, both(a == c, b <= d)), z3.Or(c < e, both(c == e, d <= f))]
    prove(claim, numel.term >= 0, *given, *in_order)


def bytes_have_one_writer(m: Any) -> None:
    """Shards that follow each other write different bytes of codes, but for one where an odd
    element of 4 bits begins the second; each writes all bytes of its elements, and no other.
    """
    start, end, after, element = symbols("start end after element")

    def claim(fmt: ElementFormat) -> Iterator[Any]:
        per_byte = 8 // fmt.bits
        own, next_one = m.packing.byte_span(fmt, start, end), m.packing.byte_span(fmt, end, after)
        byte = (element // per_byte).term
        holds = both(start.term <= element.term, element.term < end.term)
        yield z3.Implies(holds, both(term(own[0]) <= byte, byte < term(own[1])))
        first, last = own[0] * per_byte, own[1] * per_byte
        yield z3.Implies(start.term < end.term, first.term > start.term - per_byte)
        yield z3.Implies(start.term < end.term, last.term < end.term + per_byte)
        both_write = both(start.term < end.term, end.term < after.term)
        shared = term(own[1]) - term(next_one[0])
        yield z3.Implies(both_write, shared == (end % per_byte).term)

    in_order = both(start.term >= 0, start.term <= end.term, end.term <= after.term)
    for fmt in (E4M3, E2M1):
        prove(lambda fmt=fmt: claim(fmt), in_order)


def ranges_do_not_overflow(m: Any) -> None:
    """No number on the way to what ranks own reaches 2^63, on up to 2^31 of them; nor bytes."""
    first, second, size, rank = symbols("first second size rank")

    def claim() -> Iterator[Any]:
        numel = first + second
        for fmt in (E4M3, E2M1):
            m.packing.byte_span(fmt, first, numel)
        yield from in_range(2**63)
        most = -(-numel // size)
        layout = m.flat_layout.FlatLayout((first, second), size)
        ordered(layout.rank_numel, most + (m.flat_layout.ALIGNMENT - 1), size)
        for number in (most, layout.rank_numel):
            ordered(rank + 1, size, number)
            ordered(rank, size, number)
        assert [layout.numel, layout.shard_slices(rank), m.extent.chunk(numel, rank, size)]
        yield from in_range(2**63)

    weights = both(first.term >= 0, second.term > 0, (first + second).term <= MOST)
    prove(claim, weights, rank.term >= 0, rank.term < size.term, size.term <= 2**31)


OF_RANGES = [
    bytes_have_one_writer, chunks_cover_once, extents_intersect_as_sets, flat_ranges_share_no_byte,
    whole_rows_hold_whole_blocks, accepted_partitions_cover_once, tiles_with_elements_are_met,
    ranges_do_not_overflow,
]  # fmt: skip


@pytest.mark.parametrize("claim", OF_RANGES, ids=lambda claim: claim.__name__)
def test_ranges(claim: Callable[..., None]) -> None:
    """Of any lengths and numbers of ranks."""
    claim(modules())


MISTAKES = """
numbers_are_in_range, block_grid: % self.cols // self.block_w -> // self.block_w
numbers_belong_to_one_block, block_grid: self.block_h * self.blocks_w -> self.block_h * self.block_w
owners_have_one_block_each, block_grid: ceil_div(in_row, self.block_w) -> in_row // self.block_w
owners_have_one_block_each, block_grid: self.block_w), self.blocks_w) -> self.block_w), self.cols)
touched_blocks_hold_all_elements, block_grid: ceil_div(extent.end, -> ceil_div(extent.end - 31,
boundaries_cut_blocks_of_both_sides, shared_blocks: | (row == rows - 1) -> | (row == rows)
boundaries_cut_blocks_of_both_sides, shared_blocks: -(-col // block_w) -> col // block_w
later_boundaries_cut_later_blocks, shared_blocks: above == 0 -> above != 0
tiles_with_elements_are_met, tiling: + ends_early <= bottom -> + ends_early < bottom
tiles_with_elements_are_met, tiling: (first_col >= col + cols) -> (first_col >= col)
tiles_with_elements_are_met, tiling: (last_col < col) -> (last_col <= col)
tiles_hold_their_elements, tiling: torch.minimum(matrix_cols - col, width) -> width
tiles_share_no_element, tiling: part * height, column * width -> part * height, column
blocks_do_not_overflow, whole_rows: height * grids[0].cols, -> height * grids[0].cols * 16,
chunks_cover_once, extent: min((rank + 1) * most, length) -> (rank + 1) * most
extents_intersect_as_sets, extent: max(start, min(self.end, other.end)) -> max(start, self.end)
flat_ranges_share_no_byte, flat_layout: ALIGNMENT = 128 -> ALIGNMENT = 1
flat_ranges_share_no_byte, flat_layout: owned.intersect(w).shifted(-w.start) -> owned.intersect(w)
whole_rows_hold_whole_blocks, whole_rows: -(-extent.start // row) * row -> extent.start // row * row
bytes_have_one_writer, packing: -(-end * fmt.bits // 8) -> end * fmt.bits // 8
accepted_partitions_cover_once, flat_layout: if extent.start < reached: -> if extent.end < reached:
accepted_partitions_cover_once, flat_layout: if reached < numel: -> if reached < numel - 1:
ranges_do_not_overflow, packing: -(-end * fmt.bits // 8) -> -(-end * fmt.bits * 64 // 512)
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_mistakes_are_refuted(mistake: str) -> None:
    """The solver finds numbers for which a wrong line gives something wrong."""
    place, _, change = mistake.partition(": ")
    name, module = place.split(", ")
    claim, (right, wrong) = globals()[name], change.split(" -> ")
    with pytest.raises(Refuted, match="does not follow: \\["):
        claim(modules(**{module: (right, wrong)}), *([16, 16] if claim in OF_BLOCKS else []))
