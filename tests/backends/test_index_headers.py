"""The index arithmetic of the C++ and CUDA headers says what ``layout/`` says, of which
tests/layout/test_proofs.py proves what holds of any size.

tests/backends/index_headers.cpp compiles the headers unchanged.
"""

import ctypes
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_emulation.emulator import needs_emulation
from zerocast.backends.cuda import tiling
from zerocast.backends.cuda.cuts import scale_cut
from zerocast.backends.cuda.kernel_sources import cuda_sources
from zerocast.layout import BlockGrid, Extent, ScaleLayout

pytestmark = needs_emulation
GRIDS = [BlockGrid(*dims) for dims in product((1, 2, 5), (1, 4, 7), (1, 2, 3, 6), (1, 3, 4))]
BLOCKS = [(1, 1), (1, 16), (16, 16), (1, 32), (32, 1), (32, 32), (1, 128), (128, 128), (3, 5)]
ROOTS = [str(cuda_sources())]
"""Where the headers are looked for; scripts/mutation.py puts a folder before it."""
NEAR = [2**31, 2**32, 2**40, 2**55]
"""The last one as in tests/layout/test_proofs.py: up to there nothing overflows."""


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., np.ndarray]:
    """``ask(function, *numbers)``: what a function of index_headers.cpp answers."""
    library = tmp_path_factory.mktemp("index") / "headers.so"
    # Without intrinsics, whose headers take four times as long to compile as all the rest.
    flags = ["-O0", "-U__SSE2__", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w"]
    # What C++ leaves undefined ends the process: an overflow, an index, a word that is not aligned.
    flags += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    source = Path(__file__).with_name("index_headers.cpp")
    command = ["g++", *flags, *(f"-I{root}" for root in ROOTS), source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"it does not compile: {done.stderr}"
    functions, answer = ctypes.CDLL(str(library)), (ctypes.c_int64 * 2**18)()

    def asked(function: str, *numbers: int) -> np.ndarray:
        count = functions[function]((ctypes.c_int64 * len(numbers))(*numbers), answer)
        return np.array(answer[:count], np.int64)

    return asked


def drawn_grids(seed: int, count: int) -> Iterator[tuple[BlockGrid, Extent]]:
    """Small ones and large ones, each with an extent of some hundreds of elements, at odd places;
    of the large ones near 2^31, 2^32, 2^40 and 2^55 elements.
    """
    rng = random.Random(seed)
    for i in range(count):
        block_h, block_w = rng.choice(BLOCKS)
        cols = rng.choice([rng.randint(1, 70), rng.randint(1, 1500)])
        middle = 0 if i % 2 else rng.choice(NEAR) - rng.randint(0, 2000)
        rows = middle // cols + rng.randint(1, 70)
        numel = rows * cols
        start = rng.randint(max(0, min(middle, numel - 1500)), numel - 1)
        end = rng.choice([numel, rng.randint(start, numel)])
        yield BlockGrid(rows, cols, block_h, block_w), Extent(start, min(end, start + 4000))


def test_a_grid_counts_its_blocks(ask) -> None:
    """As ``BlockGrid`` does; and the errors of a row inside a cut row of blocks stand two a block,
    row after row.
    """
    large = (grid for grid, _ in drawn_grids(0, 200))
    for grid in [*GRIDS, *large]:
        counts = [grid.numel, grid.blocks_h, grid.blocks_w, grid.num_blocks]
        errors = (3 * grid.block_h + 1) * grid.blocks_w * 2
        assert ask("of_grid", *astuple(grid), 3, 1).tolist() == [*counts, errors], grid


def test_a_place_is_found_where_the_list_has_it(ask) -> None:
    """And -1 is answered elsewhere: before, between and behind its values."""
    for length in range(12):
        values = [2**40 + 3 * i for i in range(length)]
        for value in range(2**40 - 1, 2**40 + 3 * length + 2):
            expected = values.index(value) if value in values else -1
            assert ask("find_in", length, value, *values) == [expected]


def test_an_element_of_a_shard_has_its_index_in_the_whole(ask) -> None:
    """Of some columns of a wider matrix, row by row; of some rows, where nothing is skipped. Fours
    are kept exactly where every multiple of four in a row begins fours in the whole.
    """
    for origin, skip, cols in product((0, 3, 4, 2**40 + 2, 2**40), (0, 1, 4, 6), (3, 4, 8, 10)):
        whole = [origin + e // cols * (cols + skip) + e % cols for e in range(8 * cols)]
        answers = [ask("in_whole", origin, skip, cols, e).tolist() for e in range(2 * cols)]
        assert [index for index, _ in answers] == whole[: 2 * cols]
        kept = all(index % 4 == 0 for index in whole[::4])
        within_rows = skip == 0 or cols % 4 == 0
        assert {keeps for _, keeps in answers} == {kept and within_rows}, (origin, skip, cols)


def test_strips_visit_each_element_once_in_its_block(ask) -> None:
    """Of any extent, and of some columns of it: with a strip's blocks side by side, no more than
    asked for, opened before its rows and closed after them; in at most three rectangles.
    """
    rng = random.Random(1)
    cuts = ((g, a, b) for g in GRIDS[:40] for a in range(g.numel) for b in (a + 1, g.numel))
    for grid, extent in [*((g, Extent(*cut)) for g, *cut in cuts), *drawn_grids(1, 150)]:
        ends = sorted(rng.sample(range(grid.blocks_w + 1), 2)) if rng.random() < 0.5 else [0, 0]
        col, col_end = (end * grid.block_w for end in ends)
        across = rng.choice([1, 2, 7, 512])
        region = extent.start, extent.end, col, col_end
        calls = ask("strips", *astuple(grid), *region, across).reshape(-1, 9)
        kinds, first, blocks, left, right, *_ = calls.T
        assert re.fullmatch("(01{1,3}2)*", "".join(map(str, kinds)))
        opened = np.maximum.accumulate(np.arange(len(kinds)) * (kinds == 0))
        assert (first == first[opened]).all()
        assert (blocks <= across).all()
        assert (left == first % grid.blocks_w * grid.block_w).all()
        assert (right == np.minimum(left + blocks * grid.block_w, grid.cols)).all()
        found = []
        for _, block, _, begin, end, element, column, count, rows in calls[kinds == 1].tolist():
            assert column + count <= end - begin
            found += [
                (element + r * grid.cols + k, block + (column + k) // grid.block_w)
                for r in range(rows) for k in range(count)
            ]  # fmt: skip
        last = col_end or grid.cols  # 0: no columns are named
        asked = [e for e in range(extent.start, extent.end) if col <= e % grid.cols < last]
        assert sorted(found) == [(e, grid.block_of(e)) for e in asked], (grid, extent, across)


def test_threads_share_all_elements(ask) -> None:
    """Each element of each item is one thread's; cuts lie on multiples of the item's granule, and
    no thread has more than its part and the rest of a granule.
    """
    rng = random.Random(2)
    for _ in range(150):
        threads, far = rng.randint(1, 5), rng.choice([0, *NEAR])
        starts = [far + rng.randint(0, 300) for _ in range(rng.randint(0, 4))]
        ends = [start + rng.choice([0, 1, rng.randint(0, 999), far]) for start in starts]
        spans = [(*ends, rng.choice([1, 2, 128, 96])) for ends in zip(starts, ends, strict=True)]
        pieces: list[list[tuple[int, int]]] = [[] for _ in spans]
        total = sum(ends) - sum(starts)
        for thread in range(threads):
            given = thread, threads, len(spans), *chain(*spans)
            had = ask("shared", *given).reshape(-1, 3).tolist()
            for item, begin, end in had:
                assert begin < end
                pieces[item].append((begin, end))
            share = sum(end - begin for _, begin, end in had)
            assert abs(share - total / threads) <= 2 * max((g for *_, g in spans), default=0) + 1
        for (start, end, granule), found in zip(spans, pieces, strict=True):
            assert [*(begin for begin, _ in found), end] == [start, *(end for _, end in found)]
            assert all(cut % granule == 0 for cut, _ in found[1:])


def test_as_many_threads_as_the_work_is_worth(ask) -> None:
    """Each does its part once: one for every 2^16 elements, at least one, and no more than asked
    for.
    """
    for elements, most in product((0, 2**16, 2**17 - 1, 2**17, 10 * 2**16), (1, 2, 3)):
        threads = max(1, min(most, elements >> 16))
        expected = [threads] * threads + [0] * (most - threads)
        assert ask("launched", elements, most).tolist() == expected, (elements, most)


def test_threads_share_no_block_and_no_byte(ask) -> None:
    """A shard is cut between rows of blocks of both planes where every thread has at least four;
    else, and of one block, at multiples of 128. No cut is odd. Whole rows of blocks are cast while
    they are measured.
    """
    blocks = [(1, 16), (1, 32), (16, 16), (32, 1), (1, 128), (128, 1), (3, 16), (1, 7), (2, 1)]
    shapes = product((1, 12, 400, 2**31), (33, 64), blocks, blocks)
    ways = product(shapes, (1, 3), (0, 1), (0, 1))
    for (rows, cols, one, other), threads, has_second, is_just_enough in ways:
        grids = BlockGrid(rows, cols, *one), BlockGrid(rows, cols, *other)
        start, end = rows * cols // 3 // 2 * 2, rows * cols - rows // 2
        end = min(end, start + 4 * threads * cols * one[0]) if is_just_enough else end
        numbers = [*astuple(grids[0]), *astuple(grids[1]), has_second, start, end, threads]
        begin, stop, granule, height, between, both, *whole = ask("cut_of", *numbers).tolist()
        assert (begin, stop) == (start, end)
        assert whole == [start + 1, end - 1, 1]
        heights = [one[0], other[0]] if has_second else [one[0]]
        most, least = max(heights), min(heights)
        assert height == cols * (most if most % least == 0 else most * least)
        several = has_second or grids[0].num_blocks > 1
        assert between == (several and (end - start) // height >= 4 * threads)
        assert granule == (height * (1 + height % 2) if between else 128)
        assert both == bool(has_second and one[0] == 1 and one[1] >= 16 and other[1] == 1)


def layouts() -> Iterator[ScaleLayout]:
    """Stored planes of all kinds."""
    grids = product((1, 5, 17, 70), (1, 7, 33, 300), BLOCKS[1:])
    multiples = (1, 1), (4, 128), (128, 4)
    for (rows, cols, (h, w)), padded, transposed in product(grids, multiples, (False, True)):
        for down, right in ((h, 1), (1, w), (1, 1)):
            grid = BlockGrid(rows, cols, h, w)
            yield ScaleLayout(grid, down, *padded, 77, right, transposed=transposed)


def test_stored_scales_stand_where_the_layout_says(ask) -> None:
    """Scales, repeats and padding, one and four bytes wide, by the CPU's loops and by the threads
    of a CUDA kernel, as many side by side as take a tile's columns four each; nothing is read
    behind the last block, or written beside the plane, nor by a tile beside its rows.
    """
    for number, layout in enumerate(layouts()):
        beside = layout.row_repeat if layout.transposed else layout.col_repeat
        if number % 7 or (beside > 1 and beside % 4):
            continue
        grid, (height, width) = layout.grid, layout.shape
        row, col = np.indices((height, width))
        row, col = (col, row) if layout.transposed else (row, col)
        block = row // layout.row_repeat * grid.blocks_w + col // layout.col_repeat
        exists = (row < layout.rows) & (col < layout.cols)
        itemsize = (1, 4)[number // 7 % 2]
        expected = np.pad(np.where(exists, block % 97 + 1, 77).flat, 4, constant_values=111)
        function, *cut = scale_cut(0, layout)
        tiles = function([0], *([each] for each in cut)).flatten().tolist()
        assert 4 * ask("across", width) == tiling.scale_tile(width, 1)[1]
        repeats = [layout.row_repeat, layout.col_repeat, layout.transposed]
        padding = 77 if itemsize == 1 else np.float32(77).view(np.int32)
        fields = [*astuple(grid), *repeats, layout.rows, layout.cols, height, width, padding]
        ways = [("cuda", [order, len(tiles) // 4, *tiles]) for order in (1, 2)]
        if not layout.transposed:
            ways.append(("cpu", [0, grid.blocks_h // 3]))
        for way, more in ways:
            stored = ask("stored_scales", *fields, itemsize, *more)
            assert (stored[:-2] == expected).all(), (way, layout)
        down, right = stored[-2:].tolist()
        repeat = layout.col_repeat if layout.transposed else layout.row_repeat
        stored = ask("stored_scales", *fields, itemsize, 1, 1, 0, 1, 3, 0)[:-2]
        others = np.delete(stored, slice(4 + repeat * width, 4 + 3 * repeat * width))
        assert (others == 111).all(), layout
        for i, j in product(range(min(grid.blocks_h, 3)), range(min(grid.blocks_w, 3))):
            place = divmod(i * down + j * right, width)
            first = i * layout.row_repeat, j * layout.col_repeat
            assert place == (first[::-1] if layout.transposed else first), layout


def test_tiles_visit_each_element_once_in_its_block(ask) -> None:
    """All tiles of a shard, by all threads: each element that is owned once, in its block, and no
    other. Vectors in one block, and aligned ones, are said to be so, and no others; among the tiles
    are some of two rows, some whose last vector has one column, and some that begin in a block.
    """
    edges = [BlockGrid(2, 37, 32, 5), BlockGrid(2, 3, 16, 16), BlockGrid(3, 513, 1, 3),
             BlockGrid(17, 1100, 16, 12)]  # fmt: skip
    for grid, extent in [*((g, Extent(0, g.numel)) for g in edges), *drawn_grids(3, 120)]:
        grid = tiling.tiled_grid(grid)
        tiles = tiling.shard_tiles([0], [grid], [extent]).tolist()
        assert_visited(ask, "of_tile", grid, extent, tiles)


@pytest.mark.parametrize("cols", [128, 256, 512])
def test_every_thread_works_in_a_narrow_tile(ask, cols: int) -> None:
    """Of a whole tile of 16 rows all 128 threads have as many vectors, and all whole."""
    grid = BlockGrid(16, cols, 16, 16)
    (tile,) = tiling.shard_tiles([0], [grid], [Extent(0, grid.numel)]).tolist()
    answer = ask("of_tile", *astuple(grid), 0, grid.numel, 4096, *tile)
    of_thread = answer[2:].reshape(128, 16, 12)[:, :, 4::2].sum((1, 2))
    assert of_thread.tolist() == [grid.numel // 128] * 128


def test_tiles_of_row_blocks_visit_each_element_once_in_its_blocks(ask) -> None:
    """In those of both planes."""
    rng = random.Random(4)
    for i in range(80):
        cols, height = rng.choice([16, 33, 128, 256, 700, 1024]), rng.choice([1, 3, 32, 128])
        rows = rng.randint(1, 90) + (0 if i % 2 else (2**32 + 1000) // cols)
        grid = BlockGrid(rows, cols, 1, rng.choice([16, 32, 128, 256, cols]))
        end = rows * cols - rng.randint(0, cols)
        extent = Extent(max(0, end - rng.randint(1, 9000)), max(end, 1))
        second = BlockGrid(rows, cols, height, 1)
        assert tiling.has_row_blocks(grid, second)
        tiles = tiling.row_block_tiles([0], [grid], [height], [extent]).tolist()
        assert_visited(ask, "of_tile_32x256", grid, extent, tiles, second)


def assert_visited(ask, function, grid, extent, tiles, second=None) -> None:
    """That these tiles have each element of the extent once, in its blocks, of which none has too
    many; and that none is of nothing.
    """
    found = [np.empty(0, np.int64)]
    for number, tile in enumerate(tiles):
        address = (4096, 4104)[number % 2]
        answer = ask(function, *astuple(grid), extent.start, extent.end, address, *tile)
        keep, aligned = answer[:2].tolist()
        vectors = answer[2 : -1 if second else None].reshape(-1, 12)
        at, whole, some, cut_off = vectors[:, :4].T
        owns, blocks, elements = vectors[:, 4::2] == 1, vectors[:, 5::2], at[:, None] + np.arange(4)
        own = owns.sum(1)
        # Of a vector that the tile's right end cuts off, the elements behind it count, too.
        assert (whole == (own == 4)).all(), (grid, extent, tile)
        assert ((some == (own > 0)) | (some & cut_off == 1)).all(), (grid, extent, tile)
        if keep:
            assert (blocks == blocks.max(1, keepdims=True))[owns].all(), (grid, extent, tile)
        assert own.any(), f"a tile of nothing: {grid}, {extent}, {tile}"
        assert second or tile[1] % 2**32 <= tiling.MAX_TILE_BLOCKS, (grid, extent, tile)
        found.append(elements[owns])
        assert (blocks == grid.block_of(elements))[owns].all(), (grid, extent, tile)
        if second:
            column = answer[-1] - tile[1] // 2**32 + elements % grid.cols
            assert (second.block_of(elements) == column)[owns].all()
        # Tiles begin at multiples of four columns.
        of_one = not second and tile[1] % 2**32 == 1
        assert keep == (bool(second) or of_one or grid.block_w % 4 == 0), (grid, tile)
        rows = range(tile[0] >> 32 & 0xFFFF)
        assert aligned == (address % 16 == 0 and all(r * grid.cols % 4 == 0 for r in rows))
        if aligned:
            start = tile[1] % 2**32 * grid.cols + tile[1] // 2**32 if second else tile[2]
            assert ((at[own == 4] - start) % 4 == 0).all(), (grid, extent, tile)
    visited = np.sort(np.concatenate(found))
    assert (visited == np.arange(extent.start, extent.end)).all(), (grid, extent)


def test_squares_of_codes_are_transposed(ask) -> None:
    """Of 4x4 bytes."""
    rng = random.Random(5)
    for _ in range(50):
        words = np.array([rng.getrandbits(32) for _ in range(4)], "<u4")
        answer = ask("transposed", *words.tolist())
        assert (answer == words.view(np.uint8).reshape(4, 4).T.copy().view("<u4")[:, 0]).all()
