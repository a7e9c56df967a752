"""What scripts/bench_cuda.py times: the steps of one rank over a set of weights.

They are launched as a plan launches them, from the same operands, but one by one, and with a count
of the bytes that each must move and of those of its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cuda_sets import Shape, rank_0

from zerocast.backends.cuda import CudaBackend, Launcher
from zerocast.numerics import Launch, Masters, TensorOperand
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.operands import tensor_operand

Work = Callable[[], object]

STEPS = ("memset", "amax", "scale", "cast", "transpose")


class Uploads:
    """A launcher that counts the bytes of the tables that pass through it to another."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._bytes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._launcher, name)

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        """As the other launcher's, counted."""
        self._bytes += table.nbytes
        return self._launcher.upload(table)

    def taken(self) -> int:
        """Bytes since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken


@dataclass(frozen=True)
class Prepared:
    """The steps of one rank over a set of weights, and what each must read and write."""

    steps: dict[str, Work]
    read: dict[str, int]
    written: dict[str, int]
    tables: dict[str, int]
    storages: list[QuantizedStorage]
    shards: list[TensorOperand]
    masters: Masters


def prepare(
    backend: CudaBackend, recipe: Recipe, shapes: Sequence[Shape], world_size: int, device: str
) -> Prepared:
    """Weights and masters of rank 0, and its launches; the reduction between them is no kernel."""
    extents = rank_0(list(shapes), world_size)
    storages = [
        QuantizedStorage.empty(shape, torch.bfloat16, recipe, torch.device(device), columnwise=True)
        for shape in shapes
    ]
    owned = sum(extent.size for extent in extents)
    flat = torch.randn(owned, device=device) if owned else torch.empty(0, device=device)
    pieces = iter(flat.split([extent.size for extent in extents if extent]))
    masters = Masters(len(shapes))
    masters.bind([next(pieces) if extent else None for extent in extents])
    slots = [storage.amax_slots for storage in storages]
    amax = torch.zeros(sum(slots), dtype=torch.int32, device=device)
    parts = amax.split(slots)
    shards = [
        tensor_operand(storage, i, extent, part)
        for i, (storage, extent, part) in enumerate(zip(storages, extents, parts, strict=True))
    ]
    counting = Uploads(backend.launcher)
    counted = CudaBackend(counting)

    def tables_of(launch: Launch) -> Launch:
        """Notes what was uploaded for a launch just made."""
        uploaded.append(counting.taken())
        return launch

    uploaded: list[int] = []
    steps: dict[str, Work] = {
        "memset": lambda: amax.zero_(),
        "amax": tables_of(counted.partial_amax(shards, masters)),
        "scale": tables_of(counted.compute_scale(recipe.numerics, shards)),
        "cast": tables_of(counted.partial_cast(recipe.numerics, shards, masters)),
        "transpose": tables_of(counted.transpose(recipe.numerics, shards)),
    }
    codes = owned * recipe.numerics.fmt.bits // 8
    planes = {
        name: sum(s.buffers[name].nbytes for s in storages if name in s.buffers)
        for name in (
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        )
    }  # fmt: skip
    repeat = storages[0].planes[1].scales.row_repeat
    read = {
        "memset": 0,
        "amax": 4 * owned,
        "scale": amax.nbytes,
        "cast": 4 * owned,
        # Each scale is needed once of the rows that repeat it.
        "transpose": planes["rowwise_data"] + planes["columnwise_scale_inv"] // repeat,
    }
    written = {
        "memset": amax.nbytes,
        "amax": 0,
        "scale": planes["rowwise_scale_inv"],
        "cast": codes,
        "transpose": planes["columnwise_data"] + planes["columnwise_scale_inv"],
    }
    tables = dict(zip(STEPS, (0, *uploaded), strict=True))
    return Prepared(steps, read, written, tables, storages, shards, masters)


def one_by_one(backend: CudaBackend, recipe: Recipe, work: Prepared) -> Launch:
    """Amax and cast, each weight by launches of its own."""
    launches = [
        launch
        for shard in work.shards
        if shard.extent
        for launch in (
            backend.partial_amax([shard], work.masters),
            backend.partial_cast(recipe.numerics, [shard], work.masters),
        )
    ]

    def run() -> None:
        for launch in launches:
            launch()

    return run
