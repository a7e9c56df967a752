"""Refit: sends the weights of a trainer to a server while it trains.

It casts and sends the tensors of a :class:`zerocast.export.Export`. Between syncs it holds this
rank's pieces of them (codes, scales, unquantized values) as they were last sent, to compare the
next cast with. It holds no other copy in high precision.
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
from zerocast.refit.sha256 import gathered_checksums
from zerocast.tensors.digest import digest

NamedTensor = tuple[str, torch.Tensor]


@dataclass
class _Held:
    """The last sent state of one tensor: this rank's elements, flat, and the whole's checksum."""

    values: torch.Tensor
    checksum: int


class Refit(Uncopied):
    """A sender of a trainer's weights to servers. Every method is collective over the trainer's
    ranks, and each rank must exhaust a returned iterator before it trains again.

    Args:
        source: the trained model, its masters sharded by FSDP2 or held by ``optimizer``; or a
            ZeroOptimizer or a CastPlan, to send its weights alone.
        dialect: one of :data:`zerocast.export.DIALECTS`, or its name.
        hold_tensor_amax: whether to cast NVFP4 with a tensor amax that is held between casts. It is
            the smallest power of two that is at least the weight's amax. It is chosen again when
            the amax exceeds it, or shrinks to half of its value at that choice. Without this, a
            change of the amax in its last bit changes codes everywhere, and deltas are large.
        options: arguments of :class:`zerocast.export.Export`: ``optimizer``, ``from_masters``,
            ``include``, ``amax_groups``, ``dtype``, ``names``, ``bucket_bytes`` and ``group``.

    Attributes:
        version: the version of the latest exhausted :meth:`deltas`; 0 before the first.

    Raises:
        InputError, UnsupportedError: see :class:`zerocast.export.Export`.
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
        self._comm = self.export().comm

    def export(self) -> Export:
        """Return a new export of the source with its current parameters. Collective."""
        positional, options = self._arguments
        export = Export(*positional, **options)
        export.held_amaxes = self._held_amaxes
        return export

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the name and whole value of every tensor of the checkpoint, in the same order on
        all ranks.

        While a stage is gathered, the next is cast; while a stage is used, the next is gathered.

        Raises:
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        for tensors in self.export().stages():
            while tensors:
                name = next(iter(tensors))
                yield name, tensors.pop(name)

    @torch.no_grad()
    def shards(self) -> Iterator[Piece]:
        """Yield this rank's piece of every tensor of the checkpoint.

        It has codes, and the scales of the blocks that begin in them. Codes are not gathered.

        Raises:
            InputError: on every rank, if a shard of 4-bit codes begins or ends inside a byte.
            UnsupportedError: on every rank, if tensor parallelism splits a weight.
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        export = self.export()
        refuse_parts(export)
        check_cuts(export)
        for stage in itertools.chain(*export.plan_stages()):
            yield from self._cast(export, stage.entries)[-1]

    @torch.no_grad()
    def deltas(self, since: int | None = None) -> Iterator[NamedTensor]:
        """Yield a delta of every tensor of the checkpoint, for
        :meth:`zerocast.refit.Receiver.apply_delta`; the same on every rank.

        Args:
            since: the version that receivers have, which must be :attr:`version`. None is a full
                sync, with all elements of every tensor.

        Yields:
            The name, and a delta: uint8, see :mod:`zerocast.refit.delta`.

        Raises:
            InputError: on every rank, if ``since`` is not the latest version, or the previous
                deltas were not exhausted, so that a full sync is needed; or if a shard of 4-bit
                codes begins or ends inside a byte.
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        if since is not None:
            check_integer("since", since, 0, 2**62)
            if since != self.version or not self._is_complete:
                have = f"version {self.version}" if self._is_complete else "not complete"
                raise InputError(
                    f"deltas follow the version that was sent last, {have}, got since={since}; "
                    "give since=None for a full sync."
                )
        return self._deltas(since)

    def audit(self, config: Mapping[str, Any] | None = None) -> list[Travels]:
        """Return the format of every sent parameter and buffer, in the checkpoint's order.

        Args:
            config: the ``quantization_config`` that the server was started with, as a dictionary;
                None to compare with no configuration.

        Raises:
            InputError: on every rank, if ``config`` has another format, or a layer is quantized
                only at the server or only here. Layers are matched by their whole names.
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

    def checksums(self) -> dict[str, str]:
        """Return by name the hexadecimal SHA-256 of the bytes of every tensor of
        :meth:`named_tensors`, as safetensors stores them; the same on every rank.

        It is what ``python -m zerocast checksums`` finds in an export of the same parameters, and
        :meth:`zerocast.refit.Receiver.checksums` in what was received. Each tensor is gathered in
        its stage and hashed by one rank, so that no rank holds the model.

        Raises:
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        return gathered_checksums(self._comm, self.named_tensors())

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
            # Release the plan's other memory before whole tensors and their copies are made.
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
        """Cast a stage; return its plan, its tensors if they had to be gathered (under tensor
        parallelism), and this rank's pieces of all tensors.
        """
        plan = export.cast(stage)
        if plan is not None and plan.repeats_scales:
            plan.all_gather_scales()
        tensors: dict[str, torch.Tensor] = {}
        if any(entry.tp_shard is not None for entry in stage):
            tensors = export.gather(stage, plan)()
        pieces = list(pieces_of(export, stage, plan, tensors))
        judged = {entry.stored_name(entry.dialect.scales): entry for entry in stage}
        for entry in stage:
            if entry.is_value:
                judged |= dict.fromkeys(entry.parts or (entry.stored,), entry)
        with raising_together(export.comm):  # only the owner of a block has its scale
            for piece in pieces:
                if piece.name in judged:
                    own = judged[piece.name]
                    check_finite({own.name: own.judged(piece.values)})
        return plan, tensors, pieces

    # --- what was sent last ---

    def _hold(self, pieces: Sequence[Piece], codes: Container[str]) -> list[int]:
        """Hold ``pieces``, copying all except ``codes``; return digests of the whole tensors."""
        for piece in pieces:
            values = piece.values if piece.name in codes else piece.values.clone()
            self._held[piece.name] = _Held(values, 0)
        return _summed(pieces, [digest(piece.values, piece.start) for piece in pieces])

    def _changes(self, pieces: Sequence[Piece]) -> tuple[list[list[Segment]], list[int]]:
        """Hold ``pieces``; return all ranks' changes since those held before, and what these add to
        the digests of the whole tensors.
        """
        comparisons = []
        for piece in pieces:
            held = as_integers(self._held[piece.name].values)
            values = as_integers(piece.values.contiguous())
            comparisons.append(Comparison(held, values, piece.start))
        own, digests = changed_segments(comparisons)
        sums = _summed(pieces, digests)
        return _gathered(pieces, own), sums


