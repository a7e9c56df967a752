"""Refit: the weights of a trainer, sent to a server while it trains.

What is sent, and how it is cast, is that of :class:`zerocast.export.Export`. A Refit is kept: it
holds the codes and scales of this rank's shards as they were sent last, which the next cast is
compared with. Nothing else is kept, and no copy in high precision.
"""

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerocast.arguments import check_flag, check_integer
from zerocast.backends.reference.digest_formula import as_integers
from zerocast.comm import Communicator, raising_together
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import InputError
from zerocast.export import Dialect, Export
from zerocast.export.entries import Entry, ExportSource
from zerocast.export.shard_plan import ShardPlan
from zerocast.export.unusable_values import check_finite
from zerocast.numerics import Comparison
from zerocast.refit.audit import Travels, check_config, travels
from zerocast.refit.delta import Segment, changed_segments, packed, whole_segment
from zerocast.refit.pieces import Piece, check_cuts, pieces_of, refuse_parts
from zerocast.tensors.digest import digest

NamedTensor = tuple[str, torch.Tensor]


@dataclass
class _Held:
    """What was sent last of one tensor: this rank's elements, flat, and the whole's checksum."""

    values: torch.Tensor
    checksum: int


class Refit(Uncopied):
    """Feeds servers from a trainer. Every method is collective over the ranks of the trainer, and
    what it returns is to be used up by all of them before they train on.

    Args:
        source: the trained model, its masters sharded by FSDP2 or held by ``optimizer``; or a
            ZeroOptimizer or a CastPlan, for their weights alone.
        dialect: one of :data:`zerocast.export.DIALECTS`, or its name.
        hold_tensor_amax: cast NVFP4 under a tensor amax that is held from one cast to the next: a
            power of two, the smallest that is not less than the weight's amax when it is taken, and
            taken anew when the amax has grown past it or shrunk to half of what it was then. The
            weights' own amaxes change by the last bit now and then, and with them codes
            everywhere; so deltas are small only under one that is held.
        options: as for :class:`zerocast.export.Export`: ``optimizer``, ``from_masters``,
            ``include``, ``amax_groups``, ``dtype``, ``names``, ``bucket_bytes`` and ``group``.

    Attributes:
        version: that of the latest :meth:`deltas` that was used up; 0 before the first.

    Raises:
        InputError, UnsupportedError: as Export.
    """

    instead = "make one of the other model"

    def __init__(
        self,
        source: ExportSource,
        dialect: Dialect | str,
        *,
        hold_tensor_amax: bool = False,
        **options: Any,
    ) -> None:
        self._arguments = (source, dialect), options
        self._held_amaxes: dict[str, torch.Tensor] | None = None
        if check_flag("hold_tensor_amax", hold_tensor_amax):
            self._held_amaxes = {}
        self._held: dict[str, _Held] = {}
        self._is_complete = False
        self.version = 0
        self.export()

    def export(self) -> Export:
        """Return what is exported of the source, its parameters as they are now. Collective."""
        positional, options = self._arguments
        export = Export(*positional, **options)
        export.held_amaxes = self._held_amaxes
        return export

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield every tensor of the checkpoint with its name, whole, in an order that is the same
        on all ranks; while one stage is gathered the next is cast, and its gather is under way
        while one is used.

        Raises:
            NonFiniteError: on every rank, where a weight holds a NaN or an infinity.
        """
        for tensors in self.export().stages():
            while tensors:
                name = next(iter(tensors))
                yield name, tensors.pop(name)

    @torch.no_grad()
    def shards(self) -> Iterator[Piece]:
        """Yield what this rank has of every tensor of the checkpoint, and where in the whole it
        lies: codes, and the scales of the blocks that begin in them. Nothing is gathered.

        Raises:
            InputError: on every rank, where a shard of 4-bit codes begins or ends inside a byte.
            UnsupportedError: on every rank, where tensor parallelism splits a weight.
            NonFiniteError: on every rank, where a weight holds a NaN or an infinity.
        """
        export = self.export()
        refuse_parts(export)
        check_cuts(export)
        for stage in itertools.chain(*export.plan_stages()):
            yield from self._cast(export, stage.entries)[-1]

    @torch.no_grad()
    def deltas(self, since: int | None = None) -> Iterator[NamedTensor]:
        """Yield every tensor of the checkpoint with what changed of it, for
        :meth:`zerocast.refit.Receiver.apply_delta`: the same on every rank.

        Args:
            since: the version that receivers have: :attr:`version`. None is a full sync: all of
                every tensor.

        Yields:
            The name, and a delta: uint8, see :mod:`zerocast.refit.delta`.

        Raises:
            InputError: on every rank, for another version than the latest, or after deltas that
                were not used up: a full sync is needed. As :meth:`shards`, too.
            NonFiniteError: on every rank, where a weight holds a NaN or an infinity.
        """
        if since is not None:
            check_integer("since", since, 0, 2**62)
            if since != self.version or not self._is_complete:
                have = f"version {self.version}" if self._is_complete else "none that was used up"
                raise InputError(
                    f"deltas follow the version that was sent last, which is {have}, got "
                    f"since={since}; give since=None for a full sync."
                )
        return self._deltas(since)

    def audit(self, config: Mapping[str, Any] | None = None) -> list[Travels]:
        """Return of every parameter and buffer what it travels as, in the checkpoint's order.

        Args:
            config: the ``quantization_config`` that the server was started with, as a dictionary;
                None compares with nothing.

        Raises:
            InputError: on every rank, where ``config`` is of another format, or the server expects
                a linear layer quantized that travels in high precision, or the other way round.
                Layers are matched by their whole names.
        """
        export = self.export()
        with raising_together(export.comm):
            if config is not None:
                check_config(export, config)
        return travels(export)

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return name, dtype and shape of every tensor of :meth:`named_tensors`, in its order."""
        return [
            (name, tensor.dtype, tensor.shape)
            for each in travels(self.export())
            for name, tensor in each.tensors.items()
        ]

    @torch.no_grad()
    def _deltas(self, since: int | None) -> Iterator[NamedTensor]:
        export, version, self._is_complete = self.export(), self.version + 1, False
        check_cuts(export)
        for stage in itertools.chain(*export.plan_stages()):
            yield from self._deltas_of(export, stage.entries, since, version)
        self.version, self._is_complete = version, True

    def _deltas_of(
        self, export: Export, stage: Sequence[Entry], since: int | None, version: int
    ) -> Iterator[NamedTensor]:
        plan, tensors, pieces = self._cast(export, stage)
        if since is None:
            tensors = tensors or export.gather(stage, plan)()
            # What is not held any longer would stand beside the whole tensors and their copies.
            changes, plan = self._hold(pieces, _codes(export, stage)), None
            pieces = [replace(p, values=self._held[p.name].values) for p in pieces]
            found = [[whole_segment(tensors[piece.name])] for piece in pieces]
        else:
            found, changes = self._changes(pieces)
        for piece, segments, change in zip(pieces, found, changes, strict=True):
            held = self._held[piece.name]
            held.checksum = (held.checksum + change + 2**63) % 2**64 - 2**63  # an int64
            yield (
                piece.name,
                packed(
                    segments,
                    since=since,
                    version=version,
                    total=held.checksum,
                    shape=piece.shape,
                    dtype=piece.values.dtype,
                ),
            )

    def _cast(
        self, export: Export, stage: Sequence[Entry]
    ) -> tuple[ShardPlan | None, dict[str, torch.Tensor], list[Piece]]:
        """Cast a stage; return its plan, its tensors where they had to be gathered (under tensor
        parallelism), and this rank's pieces of all of them.
        """
        plan = export.cast(stage)
        if plan is not None and plan.repeats_scales:
            plan.all_gather_scales()
        tensors: dict[str, torch.Tensor] = {}
        if any(entry.tp_shard is not None for entry in stage):
            tensors = export.gather(stage, plan)()
        pieces = list(pieces_of(export, stage, plan, tensors))
        names = {
            entry.stored_name(export.dialect.of(entry.name).scales): entry.name for entry in stage
        }
        for entry in stage:
            if entry.is_value:
                names |= dict.fromkeys(entry.parts or (entry.stored,), entry.name)
        with raising_together(export.comm):  # its owner alone knows the scale of a block
            for piece in pieces:
                if piece.name in names:
                    check_finite({names[piece.name]: piece.values})
        return plan, tensors, pieces

    # --- what was sent last ---

    def _hold(self, pieces: Sequence[Piece], codes: Container[str]) -> list[int]:
        """Hold ``pieces``, of which those in ``codes`` are memory of their own; return the digests
        of the whole tensors.
        """
        for piece in pieces:
            values = piece.values if piece.name in codes else piece.values.clone()
            self._held[piece.name] = _Held(values, 0)
        return _summed(pieces, [digest(piece.values, piece.start) for piece in pieces])

    def _changes(self, pieces: Sequence[Piece]) -> tuple[list[list[Segment]], list[int]]:
        """Hold ``pieces``; return what all ranks' differ in from those that were held, and by how
        much it changes the digests of the whole tensors.
        """
        comparisons = []
        for piece in pieces:
            held = as_integers(self._held[piece.name].values)
            values = as_integers(piece.values.contiguous())
            comparisons.append(Comparison(held, values, piece.start))
        own, digests = changed_segments(comparisons)
        sums = _summed(pieces, digests)
        return _gathered(pieces, own), sums


