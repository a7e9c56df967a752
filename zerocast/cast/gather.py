"""The all-gather of codes, for any partition.

Rank r's chunk is the bytes of its shards, weight by weight in the plan's order. Chunks are in rank
order. If the weights' codes are in memory in this order, the gather runs in place. This is so for
views into one flat buffer that ranks own in ranges, as in ZeRO optimizers, and for a single weight.
Only codes that were cast into another buffer are then copied in. Otherwise the chunks are copied
into a staging buffer and stored from it, nibble by nibble if two ranks share a byte. In both cases
the same bytes are sent, so ranks may differ in this. The choice, and the destination of every byte,
is made once, and again if codes have moved. A gather is one launch before the collective and one
after it.

On a CPU a plan keeps its largest staging buffer for the next gather: the CPU allocator returns such
memory to the system, and mapping its pages again took a tenth of a step. On a GPU the caching
allocator keeps it and can reuse it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zerocast.backends import backend_for
from zerocast.cast.consistency import raise_in_all
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Attempt, Communicator, alone
from zerocast.errors import InputError
from zerocast.layout import Extent, Owners
from zerocast.numerics import CodeCopy, LaunchOn, SharedByte, byte_span
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.ledger import watch

PLANES = ("rowwise_data", "columnwise_data")
"""The gathered planes; columnwise codes only if a recipe quantizes them independently."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One rank's bytes of one weight; ``staged`` is their range in the staging buffer."""

    rank: int
    weight: int
    extent: Extent
    first: int
    last: int
    staged: slice


def code_gathers(
    specs: Sequence[ShardSpec],
    members: Mapping[Communicator, Sequence[int]],
    owners: Mapping[Communicator, Owners],
    one_by_one_from: int | None = None,
) -> list[CodeGather]:
    """Return the gathers of all planes of all groups.

    Args:
        specs: the weights.
        members: for each group the indices of its weights.
        owners: for each group the owners of its members.
        one_by_one_from: weights of at least this many elements are gathered alone; None: no weight.
    """
    gathers: list[CodeGather] = []
    spare: list[torch.Tensor] = []
    for comm, indices in members.items():
        together: list[int] = []  # indices into the members
        one_by_one: list[list[int]] = []
        for place, i in enumerate(indices):
            if one_by_one_from is not None and specs[i].storage.shape.numel() >= one_by_one_from:
                one_by_one.append([place])
            else:
                together.append(place)
        for places in filter(None, [together, *one_by_one]):
            own = [specs[indices[place]] for place in places]
            its_owners = owners[comm].of_weights(places) if one_by_one else owners[comm]
            gathers += [
                CodeGather(comm, own, its_owners, plane, spare)
                for plane in PLANES
                if any(plane in spec.storage.gathered for spec in own)
            ]
    return gathers


def require_codes(comms: Sequence[Communicator], gathers: Sequence[CodeGather]) -> None:
    """Raise :class:`InputError` on all ranks if a weight lacks codes on any.

    Collective if there are ``gathers``.
    """
    if not gathers:
        return
    attempt = Attempt()
    with attempt:
        for gather in gathers:
            gather.require_codes()
    raise_in_all(comms, attempt.error)


