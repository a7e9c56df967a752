"""``python -m zerocast reproduce FILE``: repeats a cast in which ranks differed.

The file is one that ``verify`` wrote (:mod:`zerocast.cast.fault_file`). The weight is cast whole by
the reference backend and by the cpu backend, and from the same shards on threads. The bytes that
the rank held, and the other casts, are compared with those of the reference backend.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zerocast.arguments import check_integer
from zerocast.backends import use_backend
from zerocast.cast.fault_file import read_fault
from zerocast.cast.whole_cast import Difference, HeldWeight, first_difference
from zerocast.comm import SingleRank
from zerocast.errors import InputError
from zerocast.lab.threaded_cast import cast_on_threads
from zerocast.layout import Extent
from zerocast.numerics import NUMERICS_VERSION
from zerocast.recipes import NOMINAL_DTYPES, Recipe, recipe_from_text
from zerocast.safe_files import printable
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard
from zerocast.tensors.quantize import quantize_into

THREADS = 16
"""The most threads used as ranks, each of which holds the weight; neighbouring ranks share one."""


class Fault:
    """The cast in a file.

    Attributes:
        described: the description in the header.
        name: the name of the weight.
        owners: the ranks that own elements of the weight, with their extents.
        cuts: the elements where these extents begin, in order, and the end; neighbouring extents
            are merged if there are more than :data:`THREADS`.
        title: the weight, its recipe and step, and the rank that held it.
        tensors: the tensors of the file, by name.

    Raises:
        InputError: if the cast cannot be repeated here.
    """

    def __init__(self, path: Path) -> None:
        self.described, self.tensors = read_fault(path)
        try:
            self._read(self.described)
        except Exception as error:  # a damaged file can make Python and torch raise anything
            raise InputError(
                f"{path} cannot be repeated: {type(error).__name__}: {error}."
            ) from error

    def _read(self, described: dict[str, Any]) -> None:
        if described["numerics version"] != NUMERICS_VERSION:
            raise InputError(
                f"the file is of numerics version {described['numerics version']}, and this "
                f"zerocast has {NUMERICS_VERSION}; install the version that wrote it."
            )
        if described["recipe"] is None:
            raise InputError(
                f"the recipe holds a function, which a file cannot: {described['scheme']}; read "
                "the tensors of the file with safetensors."
            )
        self.name = str(described["name"])
        self._recipe: Recipe = recipe_from_text(described["recipe"])
        self._dtype = next(d for d in NOMINAL_DTYPES if str(d) == f"torch.{described['dtype']}")
        self._shape = torch.Size(described["shape"])
        self._check("master", torch.float32, self._shape)
        self.owners = []
        for numbers in described["owners"]:
            rank, start, end = (check_integer("owners", n, 0, 2**62) for n in numbers)
            if not start <= end <= self._shape.numel():
                raise InputError(f"its owners must own elements of it, got [{start}, {end}).")
            self.owners.append((rank, Extent(start, end)))
        owned = sorted(extent for _, extent in self.owners if extent)
        cuts = [0, *(extent.end for extent in owned)]
        if not owned or cuts != [*(extent.start for extent in owned), self._shape.numel()]:
            raise InputError(f"its owners must own every element of it once, got {owned[:9]}.")
        each = math.ceil(len(owned) / THREADS)
        self.cuts = [*cuts[:-1:each], cuts[-1]]
        where = f"rank {described['rank']} of {described['ranks']}"
        self.title = (
            f"{self.name} {tuple(self._shape)} of {described['recipe']}, step {described['step']}, "
            f"as {where} held it"
        )
        self._tp_shard: TensorParallelShard | None = None
        if (place := described.get("tensor parallel shard")) is not None:
            whole, dim, start, size, *per_matrix = place
            self._tp_shard = TensorParallelShard(
                torch.Size(whole), dim, start, size, SingleRank(), *per_matrix
            )
        self.stands_alone = self._tp_shard is None and not described["grouped"]
        specs = self._recipe.buffers(self._shape, columnwise=bool(described["columnwise"]))
        needed = sum(math.prod(each.shape) * each.dtype.itemsize for each in specs.values())
        given = sum(tensor.nbytes for tensor in self.tensors.values())
        if needed > 8 * given + 2**20:
            raise InputError(
                f"its recipe must be that of its tensors, of {given} bytes, got one whose weight "
                f"has {needed} bytes."
            )
        self.held = self.weight()
        amaxes = len(self.held.matrices) * self.held.amax_slots
        self._check("amaxes", torch.int32, (amaxes,))
        held = {n.partition("/")[2]: t for n, t in self.tensors.items() if n.startswith("held/")}
        for name in list(self.held.buffers):
            if name in held:
                self.held.buffers[name].copy_(held[name].view_as(self.held.buffers[name]))
            else:
                del self.held.buffers[name]

    def _check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        given = self.tensors[name]
        if (tuple(given.shape), given.dtype) != (tuple(shape), dtype):
            raise InputError(
                f"its {name} must be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}."
            )

    def weight(self) -> QuantizedStorage:
        """Return the weight as it was before the cast."""
        made = QuantizedStorage.empty(
            self._shape, self._dtype, self._recipe, torch.device("cpu"),
            columnwise=bool(self.described["columnwise"]), tp_shard=self._tp_shard,
        )  # fmt: skip
        for name, tensor in self.tensors.items():
            kind, _, buffer = name.partition("/")
            if kind == "before":
                made.buffers[buffer].copy_(tensor)
        return made

    def cast_whole(self, backend: str) -> QuantizedStorage:
        """Return the whole weight, cast by this backend."""
        made = self.weight()
        with use_backend(backend):
            quantize_into(made, self.tensors["master"], least=self.tensors["amaxes"])
        return made

    def cast_sharded(self) -> list[QuantizedStorage]:
        """Cast the shards between ``cuts`` on threads; return the gathered weight of each."""
        found = cast_on_threads(
            lambda: QuantizedTensor(self.weight()), self.tensors["master"], self.cuts
        )
        return [weight.quantized_storage for weight in found]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", type=Path, metavar="FILE", help="that verify left")


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code, which is 1 if a cast has other bytes than the reference.

    Raises:
        InputError: if the file cannot be read, or its cast cannot be repeated.
    """
    fault, found = reproduce(given.path)
    faults = sum(each is not None for each in found.values())
    if given.json:
        casts = {what: None if each is None else asdict(each) for what, each in found.items()}
        return {"weight": fault.title, "casts": casts}, int(faults > 0)
    lines = [fault.title]
    for what, each in found.items():
        if each is None:
            lines.append(f"{what}: the bytes that the reference casts")
            continue
        owner = f", of the shard of rank {each.owner}," if each.owner >= 0 else ""
        lines.append(
            f"{what}: {each.count:,} of {each.buffer} differ from what the reference casts: "
            f"{each.held} at element {list(each.place)}{owner} where that is {each.cast}"
        )
    if faults == 1 and len(found) > 1:
        lines.append(
            "This machine casts the right bytes, so memory, the transport, other code or another "
            "recipe gave the wrong ones."
        )
    return "\n".join(map(printable, lines)), int(faults > 0)


def reproduce(path: Path) -> tuple[Fault, dict[str, Difference | None]]:
    """Return the cast in a file, and the first difference of what the rank held, and of each cast
    of it, from that of the reference backend; None where there is none.
    """
    fault = Fault(path)
    expected = fault.cast_whole("reference")
    casts = {"held": [fault.held], "cast whole by the cpu backend": [fault.cast_whole("cpu")]}
    if fault.stands_alone:
        shards = f"the shards of {len(fault.owners)} ranks on {len(fault.cuts) - 1} threads"
        casts[f"cast from {shards}"] = fault.cast_sharded()

    def first(storage: QuantizedStorage) -> Difference | None:
        return first_difference(HeldWeight(fault.name, storage, fault.owners, None), expected)

    return fault, {
        what: next(filter(None, map(first, storages)), None) for what, storages in casts.items()
    }