def checksums(source: ExportSource, dialect: Dialect | str, **options: Any) -> dict[str, str]:
    """Return :meth:`Refit.checksums` of a new :class:`Refit` of these arguments. Collective."""
    return Refit(source, dialect, **options).checksums()


def _codes(export: Export, entries: Sequence[Entry]) -> set[str]:
    """Return the names of the codes that this rank casts into newly allocated memory."""
    return {
        entry.stored_name(entry.dialect.codes)
        for entry in entries
        if entry.shard is not None and entry.tp_shard is None
    }


# --- between ranks ---


def _by_comm(pieces: Sequence[Piece]) -> dict[Communicator, list[int]]:
    """Return the indices of ``pieces`` by their communicators."""
    found: dict[Communicator, list[int]] = {}
    for i, piece in enumerate(pieces):
        found.setdefault(piece.comm, []).append(i)
    return found


def _summed(pieces: Sequence[Piece], sums: Sequence[torch.Tensor]) -> list[int]:
    """Return, for each piece, the sum over its ranks of a number in ``sums``."""
    found = [0] * len(pieces)
    for comm, indices in _by_comm(pieces).items():
        together = torch.stack([sums[i] for i in indices])
        comm.all_reduce_sum_(together)
        for i, total in zip(indices, together.tolist(), strict=True):
            found[i] = total
    return found


def _gathered(pieces: Sequence[Piece], own: Sequence[Segment]) -> list[list[Segment]]:
    """Return, for each piece, the segments of all ranks with changes; one, if no rank has any."""
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
