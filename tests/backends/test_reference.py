"""The reference backend keeps its bytes whatever the process around it has set, and its contract.

That the bytes are right is the claim of tests/vectors; here they are compared with themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.backends.reference import ReferenceBackend
from zerocast.backends.subnormals import keeping_subnormals
from zerocast.formats import E4M3, E5M2
from zerocast.layout import BlockGrid, Extent
from zerocast.ops import CastShard, Float8Law, Law, Masters, NVFP4Law
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor

REFERENCE = ReferenceBackend()
RECIPES = (zerocast.NVFP4BlockScaling(), zerocast.Float8CurrentScaling())


def subnormals(shape: tuple[int, int]) -> torch.Tensor:
    """Every element, and the amax, an FP32 subnormal; flushing would make them all zero."""
    numel = shape[0] * shape[1]
    return torch.arange(1, numel + 1, dtype=torch.int32).view(torch.float32).view(shape)


def cast(x: torch.Tensor, recipe: Recipe) -> tuple[QuantizedTensor, torch.Tensor]:
    """The weight, nominally FP32, and its values."""
    with zerocast.use_backend("reference"):
        weight = zerocast.quantize(x, recipe, dtype=torch.float32)
        return weight, weight.dequantize(torch.float32)


# --- what the process has set ---


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormals flushed in this thread, and in those that torch creates meanwhile."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a factory without a dtype makes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Refusing operations that are not deterministic, and filling fresh memory."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "subnormals flushed": flushing,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bytes_do_not_follow_a_setting_of_the_process(setting, recipe):
    """Codes, scales, amax, copies and values are those of a process that set nothing."""
    for x in (subnormals((33, 80)), torch.randn(33, 80), torch.full((16, 16), torch.nan)):
        weight, values = cast(x, recipe)
        with SETTINGS[setting]():
            set_weight, set_values = cast(x.clone().requires_grad_(), recipe)
        assert_same_storage(set_weight, weight, setting)
        assert_same_bytes(set_values, values, f"values, {setting}")


@contextmanager
def two_threads() -> Iterator[None]:
    """An operation on many elements is shared between two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_subnormals_of_a_tensor_that_torch_shares_among_threads(recipe):
    """Past 32,768 elements torch computes in its pool too; those threads have their own flags."""
    x = subnormals((512, 256))
    expected, _ = cast(x, recipe)
    with two_threads(), flushing():
        assert (x * 1 == 0).any(), "this test flushes in one thread at least"
        weight, _ = cast(x, recipe)
    assert_same_storage(weight, expected, "flushing")


def smallest_normal_halved() -> bool:
    """Whether this thread keeps subnormals."""
    return bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2)


def test_the_guard_restores_flag_and_threads():
    """After a launch, and after one that fails, the caller's flag and thread count are back."""
    seen = []

    @keeping_subnormals
    def launch() -> None:
        seen.append((smallest_normal_halved(), torch.get_num_threads()))

    @keeping_subnormals
    def fail() -> None:
        launch()
        raise RuntimeError("on purpose")

    with two_threads(), flushing():
        launch()
        with pytest.raises(RuntimeError, match="on purpose"):
            fail()
        assert not smallest_normal_halved()
        assert torch.get_num_threads() == 2
    launch()
    assert [kept for kept, _ in seen] == [True] * 3
    assert seen[0][1] == 1


# --- the contract of the operations, at places where an index goes wrong ---


def run_cast(
    shard: CastShard, master: torch.Tensor, law: Law, reduced: torch.Tensor | None = None
) -> None:
    """Amax, then codes, of one shard; with ``reduced`` as the tensor amax of all ranks."""
    masters = Masters(1)
    masters.bind([master])
    REFERENCE.partial_amax([shard], masters)()
    if reduced is not None:
        shard.tensor_amax.copy_(reduced)
    REFERENCE.partial_cast(law, [shard], masters)()


