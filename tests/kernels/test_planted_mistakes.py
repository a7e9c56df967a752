"""The emulation sees what it is for: kernels with a mistake planted in their sources are caught.

CI plants the first mistake of each kind in each source, the nightly run all of them.
"""

import itertools
import re

import pytest
import torch

from tests.cuda_emulation.emulator import (
    ORDERS,
    Emulator,
    KernelFault,
    Mistake,
    needs_emulation,
)
from tests.kernels.subjects import SUBJECTS
from tests.support.child_process import in_child
from tests.support.nightly import first_of_each, nightly
from tests.support.operations import Written
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.kernel_sources import cuda_sources

pytestmark = needs_emulation

BARRIER = "__syncthreads();"
PLANES = ("nvfp4", "nvfp4 rows", "fp8 blocks", "fp8")
ROW_BLOCKS = ("mxfp8", "fp8 rows", "nvfp4 drawn")
DRAWN = ("nvfp4 drawn", "nvfp4 drawn in columns", "nvfp4 drawn from a four")
# Which subjects run the kernels of a source with barriers, or with ends of shards.
SOURCES = {
    "partial_amax": (*PLANES, *ROW_BLOCKS),
    "partial_select": (
        "4-over-6",
        "4-over-6, whole",
        "4-over-6, cast",
        "4-over-6, whole, cast",
        "4-over-6, anywhere",
    ),
    "partial_select_flat": ("4-over-6, flat",),
    "select": ("4-over-6", "4-over-6, cut", "4-over-6, flat"),
    "compute_scale_delayed": ("delayed",),
    "partial_cast": (*PLANES, "delayed", *ROW_BLOCKS, *DRAWN[1:]),
    "partial_amax_cast": ("mx in one pass", "fp8 in one pass"),
    "transpose": PLANES,
    "dequantize": (*PLANES, *ROW_BLOCKS),
    "fused_op": ("silu", "swiglu", "layernorm"),
    "expand_scales": ("expanded",),
    "digest": ("digests",),
    "compute_scale": ("nvfp4 drawn", "mxfp8"),
    "copy_codes": ("copied codes",),
    "adamw": ("adamw",),
}
BARRIER_FILES = {source: f"cuda/{source}.cu" for source in SOURCES}


def is_caught(mistake: Mistake, subjects: tuple[str, ...] | None = None) -> bool:
    """Whether any order of threads shows other bytes than the CPU's, or a fault."""
    return in_child(shows, mistake, subjects or SOURCES[mistake.source]) is not False


def shows(mistake: Mistake, subjects: tuple[str, ...]) -> bool:
    """As :func:`is_caught`, in a process whose memory the mistake may overwrite."""
    expected: dict[str, Written] = {}
    for order in ORDERS:
        backend = CudaBackend(Emulator(order, max_grid=2, mistake=mistake))
        for subject in subjects:
            if subject not in expected:
                expected[subject] = SUBJECTS[subject](CpuBackend(threads=1))
            try:
                actual = SUBJECTS[subject](backend)
            except KernelFault:
                return True
            for name, tensor in expected[subject].items():
                if not torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)):
                    return True
    return False


@pytest.mark.parametrize(("source", "subjects"), SOURCES.items())
def test_without_a_mistake_nothing_is_seen(source: str, subjects: tuple[str, ...]) -> None:
    """An edit that changes nothing passes, so what the other tests see is the mistake."""
    assert not is_caught(Mistake(source, f"cuda/{source}.cu", "zerocast", "zerocast"), subjects)


def test_fewer_vectors_under_way() -> None:
    """As many as sm_120 has of a cast give the same bytes."""
    fewer = Mistake("partial_cast", "cuda/partial_cast.cu", "MANY = 6;", "MANY = 4;")
    assert not is_caught(fewer)


def barriers() -> list[tuple[str, int]]:
    """Every barrier of the kernels: its source, and its place among that one's."""
    return [
        (source, nth)
        for source, file in BARRIER_FILES.items()
        for nth in range((cuda_sources() / file).read_text().count(BARRIER))
    ]


@first_of_each(("source", "nth"), barriers())
def test_a_missing_barrier(source: str, nth: int) -> None:
    """Each barrier of each kernel is needed, and its absence shows in some order of threads."""
    assert is_caught(Mistake(source, BARRIER_FILES[source], BARRIER, "", nth))


def test_every_barrier_is_tried() -> None:
    """No file outside of BARRIER_FILES has a barrier."""
    files = (cuda_sources() / "cuda").iterdir()
    found = {f"cuda/{f.name}" for f in files if BARRIER in f.read_text()}
    assert found <= set(BARRIER_FILES.values())


