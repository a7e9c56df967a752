"""Matrices: the units of a cast: each weight that is not a stack, and each matrix of a stack.

A plan is given whole stacks (:class:`zerocast.cast.shard_spec.ShardSpec`); masters, gathers and
addresses refer to these. Amaxes, choices, scales and launches refer to single matrices. Only this
module divides stacks into matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.layout import NOTHING, Extent, Owners
from zerocast.numerics import AdamWUpdate, byte_span
from zerocast.tensors import QuantizedStorage


class Matrices:
    """The matrices of the weights of a plan, in order.

    Args:
        specs: the weights.

    Attributes:
        count: the number of matrices.
    """

    def __init__(self, specs: Sequence[ShardSpec]) -> None:
        self._specs, self.count = specs, 0
        self._of: list[range] = []  # for each weight the indices of its matrices
        for spec in specs:
            self._of.append(range(self.count, self.count + spec.storage.form.num_matrices))
            self.count = self._of[-1].stop

    def specs(self) -> list[ShardSpec]:
        """Return each matrix with what this rank owns of it, as views of the current buffers."""
        found: list[ShardSpec] = []
        for spec in self._specs:
            found += _matrices(spec) if spec.storage.stack else [spec]
        return found

    def places(self, groups: Mapping[Communicator, Sequence[int]]) -> dict[Communicator, list[int]]:
        """Return for each group the indices of the matrices of its weights."""
        return dict(zip(groups, self.of_each(groups.values()), strict=True))

    def of_each(self, lists: Iterable[Sequence[int]]) -> list[list[int]]:
        """Return for each list of indices of weights those of their matrices."""
        return [[at for i in places for at in self._of[i]] for places in lists]

    def owners(
        self, groups: Mapping[Communicator, Sequence[int]], owners: Mapping[Communicator, Owners]
    ) -> dict[Communicator, Owners]:
        """Return for each group the owners of the matrices of its weights, given the ``owners``."""
        return {comm: self._owners(places, owners[comm]) for comm, places in groups.items()}

    def _owners(self, places: Sequence[int], owners: Owners) -> Owners:
        counts = torch.tensor([len(self._of[i]) for i in places], dtype=torch.int64, device="cpu")
        if counts.eq(1).all():
            return owners
        shapes = [self._specs[i].storage.shape for i in places]
        numel = torch.tensor([s.numel() for s in shapes], dtype=torch.int64, device="cpu")
        numel = numel // counts.clamp(min=1)  # an empty stack has no owners
        # Repeat each shard for every matrix that it reaches: `number` is that in the weight.
        size = numel[owners.weight]
        first, last = owners.start // size, (owners.end - 1) // size
        reached = last - first + 1
        shard = torch.arange(len(owners), dtype=torch.int64, device="cpu").repeat_interleave(
            reached
        )
        earlier = (reached.cumsum(0) - reached)[shard]
        counted = torch.arange(len(shard), dtype=torch.int64, device="cpu")
        number = first[shard] + counted - earlier
        start, end = (bound[shard] - number * size[shard] for bound in (owners.start, owners.end))
        matrix = (counts.cumsum(0) - counts)[owners.weight[shard]] + number
        fields = matrix, owners.rank[shard], start.clamp(min=0), end.minimum(size[shard])
        return Owners.of(int(counts.sum()), torch.stack(fields, dim=1))

    def masters(self, masters: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return for each matrix its part of the weight's master, or None."""
        cut: list[torch.Tensor | None] = []
        for spec, master in zip(self._specs, masters, strict=True):
            if master is None or not spec.storage.stack:
                cut += [master] * spec.storage.form.num_matrices
                continue
            flat, start = master.view(-1), spec.extent.start
            for own in _extents(spec):
                cut.append(flat[own.start - start : own.end - start] if own else None)
        return cut

    def updates(self, updates: Sequence[AdamWUpdate | None]) -> list[AdamWUpdate | None]:
        """Return for each matrix its part of the weight's update, or None."""
        found: list[AdamWUpdate | None] = []
        for spec, update in zip(self._specs, updates, strict=True):
            if update is None or not spec.storage.stack:
                found += [update] * spec.storage.stack.numel()
                continue
            start = spec.extent.start
            for own in _extents(spec):
                found.append(update.of(own.start - start, own.end - start) if own else None)
        return found


def _extents(spec: ShardSpec) -> list[Extent]:
    """Return what this rank owns of each matrix, in elements of the stack."""
    numel = spec.storage.shape[-2:].numel()
    return [
        spec.extent.intersect(Extent(i * numel, (i + 1) * numel))
        for i in range(spec.storage.form.num_matrices)
    ]


def _matrices(spec: ShardSpec) -> list[ShardSpec]:
    storage, fmt = spec.storage, spec.storage.form.numerics.fmt
    first = byte_span(fmt, spec.extent.start, spec.extent.end)[0]
    numel, first_matrix, found = storage.shape[-2:].numel(), storage.first_matrix, list[ShardSpec]()
    for i, own in enumerate(_extents(spec)):
        begin, end = byte_span(fmt, own.start, own.end) if own else (first, first)
        codes = {
            name: spec.codes[name].view(-1)[begin - first : end - first] for name in spec.codes
        }
        place = f"[{first_matrix + i}]"  # in the whole stack, which tensor parallelism may split
        group = None if spec.amax_group is None else f"{spec.amax_group}{place}"
        extent = own.shifted(-i * numel) if own else NOTHING
        matrix: QuantizedStorage = storage.matrix(i)
        found.append(
            replace(
                spec, name=f"{spec.name}{place}", storage=matrix, extent=extent, codes=codes,
                amax_group=group,
            )
        )  # fmt: skip
    return found
