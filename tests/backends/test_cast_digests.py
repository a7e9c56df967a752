"""Digests that a pass takes of the codes that it makes: those of the bytes that it writes."""

import pytest
import torch

import zerocast
from tests.support.instruction_sets import ISAS
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import KINDS, draw_values
from zerocast.backends.cpu import CpuBackend
from zerocast.layout import Extent
from zerocast.numerics import AdamWNumbers, AdamWUpdate, Masters
from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.cast_steps import CastSteps
from zerocast.tensors.digest import digest
from zerocast.tensors.quantize import quantize_into
from zerocast.tensors.weight_operands import Amaxes, tensor_operand

RECIPES: dict[str, tuple[Recipe, bool]] = {  # and whether there are columnwise codes
    "mxfp8": (MXFP8BlockScaling(), True),
    "e5m2": (MXFP8BlockScaling(fp8_format="e5m2"), True),
    "rows": (MXFP8BlockScaling(), False),
    "32x32": (MXFP8BlockScaling(enable_2d_quantization=True), True),
    "mxfp4": (MXFP4BlockScaling(), True),
    "block": (Float8BlockScaling(), False),
    "block, columns": (Float8BlockScaling(), True),
    "current": (Float8CurrentScaling(), True),
    "delayed": (DelayedScaling(), True),
    "nvfp4": (NVFP4BlockScaling(), True),
    "nvfp4, 1x16": (NVFP4BlockScaling(disable_2d_quantization=True), True),
    "nvfp4, drawn": (
        NVFP4BlockScaling(fp4_quant_fwd_weight=QParams(stochastic_rounding=True)),
        True,
    ),
}
# Of which a second cast is not like the first.
ADVANCING = ("delayed", "nvfp4, drawn")
# Columns that fill parts of a row of keys, that cross one, and that are no whole groups.
SHAPES = [(96, 64), (70, 4160), (33, 8256), (64, 2112), (129, 96), (2, 64, 192)]


class OneShard:
    """The steps of one weight, with digests, of which this rank owns a range; ``shown``: of which a
    gather takes those of others' codes.
    """

    def __init__(
        self, storage: QuantizedStorage, own: Extent, backend: CpuBackend, *, shown: bool = True
    ) -> None:
        slots = storage.amax_slots
        matrices = storage.matrices
        size = storage.shape.numel() // len(matrices)
        self.amax = torch.zeros(len(matrices), slots, dtype=torch.int32)
        self.masters = Masters(len(matrices))
        self.extents = [
            Extent(max(own.start - at, 0), max(min(own.end - at, size), 0))
            for at in range(0, storage.shape.numel(), size)
        ]
        operands = [
            (each, tensor_operand(each, i, self.extents[i], Amaxes.whole(each, self.amax[i])))
            for i, each in enumerate(matrices)
        ]
        self.steps = CastSteps(backend, operands, self.masters)
        self.steps.take_digests([storage] * len(matrices), shown={storage} if shown else ())
        self.storage, self.size = storage, size

    def cast(self, shard: torch.Tensor, update: AdamWUpdate | None = None) -> None:
        """Cast the shard, once an update has been made of it."""
        self.masters.bind(list(shard.split([extent.size for extent in self.extents])))
        self.amax.zero_()
        if update is None:
            self.steps.run("partial_amax")
        else:
            self.steps.update([update])
        self.steps.run("compute_scale", "partial_cast")

    def assert_digests(self, where: str) -> int:
        """They are those of the bytes that are there; return of how many."""
        names = {self.storage.buffers[name].data_ptr(): name for name in self.storage.gathered}
        total = 0
        for taken in self.steps.digests():
            for place, number in zip(taken.ranges, taken.sums, strict=True):
                assert place is not None
                address, begin, end = place
                codes = self.storage.buffers[names[address]].view(-1).view(torch.uint8)
                found = digest(codes[begin:end], begin)
                assert number == found, f"{where}, {names[address]}, bytes {begin} to {end}"
                total += end - begin
        return total


def made(recipe: str, shape: tuple[int, ...]) -> QuantizedStorage:
    """An unfilled weight."""
    its_recipe, columnwise = RECIPES[recipe]
    return zerocast.empty(shape, its_recipe, columnwise=columnwise).quantized_storage


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_of_what_is_cast(recipe: str, isa: str) -> None:
    """Of shards that begin and end anywhere, of values of every kind, twice each; by one thread and
    by three. The codes are those of a cast that takes none.
    """
    of_all = 0
    for k, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        for cut, own in enumerate([Extent(0, numel), Extent(numel // 5 + 3, numel - 7)]):
            kinds = KINDS if k % 2 == cut else KINDS[:1]
            one = OneShard(made(recipe, shape), own, CpuBackend(isa, threads=1 + 2 * cut))
            for seed, kind in enumerate(kinds):
                where, master = f"{kind} {shape} {own}", draw_values(kind, numel, seed)
                expected = made(recipe, shape)
                quantize_into(expected, master.view(shape))
                for _ in range(2):
                    one.cast(master[own.start : own.end])
                    of_all += one.assert_digests(where)
                is_same = own.size == numel and recipe not in ADVANCING
                for name in one.storage.gathered if is_same else ():
                    codes = (each.buffers[name] for each in (one.storage, expected))
                    assert_same_bytes(*codes, f"{where}, {name}")
    assert of_all > 1_000_000


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "recipe", ["mxfp8", "32x32", "mxfp4", "block, columns", "nvfp4", "current", "delayed"]
)
def test_of_what_an_update_casts(recipe: str, isa: str) -> None:
    """The same, in the pass that updates the masters; none under delayed scaling, of which that
    pass takes no digests.
    """
    shape = (96, 4160)
    numel = torch.Size(shape).numel()
    own = Extent(4160 * 3 + 5, numel)
    one = OneShard(made(recipe, shape), own, CpuBackend(isa, threads=2))
    master, average, square = draw_values("normal", own.size, 0), *torch.zeros(2, own.size)
    one.cast(master)  # nobody asks for these digests
    for step, lr in enumerate([0.01, 0.01, 0, 0, 0, 0.5], 1):
        numbers = AdamWNumbers.of(
            step, lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False
        )
        gradient = draw_values("normal", own.size, step)
        update = AdamWUpdate(master, gradient, average, square, None, numbers)
        one.cast(master, update)
        assert (one.assert_digests(f"step {step}") > numel // 3) == (recipe != "delayed")


def test_of_what_else_is_read() -> None:
    """None where the digest is taken as derived copies are made of the codes: of those that no
    gather shows.
    """
    storage = zerocast.empty((256, 128), "block").quantized_storage
    for shown in (False, True):
        one = OneShard(storage, Extent(0, 1 << 15), CpuBackend(), shown=shown)
        one.cast(draw_values("normal", 1 << 15, 0))
        assert bool(one.steps.rebuilt) != shown
        assert (one.steps.digests() == one.steps.rebuilt) != shown


def test_once_a_cast() -> None:
    """Not before the first cast, nor again after a gather, before which codes may be written."""
    one = OneShard(made("mxfp8", (64, 64)), Extent(0, 4096), CpuBackend())
    assert not one.steps.digests()
    one.cast(draw_values("normal", 4096, 0))
    assert one.steps.digests()
    assert not one.steps.digests()