ENDS = [
    ("element < end", "element <= end"),
    ("element < end", "element + 1 < end"),
    ("element >= start", "element > start"),
    ("element >= start", "element + 1 >= start"),
    ("last >= end", "last - 1 >= end"),
    ("tile.element < start", "tile.element + 1 < start"),
    ("vectors, end - 3)", "vectors, end - 2)"),
    ("vectors, start)", "vectors, start - 1)"),
    ("vectors, end)", "vectors, end - 1)"),
    ("vectors, start - 3)", "vectors, start - 2)"),
]
IN_TILES = [*itertools.product(("partial_amax", "partial_cast"), (PLANES, ROW_BLOCKS))]
"""A source, and subjects in blocks or in blocks of rows."""


@first_of_each(
    ("right", "wrong", "source", "subjects"),
    [(*end, *IN_TILES[(i + j) % 4]) for i, end in enumerate(ENDS) for j in range(4)],
    columns=2,
)
def test_an_element_too_many_or_too_few(
    right: str, wrong: str, source: str, subjects: tuple[str, ...]
) -> None:
    """An off-by-one at either end of a shard shows, in every shape of tiles."""
    assert is_caught(Mistake(source, "cuda/tiles.h", right, wrong), subjects)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("start <= tile.element", "start <= tile.element + 1"), ("last <= end", "last <= end + 1")],
)
@pytest.mark.parametrize("source", ["partial_cast", "partial_select"])
def test_a_tile_that_is_taken_for_owned(source: str, right: str, wrong: str) -> None:
    """A tile of which another rank owns one element is not this rank's."""
    assert is_caught(Mistake(source, "cuda/tiles.h", right, wrong))


@first_of_each(
    ("source", "right", "wrong"),
    [
        ("partial_amax", "apart & others_", "apart & others_ / 2"),
        ("partial_amax", "(vectors_.count % 2)", "(false)"),
        ("partial_amax", "c < shape.cols", "c < shape.cols - 1"),
        ("partial_cast", "c < shape.cols", "c < shape.cols - 1"),
        ("partial_cast", "shape.first_column(shard.rowwise.grid)", "shape.col"),
        ("expand_scales", "plane.transposed ? 1 :", "plane.transposed ? 2 :"),
        ("expand_scales", "tile.plane == 0 ? target.rowwise", "tile.plane <= 1 ? target.rowwise"),
        ("partial_select", "+ width(n) <= shard.end", "+ width(n) <= shard.end + 1"),
        ("partial_select", "e < end", "e < end - 1"),
        ("partial_select", "element >= shard.start", "element + 1 >= shard.start"),
        ("partial_select", "!owns_all_ && n < rounds()", "!owns_all_ && n + 1 < rounds()"),
        ("partial_select", "(owns_all_ && lane_ < tile.rows)", "(owns_all_)"),
        ("partial_select", "if (cut >= 0)", "if (cut > 0)"),
        ("partial_select", "at + j < wanted", "at + j < wanted - 1"),
        ("partial_select", "row + down < tile_.rows", "row + down < tile_.rows - 1"),
        ("partial_select", "col + n * STEP < tile_.cols", "col + n * STEP + 4 < tile_.cols"),
        ("partial_select", "<MOST_ROUNDS - 1>", "<MOST_ROUNDS>"),
        ("partial_select", "? tile.lane_ : F::MAX_CODE", "? tile.lane_ : tile.lane_ % 8"),
        ("partial_select", "left + STEP - 1", "left"),
        ("partial_select", "tile.element >= shard.whole_begin", "tile.element >= shard.start"),
        ("partial_select", "tile.element < shard.whole_end", "tile.element < shard.end"),
        ("partial_select", "< TwoCodes::UNLIMITED", "< TwoCodes::LARGEST_OF_TWO"),
        ("partial_select", "odd_before, odd, 0x5410", "odd, odd, 0x5410"),
        ("partial_select", "at < wanted; at += 2", "at < wanted - 2; at += 2"),
        ("partial_select_flat", "end_ - begin_ < width_", "end_ - begin_ < width_ - 1"),
        ("partial_select_flat", "if (cut >= 0)", "if (cut > 0)"),
        ("partial_select_flat", "e < end_", "e < end_ - 1"),
        ("partial_select_flat", "at < width_; at += 2", "at < width_ - 2; at += 2"),
        ("partial_select_flat", "width_ - 4 * k", "width_ - 4 * k - 1"),
        ("partial_select_flat", "<< 16 * k", "<< 8 * k"),
        ("partial_select_flat", "start_ >= shard_.whole_begin", "start_ > shard_.whole_begin"),
        ("select", "j < width", "j < width - 1"),
        ("select", "block_row * grid.block_h", "block_row * CHOICE_SIDE"),
        ("select", "if (segment >= 0)", "if (segment > 0)"),
        ("select", "row < grid.rows", "row < grid.rows - 1"),
        ("digest", "at + i < end", "at + i < end - 1"),
        ("digest", "at + 4 * UNIT <= end", "at + 4 * UNIT <= end + 1"),
        ("digest", "whole = at >= begin", "whole = at + 1 >= begin"),
        ("digest", "end < stop ? end : stop", "end"),
        ("digest", "lane > 0", "lane > 1"),
        ("transpose", "row >= from.rows ||", "row + 1 >= from.rows ||"),
        ("transpose", "2 * tile.col + 1, 2", "2 * tile.col + 2, 2"),
        ("dequantize", "owns(vectors, 0, numel,", "owns(vectors, 0, numel - 1,"),
        ("dequantize", "4 * (element & 1)", "0 * (element & 1)"),
        ("compute_scale", ": plane.grid.blocks_w();", ": plane.grid.blocks_w() - 1;"),
        ("compute_scale", "rounding_counter[1]++", "rounding_counter[1] += 2"),
        ("copy_codes", "head + end * UNIT, count", "head + end * UNIT, count - 1"),
        ("copy_codes", "shift ? words[i] : 0", "0"),
        ("copy_codes", "row.high < 0", "row.high <= 0"),
        ("adamw", "c < tile.cols", "c < tile.cols - 1"),
        ("adamw", "u.max_exp_avg_sq[i] = v;", ""),
        ("compute_scale_delayed", "(state.length - 1) / THREADS", "(state.length - 2) / THREADS"),
        ("compute_scale_delayed", "i > 0 && i < state.length", "i > 1 && i < state.length"),
        ("compute_scale_delayed", "state.history[i - 1]", "state.history[i]"),
    ],
)
def test_one_too_many_or_too_few(source: str, right: str, wrong: str) -> None:
    """An off-by-one in blocks, rows and histories shows."""
    assert is_caught(Mistake(source, f"cuda/{source}.cu", right, wrong))