class CodeGather:
    """A gather of one plane of codes of one group's weights.

    Args:
        comm: the group.
        specs: the group's weights as this rank sees them; those that do not gather this plane
            are skipped.
        owners: the owners of the group's weights.
        plane: one of :data:`PLANES`.
        spare: at most one unused staging buffer, shared by all gathers of the plan.
    """

    def __init__(
        self,
        comm: Communicator,
        specs: Sequence[ShardSpec],
        owners: Owners,
        plane: str,
        spare: list[torch.Tensor],
    ) -> None:
        self._comm, self._spare = comm, spare
        self._specs = specs
        self._plane = plane
        self._device = specs[0].storage.device
        self._backend = backend_for(self._device)
        self._chunks: list[_Chunk] = []
        self._counts = [0] * comm.size
        gathers = [plane in spec.storage.gathered for spec in specs]
        formats = [spec.storage.form.numerics.fmt for spec in specs]
        offset = 0
        for i, rank, start, end in owners.by_rank():
            if gathers[i]:
                first, last = byte_span(formats[i], start, end)
                staged = slice(offset, offset + last - first)
                self._chunks.append(_Chunk(rank, i, Extent(start, end), first, last, staged))
                self._counts[rank] += last - first
                offset = staged.stop
        self._codes: list[torch.Tensor | None] = [None] * len(specs)
        self._is_cast_elsewhere = any(plane in spec.codes for spec in specs)
        self._watched = watch(())
        # Decided for codes at these addresses:
        self._is_decided = False
        self._in_place: torch.Tensor | None = None
        self._stage: LaunchOn | None = None
        self._store: LaunchOn | None = None
        self.look()

    def look(self) -> None:
        """Find the weights' codes, and drop what was prepared for codes that have moved.

        Codes that a weight has dropped since the cast are still gathered: other ranks need them.
        """
        for i, spec in enumerate(self._specs):
            codes = spec.storage.buffers.get(self._plane)
            if codes is not None:
                self._codes[i] = codes
        own = [spec.codes[self._plane] for spec in self._specs if self._plane in spec.codes]
        found = [codes for codes in self._codes if codes is not None] + own
        earlier, self._watched = self._watched, watch(found)
        if self._watched.found != earlier.found:
            self._is_decided = False
            self._in_place = self._stage = self._store = None

    @property
    def lacks_codes(self) -> bool:
        """Whether a weight holds no codes to receive the gathered ones."""
        return any(self._codes[chunk.weight] is None for chunk in self._chunks)

    def require_codes(self) -> None:
        """Raise :class:`InputError` if a weight :attr:`lacks_codes`."""
        self._follow()
        for chunk in self._chunks:
            self._flat(chunk.weight)

    def start(self) -> Callable[[], None]:
        """Start the gather of all ranks' codes; return the function that ends it.

        Call that function once. Weights without codes may be given buffers before that call.
        """
        with alone():
            buffer = self._filled()
        wait = self._comm.start_all_gather_(buffer, self._counts)
        if buffer is self._in_place:
            return wait

        def end() -> None:
            wait()
            with alone():
                self._store_from(buffer)
                # After an error the buffer is not kept: other ranks may still write it.
                if self._device.type == "cpu":
                    self._spare[:] = [max([*self._spare, buffer], key=_memory)]

        return end

    def start_into(self, weights: Mapping[str, QuantizedStorage]) -> Callable[[], None]:
        """Start the gather into ``weights``, by name, instead of the plan's weights.

        The buffers in which this rank's codes were cast are released.
        """
        self._specs = [replace(spec, storage=weights[spec.name]) for spec in self._specs]
        self.look()
        end = self.start()
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._specs = [
            replace(spec, codes=dict.fromkeys(spec.codes, nothing)) for spec in self._specs
        ]
        self.look()
        self._stage = None
        return end

    def _filled(self) -> torch.Tensor:
        """Return the codes in gather order, or a staging buffer, with what this rank sends."""
        buffer = self._find_in_place()
        if buffer is not None and not self._is_cast_elsewhere:
            return buffer
        if self._stage is None:
            self._stage = self._backend.stage_codes(self._own_copies())
        if buffer is None:
            buffer = self._staging(sum(self._counts))
        self._stage(buffer)
        return buffer

    def _find_in_place(self) -> torch.Tensor | None:
        """Return the weights' codes as one flat tensor, if they are in gather order in memory."""
        self._follow()
        if not self._is_decided:
            self._in_place, self._is_decided = self._contiguous_codes(), True
        return self._in_place

    @torch.inference_mode(False)  # a tensor made in it could not be written outside of it
    def _staging(self, size: int) -> torch.Tensor:
        if self._spare and _memory(self._spare[0]) >= size:
            return self._spare.pop().as_strided((size,), (1,))
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _store_from(self, staging: torch.Tensor) -> None:
        """Store what ``staging`` holds, except what is in the weights already."""
        self._follow()
        if self._store is None:
            self._store = self._backend.store_codes(*self._received())
        self._store(staging)

    def _follow(self) -> None:
        """Find the codes again if they may have moved."""
        if self._watched.is_announced or self._watched.changed():
            self.look()

    def _own_copies(self) -> list[CodeCopy]:
        """Return the copies of what this rank sends."""
        copies = []
        for chunk in self._chunks:
            if chunk.rank == self._comm.rank:
                codes = self._specs[chunk.weight].own_codes(self._plane)
                if codes is not None and not self._is_in_place(codes, chunk):
                    copies.append(CodeCopy(codes, chunk.staged.start))
                    continue
                if self._in_place is not None:
                    continue
                own = self._flat(chunk.weight)[chunk.first : chunk.last]
                copies.append(CodeCopy(own, chunk.staged.start))
        return copies

    def _is_in_place(self, codes: torch.Tensor, chunk: _Chunk) -> bool:
        """Return whether codes cast into another buffer are already at their gathered place."""
        if self._in_place is None:
            return False
        return codes.data_ptr() == self._flat(chunk.weight).data_ptr() + chunk.first

    def _received(self) -> tuple[list[CodeCopy], list[SharedByte]]:
        """Return what is stored from the staging buffer, except what is in the weights already.

        These are whole bytes, and bytes that two chunks share, with one nibble of each.
        """
        copies: list[CodeCopy] = []
        halves: dict[tuple[int, int], dict[str, int]] = {}
        changed: set[tuple[int, int]] = set()
        for chunk in self._chunks:
            spec = self._specs[chunk.weight]
            stored = chunk.rank != self._comm.rank or self._plane in spec.codes
            head, tail = self._cut_bytes(chunk)
            first, last = chunk.first + head, chunk.last - tail
            if stored and first < last:
                whole = self._flat(chunk.weight)[first:last]
                copies.append(CodeCopy(whole, chunk.staged.start + head))
            if head:
                halves.setdefault((chunk.weight, chunk.first), {})["high"] = chunk.staged.start
            if tail:
                halves.setdefault((chunk.weight, last), {})["low"] = chunk.staged.stop - 1
            if stored:
                changed |= {
                    (chunk.weight, at) for at, cut in ((chunk.first, head), (last, tail)) if cut
                }
        return copies, [
            SharedByte(self._flat(weight)[byte : byte + 1], **halves[weight, byte])
            for weight, byte in sorted(changed)
        ]

    def _cut_bytes(self, chunk: _Chunk) -> tuple[int, int]:
        """Return how many bytes (0 or 1) at each end of a chunk have one nibble of it only."""
        nibbles = self._specs[chunk.weight].storage.form.numerics.fmt.bits == 4
        return int(nibbles and chunk.extent.start % 2), int(nibbles and chunk.extent.end % 2)

    def _flat(self, weight: int) -> torch.Tensor:
        codes = self._codes[weight]
        if codes is None:
            raise InputError(
                f"{self._specs[weight].name} must hold {self._plane} to receive the gathered "
                "codes, and was made without them; gather fsdp_shard_model_weights yourself."
            )
        return codes.view(-1)

    def _contiguous_codes(self) -> torch.Tensor | None:
        """Return the codes as one flat tensor, if they are in gather order in memory."""
        if not self._chunks or (self._is_cast_elsewhere and None in self._codes):
            return None
        head = self._flat(self._chunks[0].weight)
        for chunk in self._chunks:
            codes = self._flat(chunk.weight)
            if codes.untyped_storage().data_ptr() != head.untyped_storage().data_ptr():
                return None
            # This also detects a shared byte: it is in two chunks, but once in memory.
            if codes.data_ptr() + chunk.first != head.data_ptr() + chunk.staged.start:
                return None
        return head.as_strided((sum(self._counts),), (1,))


def _memory(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().nbytes()
