"""The emulation sees what it is for: kernels with a mistake planted in their sources are caught."""

import re
from functools import cache

import pytest
import torch

from tests.cuda_emulation.emulator import (
    ORDERS,
    Emulator,
    KernelFault,
    Mistake,
    needs_emulation,
)
from tests.support.values import draw_values
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.sources import cuda_sources
from zerocast.backends.reference import ReferenceBackend
from zerocast.formats import E4M3
from zerocast.layout import BlockGrid, Extent, ScaleLayout
from zerocast.ops import (
    Backend,
    CastShard,
    DequantizeTarget,
    Float8Law,
    Law,
    Masters,
    NVFP4Law,
    ScaleTarget,
    TransposeTarget,
)

pytestmark = needs_emulation

BARRIER = "__syncthreads();"
SOURCES = ("partial_amax", "partial_cast", "transpose", "dequantize")


def results(
    backend: Backend, law: Law, grid: BlockGrid, extent: Extent, alone: bool = False
) -> list[torch.Tensor]:
    """Everything that the operations write for one weight, of which a rank owns ``extent``.

    The master lies among elements that are not the rank's, or ``alone``, with nothing around it.
    """
    bits = law.fmt.bits
    repeats = (grid.block_h, 128, 4) if bits == 4 else (1, 1, 1)
    layout = ScaleLayout(grid, *repeats)
    columnwise = ScaleLayout(grid.transposed(), *repeats)
    master = draw_values("normal", grid.numel, 5)
    # The first and the last element count, and more so those that are just not of the shard.
    master[[extent.start, extent.end - 1]] = 16
    master[[extent.start - 1, extent.end]] = 64
    amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
    codes = torch.full((grid.numel * bits // 8,), 0x5A, dtype=torch.uint8)
    scale_inv = torch.zeros(layout.shape, dtype=law.scale_dtype)
    stored = torch.zeros(1)
    copied = torch.zeros(grid.cols, -(-grid.rows * bits // 8), dtype=torch.uint8)
    copied_scales = torch.zeros(columnwise.shape, dtype=law.scale_dtype)
    out = torch.zeros(grid.rows, grid.cols)
    masters = Masters(1)
    owned = master[extent.start : extent.end]
    masters.bind([owned.clone() if alone else owned])
    block_amax, tensor_amax = amax[: grid.num_blocks], amax[-1:]
    shard = CastShard(0, extent, grid, torch.bfloat16, block_amax, tensor_amax, codes)
    backend.partial_amax([shard], masters)()
    backend.compute_scale(law, [ScaleTarget(layout, block_amax, tensor_amax, scale_inv, stored)])()
    backend.partial_cast(law, [shard], masters)()
    backend.transpose(
        [TransposeTarget(law.fmt, layout, codes, scale_inv, columnwise, copied, copied_scales)]
    )()
    backend.dequantize(law, [DequantizeTarget(layout, codes, scale_inv, stored, out)])()
    return [t.view(torch.uint8) for t in (amax, codes, scale_inv, copied, copied_scales, out)]


# The first shard starts one element into a whole tile, and ends one element before the end of one.
CASES = [
    (NVFP4Law(), BlockGrid(70, 1040, 16, 16), Extent(16 * 1040 + 1, 47 * 1040 + 1023)),
    (NVFP4Law(), BlockGrid(70, 1040, 16, 16), Extent(1041, 1040 * 66 + 3)),
    (Float8Law(E4M3), BlockGrid(140, 259, 128, 128), Extent(1, 35_001)),
    (Float8Law(E4M3), BlockGrid(140, 259, 140, 259), Extent(5, 36_002)),
]


@cache
def expected(case: int) -> list[torch.Tensor]:
    """What the reference writes."""
    return results(ReferenceBackend(), *CASES[case])


def is_caught(mistake: Mistake) -> bool:
    """Whether any order of threads shows other bytes than the reference's, or a fault."""
    for order in ORDERS:
        backend = CudaBackend(Emulator(order, max_grid=2, mistake=mistake))
        for case in range(len(CASES)):
            try:
                actual = results(backend, *CASES[case])
            except KernelFault:
                return True
            if not all(torch.equal(a, e) for a, e in zip(actual, expected(case), strict=True)):
                return True
    return False


def test_without_a_mistake_nothing_is_seen() -> None:
    """An edit that changes nothing passes, so what the other tests see is the mistake."""
    assert not is_caught(Mistake("partial_amax", "kernels/partial_amax.cu", BARRIER, BARRIER))


def barriers() -> list[tuple[str, int]]:
    """Every barrier of the kernels: its source, and its place among that one's."""
    root = cuda_sources() / "kernels"
    return [
        (source, nth)
        for source in SOURCES
        for nth in range((root / f"{source}.cu").read_text().count(BARRIER))
    ]


@pytest.mark.parametrize(("source", "nth"), barriers())
def test_a_missing_barrier(source: str, nth: int) -> None:
    """Each barrier of each kernel is needed, and its absence shows in some order of threads."""
    assert is_caught(Mistake(source, f"kernels/{source}.cu", BARRIER, "", nth))


def test_every_barrier_is_tried() -> None:
    """No kernel outside of SOURCES has a barrier."""
    files = (cuda_sources() / "kernels").glob("*.cu")
    assert {f.stem for f in files if BARRIER in f.read_text()} == set(SOURCES)


@pytest.mark.parametrize("source", ["partial_amax", "partial_cast"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("element < end", "element <= end"),
        ("element < end", "element + 1 < end"),
        ("element >= start", "element > start"),
        ("element >= start", "element + 1 >= start"),
        ("last < end", "last - 1 < end"),
        ("tile.element >= start", "tile.element + 1 >= start"),
    ],
)
def test_an_element_too_many_or_too_few(source: str, right: str, wrong: str) -> None:
    """An off-by-one at either end of a shard shows."""
    assert is_caught(Mistake(source, "include/zerocast/tiles.h", right, wrong))


def fault(right: str, wrong: str) -> str:
    """What the emulation says of partial_amax with a mistake in it."""
    mistake = Mistake("partial_amax", "kernels/partial_amax.cu", right, wrong)
    backend = CudaBackend(Emulator(mistake=mistake))
    with pytest.raises(KernelFault) as caught:
        results(backend, *CASES[3])
    return str(caught.value)


def test_a_divergent_barrier() -> None:
    """A barrier that half of the threads pass by is reported with both sides."""
    message = fault(BARRIER, f"if (threadIdx.x < 64) {BARRIER}")
    assert re.search(
        r"partial_amax: block 0: divergent barrier: thread 0 waits at __syncthreads of line \d+, "
        r"thread 64 at line \d+",
        message,
    ), message


def test_a_thread_that_left_before_a_barrier() -> None:
    """A barrier that a thread can no longer reach is reported."""
    message = fault(BARRIER, f"if (threadIdx.x == 7) return; {BARRIER}")
    assert re.search(r"divergent barrier: thread 0 waits .*, and thread 7 has ended", message)


def test_a_mask_without_the_caller() -> None:
    """A warp function called by a lane that is not in its mask is reported."""
    message = fault("__reduce_max_sync(0xFFFFFFFFu", "__reduce_max_sync(0xFFFFu")
    assert "thread 16 is not in the mask 0000ffff" in message


def test_lanes_that_do_not_come() -> None:
    """A warp function that some lanes of its mask never call is reported."""
    message = fault(
        "value = __reduce_max_sync(", "if (threadIdx.x != 3) value = __reduce_max_sync("
    )
    assert re.search(r"waits in the warp function of line \d+ for lanes that do not come", message)