@first_of_each(
    ("subject", "right", "wrong"),
    [
        ("fp8", "half_ ^= 1", "half_ = 0"),
        ("fp8", "place.rows - 1 : 0", "place.rows : 0"),
        ("fp8", "word, k < count", "word, k < count - 1"),
        ("fp8", "b * A_BYTE < left", "b * A_BYTE + 1 < left"),
        ("mx", "col < cols ? rows", "col <= cols ? rows"),
        ("fp8", "cols_ - 4", "cols_ - 3"),
        ("mx", "k), k < count", "k), k + 1 < count"),
        ("mx", "k < place.count", "k < place.count - 1"),
        ("mx", "vector < place.rows", "vector + 1 < place.rows"),
        ("mx", "block_col * SIDE < cols_", "block_col * SIDE <= cols_"),
        ("mx", "exchanged[w][column]", "exchanged[0][column]"),
        ("mx", "row_end && col < cols_", "row_end && col <= cols_"),
    ],
)
def test_a_wrong_line_of_one_pass(subject: str, right: str, wrong: str) -> None:
    """Edges of patches, and which lane holds what, show."""
    mistake = Mistake("partial_amax_cast", "cuda/partial_amax_cast.cu", right, wrong)
    assert is_caught(mistake, (f"{subject} in one pass",))