@pytest.mark.parametrize("law", [NVFP4Law(), Float8Law(E4M3), Float8Law(E5M2)], ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_shard_at_two_to_the_32_plus_5(law, size):
    """Its codes are those of the same elements at offset 5, in a buffer of the shard's own.

    The matrix has 2^16 columns and blocks of [2^16, 16]: the elements start at column 5 of row
    2^16, the second row of blocks, and nothing of the weight's size is ever allocated.
    """
    start, cols = 2**32 + 5, 2**16
    large, small = BlockGrid(2**17, cols, 2**16, 16), BlockGrid(1, cols, 1, 16)
    bits = law.fmt.bits
    master = torch.randn(size, generator=torch.Generator().manual_seed(0))
    results = []
    for grid, first in ((large, start), (small, 5)):
        amax = torch.zeros(grid.amax_slots, dtype=torch.int32)
        aligned = first - first % (8 // bits)
        codes = torch.full((2 + size,), 0xA5, dtype=torch.uint8)
        shard = CastShard(0, Extent(first, first + size), grid, torch.float32, amax[:-1], amax[-1:],
                          codes, aligned)  # fmt: skip
        run_cast(shard, master, law)
        touched = amax[:-1].nonzero().flatten()
        results.append((codes, touched - (grid is large) * 2**12, amax[:-1][touched], amax[-1:]))
    for what, got, expected in zip(("codes", "blocks", "amaxes", "amax"), *results, strict=True):
        assert_same_bytes(got, expected, what)
    blocks = {(5 + i) // 16 for i in range(size)}
    assert results[0][1].tolist() == sorted(blocks)


def test_a_shard_writes_its_nibbles_and_no_other():
    """Every range within 5 elements, in a weight filled with code 5; ours are -0, code 8."""
    grid = BlockGrid(1, 5, 1, 5)
    for start in range(6):
        for end in range(start, 6):
            codes = torch.full((3,), 0x55, dtype=torch.uint8)
            amax = torch.zeros(1, dtype=torch.int32)
            shard = CastShard(0, Extent(start, end), grid, torch.float32, amax, amax, codes)
            run_cast(shard, torch.full((end - start,), -0.0), NVFP4Law())
            written = [b >> s & 15 for b in codes.tolist() for s in (0, 4)]
            assert written == [8 if start <= i < end else 5 for i in range(6)], (start, end)


def test_the_amax_takes_maxima_and_keeps_what_earlier_shards_left():
    """A launch raises: an amax of 3 stays under 2, gives way to 4, and infinity to NaN."""
    grid = BlockGrid(1, 4, 1, 2)
    amax = torch.tensor([3.0, 0.0, 3.0]).view(torch.int32)
    masters = Masters(1)
    seen = []
    for pair in ([2.0, -1.0], [-4.0, 0.0], [1.0, -torch.inf], [-torch.nan, 1.0], [5.0, 5.0]):
        shard = CastShard(0, Extent(1, 3), grid, torch.float32, amax[:2], amax[2:], torch.empty(0))
        masters.bind([torch.tensor(pair)])
        REFERENCE.partial_amax([shard], masters)()
        seen.append(amax.tolist())
    two, three, four, five, one = (
        torch.tensor(v).view(torch.int32).item() for v in (2.0, 3.0, 4.0, 5.0, 1.0)
    )
    infinity, nan = 0x7F800000, 0x7FC00000
    assert one < two
    assert seen == [
        [three, one, three],
        [four, one, four],
        [four, infinity, infinity],
        [nan, infinity, nan],
        [nan, infinity, nan],
    ]
    assert five < infinity


def test_nothing_to_do_is_a_launch_that_does_nothing():
    """No weights, and shards without elements whose slots are bound to None."""
    grid = BlockGrid(2, 16, 16, 16)
    amax, codes = torch.zeros(1, dtype=torch.int32), torch.full((16,), 7, dtype=torch.uint8)
    masters = Masters(1)
    masters.bind([None])
    for shards in ([], [CastShard(0, Extent(9, 9), grid, torch.bfloat16, amax, amax, codes)]):
        REFERENCE.partial_amax(shards, masters)()
        REFERENCE.partial_cast(NVFP4Law(), shards, masters)()
    for prepare in (REFERENCE.transpose, lambda t: REFERENCE.compute_scale(NVFP4Law(), t),
                    lambda t: REFERENCE.dequantize(NVFP4Law(), t)):  # fmt: skip
        prepare([])()
    assert amax.tolist() == [0]
    assert codes.tolist() == [7] * 16