def _codes(export: Export, entries: Sequence[Entry]) -> set[str]:
    """Return the names of the codes that this rank casts into memory of its own."""
    return {
        entry.stored_name(export.dialect.of(entry.name).codes)
        for entry in entries
        if entry.shard is not None and entry.tp_shard is None
    }


# --- between ranks ---


def _by_comm(pieces: Sequence[Piece]) -> dict[Communicator, list[int]]:
    """Return the places of ``pieces`` by the ranks that make up their wholes."""
    found: dict[Communicator, list[int]] = {}
    for i, piece in enumerate(pieces):
        found.setdefault(piece.comm, []).append(i)
    return found


def _summed(pieces: Sequence[Piece], sums: Sequence[torch.Tensor]) -> list[int]:
    """Return the sums over all ranks of a number for each piece."""
    found = [0] * len(pieces)
    for comm, indices in _by_comm(pieces).items():
        together = torch.stack([sums[i] for i in indices])
        comm.all_reduce_sum_(together)
        for i, total in zip(indices, together.tolist(), strict=True):
            found[i] = total
    return found


def _gathered(pieces: Sequence[Piece], own: Sequence[Segment]) -> list[list[Segment]]:
    """Return, for each piece, the segments of all ranks that changed anything."""
    found: list[list[Segment]] = [[] for _ in pieces]
    for comm, indices in _by_comm(pieces).items():
        if comm.size == 1:  # nothing to gather, and nothing to copy for it
            for i in indices:
                found[i] = [own[i]]
            continue
        device = own[indices[0]].data.device
        described = torch.zeros(comm.size, len(indices), 4, dtype=torch.int64, device=device)
        described[comm.rank] = torch.tensor(
            [[own[i].first, own[i].runs, own[i].count, own[i].data.nbytes] for i in indices],
            dtype=torch.int64,
            device=device,
        )
        comm.all_gather_(described.view(-1))
        rows = described.tolist()
        counts = [sum(nbytes for *_, nbytes in of_rank) for of_rank in rows]
        gathered = comm.all_gather_parts(torch.cat([own[i].data for i in indices]), counts)
        for of_rank, data in zip(rows, gathered, strict=True):
            parts = data.split([nbytes for *_, nbytes in of_rank])
            for i, (first, runs, count, _), part in zip(indices, of_rank, parts, strict=True):
                if count or not found[i]:
                    found[i].append(Segment(first, runs, count, part))
    return found