@first_of_each(
    ("file", "right", "wrong"),
    [
        ("cast.h", "odd_ ? step : 0", "0"),
        ("cast.h", "odd_ ? half[0] : half[1]", "odd_ ? half[1] : half[0]"),
        ("cast.h", "odd_ ? half[1] : theirs", "theirs"),
        ("cast.h", "(u64)step / 4", "(u64)step / 8"),
        ("cast.h", "vectors.step + vectors.row_step * skip", "vectors.step"),
        ("cast.h", " + vectors.row * skip", ""),
        ("cast.h", "random_bits.in_whole(tile.element) % 8", "tile.element % 8"),
        ("cast.h", "EXCHANGES = true", "EXCHANGES = false"),
        ("partial_cast.cu", "encoder.takes_pairs(tile, grid)", "true"),
    ],
)
def test_draws_of_another_pair(file: str, right: str, wrong: str) -> None:
    """Random bits of other elements, and lanes that leave their neighbours alone, show."""
    assert is_caught(Mistake("partial_cast", f"cuda/{file}", right, wrong), DRAWN)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("count = cols - col;", "count = cols - col + 1;"),
        nightly("left >= 4 &&", "left >= 3 &&"),
        nightly("row < filled ? scales", "row <= filled ? scales"),
        nightly("row < end && row < stored", "row < end && row + 1 < stored"),
        nightly("2 * across >= stored_cols", "4 * across >= stored_cols"),
        nightly("i += BATCH * step", "i += (BATCH + 1) * step"),
    ],
)
def test_scales_past_an_edge(right: str, wrong: str) -> None:
    """A stored scale too many or too few, at an edge of the blocks or of the padding, shows."""
    assert is_caught(Mistake("expand_scales", "cuda/planes.h", right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("apart = CHOICE_SIDE / 4; apart > 0; apart /= 2", "apart = 1; apart < 8; apart *= 2"),
        nightly("apart = CHOICE_SIDE / 4;", "apart = CHOICE_SIDE / 8;"),
        nightly("sum < others : others", "sum <= others : others"),
    ],
)
@pytest.mark.parametrize("source", ["partial_select", "select"])
def test_another_order_of_sums(source: str, right: str, wrong: str) -> None:
    """Rows of a block that are added in another order, or left out, and another tie show."""
    assert is_caught(Mistake(source, "cuda/four_over_six.h", right, wrong))


KERNEL, FORMULAS = "cuda/fused_op.cu", "arithmetic/fused_op.h"


@first_of_each(
    ("subject", "file", "right", "wrong"),
    [
        ("silu", KERNEL, "count >= 4 ? 4", "count >= 3 ? 4"),
        ("silu", KERNEL, "if (j < left) to[j]", "if (j <= left) to[j]"),
        ("silu", KERNEL, "unit % pieces", "0"),
        ("silu", KERNEL, "unit < units", "unit + 1 < units"),
        ("silu", KERNEL, "x[j - 1] = x[j];", ""),
        ("silu", FORMULAS, "x * e.mantissa, x)", "x, x)"),
        ("swiglu", KERNEL, "at + table.cols,", "at,"),
        ("swiglu", KERNEL, "second[j - 1] = second[j];", ""),
        ("layernorm", KERNEL, "if (j < left) work", "work"),
        ("layernorm", KERNEL, "k += PIECE", "k += ACROSS"),
        ("layernorm", KERNEL, "n = LANES / 2", "n = LANES / 4"),
        ("layernorm", FORMULAS, "+ eps * power * power", "+ eps * 2.0f"),
        ("layernorm", FORMULAS, "add(part[i], part[i + n])", "add(part[i], part[i + 1])"),
    ],
    columns=2,
)
def test_a_wrong_line_of_a_fused_op(subject: str, file: str, right: str, wrong: str) -> None:
    """Wrong edges, indices and arithmetic show as other bytes."""
    assert is_caught(Mistake("fused_op", file, right, wrong), (subject,))


def fault(right: str, wrong: str) -> str:
    """What the emulation says of partial_amax with a mistake in it."""
    with pytest.raises(KernelFault) as caught:
        in_child(run_fp8, Mistake("partial_amax", "cuda/partial_amax.cu", right, wrong))
    return str(caught.value)


def run_fp8(mistake: Mistake) -> None:
    """One subject, in one order."""
    SUBJECTS["fp8"](CudaBackend(Emulator(mistake=mistake)))


def test_a_divergent_barrier() -> None:
    """A barrier that half of the threads pass by is reported with both sides."""
    message = fault(BARRIER, f"if (threadIdx.x < 64) {BARRIER}")
    assert re.search(
        r"partial_amax<Tile>: block 0: divergent barrier: thread 0 waits at __syncthreads of line "
        r"\d+, thread 64 at line \d+",
        message,
    ), message


def test_a_thread_that_left_before_a_barrier() -> None:
    """A barrier that a thread can no longer reach is reported."""
    message = fault(BARRIER, f"if (threadIdx.x == 7) return; {BARRIER}")
    assert re.search(r"divergent barrier: thread 0 waits .*, and thread 7 has ended", message)


def test_a_mask_without_the_caller() -> None:
    """A warp function called by a lane that is not in its mask is reported."""
    message = fault("__reduce_max_sync(ALL_LANES", "__reduce_max_sync(0xFFFFu")
    assert "thread 16 is not in the mask 0000ffff" in message


def test_lanes_that_do_not_come() -> None:
    """A warp function that some lanes of its mask never call is reported."""
    message = fault(
        "value_ = __reduce_max_sync(", "if (threadIdx.x != 3) value_ = __reduce_max_sync("
    )
    assert re.search(r"waits in the warp function of line \d+ for lanes that do not come", message)
