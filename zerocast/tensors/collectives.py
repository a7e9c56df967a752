"""Runs torch.distributed's collectives on quantized weights.

Torch's schemas do not say which tensors a collective writes, and a wrapper has no memory that a
communication library could write. So each collective is handled here by name:

* those that move whole tensors (``broadcast``, ``send`` and ``recv``, ``scatter``, ``gather``, and
  ``all_gather`` and ``all_to_all`` of lists) move all bytes of a weight: codes, scales and recipe
  state. The receiver rebuilds derived copies;
* those that compute, or that fill a tensor from pieces, are refused if they would write a
  quantized weight;
* if a weight is only read and the output is plain, its value is read.

A weight is sent as one message: a digest of what the bytes mean, the bytes, and padding that makes
it longer than the value. So a rank that receives a plain tensor fails in the communication library,
and a rank that receives a weight detects messages of other kinds.

NOT here: the all-gather of a cast, which moves codes only (:mod:`zerocast.cast`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from zerocast.errors import RankMismatchError, UnsupportedError
from zerocast.recipes import describe_recipe
from zerocast.tensors.dequantized_view import OTHER_NAMESPACES, DequantizedView, refuse_writes
from zerocast.tensors.ledger import announce
from zerocast.tensors.post_gather import rebuild_derived
from zerocast.tensors.quantized_tensor import QuantizedTensor
from zerocast.tensors.storage import QuantizedStorage

_MOVED = {
    "c10d::broadcast_", "c10d::send", "c10d::recv_", "c10d::recv_any_source_",
    "c10d::scatter_", "c10d::gather_", "c10d::allgather_", "c10d::alltoall_",
}  # fmt: skip
"""The collectives that move whole tensors."""

_WRITTEN: dict[str, tuple[int, ...]] = dict.fromkeys(_MOVED, (0,)) | {
    "c10d::alltoall_base_": (0,), "c10d::_allgather_base_": (0,),
    "c10d::allgather_coalesced_": (0,), "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::allreduce_": (0,), "c10d::allreduce_coalesced_": (0,), "c10d::reduce_": (0,),
    "c10d::reduce_scatter_": (0,), "c10d::_reduce_scatter_base_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "_c10d_functional::irecv": (0,), "_c10d_functional::batch_p2p_ops": (3,),
    "c10d::send": (), "c10d::barrier": (), "c10d::monitored_barrier_": (),
    "c10d::check_for_nan": (),
}  # fmt: skip
"""For each collective the indices of the arguments that it writes."""

_SENDS_BYTES = ("c10d::send", "c10d::gather_")
"""The collectives whose sender does not know what others receive into: always bytes."""

_DIGEST = 16
_pending: set[PendingCollective] = set()


def collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run torch's collective ``func``, which has a quantized tensor or a view of its value.

    Raises:
        UnsupportedError: if it would write such a tensor other than as a whole weight.
    """
    name = func._schema.name
    written = _WRITTEN.get(name)
    if written is None and name.startswith("c10d::"):
        written = tuple(range(len(args)))  # an unknown one may write anything
    if written is None:  # functional ones return new tensors, and their schema says what they write
        return _on_values(func, args, kwargs)
    outputs = _tensors([args[i] for i in written])
    inputs = _tensors([arg for i, arg in enumerate(args) if i not in written])
    writes_ours = any(isinstance(tensor, QuantizedTensor | DequantizedView) for tensor in outputs)
    if not writes_ours and not (name in _SENDS_BYTES and _all_quantized(inputs)):
        return _on_values(func, args, kwargs)
    if name not in _MOVED or (writes_ours and not _all_quantized([*outputs, *inputs])):
        raise _refusal(name, outputs)
    return _moved(func, args, kwargs, outputs, inputs)


OTHER_NAMESPACES.update(dict.fromkeys(("c10d", "_c10d_functional"), collective))


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = tuple(args), kwargs
    refuse_writes(func, args, kwargs, (QuantizedTensor, DequantizedView))
    given = tree_map_only(QuantizedTensor, lambda tensor: tensor.dequantize(), given)
    args, kwargs = tree_map_only(DequantizedView, lambda view: view.value, given)
    return func(*args, **kwargs)


def _moved(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
) -> Any:
    """Run ``func`` on messages in place of weights."""
    destinations: list[tuple[torch.Tensor, torch.Tensor]] = []

    def message_of(tensor: torch.Tensor) -> torch.Tensor:
        # A plain output of a gather receives what all ranks send: a weight like this rank's.
        source = tensor if isinstance(tensor, QuantizedTensor) else inputs[0]
        assert isinstance(source, QuantizedTensor)
        message = _pack(source.quantized_storage)
        if any(tensor is output for output in outputs):
            destinations.append((tensor, message))
        return message

    args_sent, kwargs = tree_map_only(torch.Tensor, message_of, (tuple(args), kwargs))
    out = func(*args_sent, **kwargs)
    work = out[1] if isinstance(out, tuple) else out
    if destinations:
        work = PendingCollective(work, destinations, inputs[:1]).boxed()
    return (args[0], work) if isinstance(out, tuple) else work


class PendingCollective(torch.distributed.Work):
    """A collective in flight, at whose end received bytes are written into the weights.

    A wait for it, or a use of one of the weights, writes them first.
    """

    def __init__(
        self,
        work: Any,
        destinations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        like: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._work = torch.distributed.Work.unbox(work)
        self._destinations = list(destinations)
        self._like = like
        self._lock = threading.RLock()
        # Torch keeps only the C++ half of this object alive; this keeps the Python half alive.
        _pending.add(self)
        self._earlier: list[tuple[QuantizedStorage, Callable[[], None] | None]] = []
        for tensor, _ in destinations:
            if isinstance(tensor, QuantizedTensor):
                storage = tensor.quantized_storage
                self._earlier.append((storage, storage.wait_pending))
                storage.wait_pending = self._wait
        announce()

    def wait(self, *timeout: Any) -> bool:
        """Wait as torch does; afterwards the weights have their bytes.

        Raises:
            RankMismatchError: if a received message is not of a weight like this one. Nothing was
                written.
        """
        done = self._work.wait(*timeout)
        self._take_over()
        return done

    def is_completed(self) -> bool:
        """Return what torch's method does."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return what torch's method does."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return what torch's method does."""
        return self._work.exception()

    def source_rank(self) -> int:
        """Return what torch's method does."""
        return self._work._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as torch's method does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        return [tensor for tensor, _ in self._destinations]

    def get_future(self) -> Any:
        """Return torch's future of the tensors that were written."""
        written = self.result()

        def take_over(_: Any) -> list[torch.Tensor]:
            self._take_over()
            return written

        return self._work.get_future().then(take_over)

    def _wait(self) -> None:
        self.wait()

    def _take_over(self) -> None:
        with self._lock:  # a future runs this in a thread of the communication library
            if self in _pending:
                _pending.discard(self)
                self._write()

    def _write(self) -> None:
        for storage, earlier in reversed(self._earlier):
            if storage.wait_pending == self._wait:
                storage.wait_pending = earlier
        parts = [(tensor, _storage_of(tensor, self._like)) for tensor, _ in self._destinations]
        messages = [message for _, message in self._destinations]
        for (_, storage), message in zip(parts, messages, strict=True):
            _check_message(storage, message)
        for (tensor, storage), message in zip(parts, messages, strict=True):
            _unpack(message, storage)
            if not isinstance(tensor, QuantizedTensor):
                tensor.copy_(QuantizedTensor(storage).dequantize())


def _storage_of(tensor: torch.Tensor, like: Sequence[torch.Tensor]) -> QuantizedStorage:
    """Return the storage that receives the bytes for ``tensor``; if plain, a copy of ``like``'s."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.quantized_storage
    assert isinstance(like[0], QuantizedTensor)
    return like[0].quantized_storage.to()


def _pack(storage: QuantizedStorage) -> torch.Tensor:
    """Return all that is sent of a weight, uint8."""
    parts = [_digest(storage), *map(_as_bytes, storage.originals.values())]
    padding = storage.shape.numel() * storage.dtype.itemsize + 1 - sum(map(len, parts))
    parts.append(torch.zeros(max(0, padding), dtype=torch.uint8, device=storage.device))
    return torch.cat(parts)


def _unpack(message: torch.Tensor, storage: QuantizedStorage) -> None:
    """Write what was received, unless the weight has these bytes already."""
    buffers = list(map(_as_bytes, storage.originals.values()))
    given = message[_DIGEST : _DIGEST + sum(map(len, buffers))].split([len(b) for b in buffers])
    if all(torch.equal(*pair) for pair in zip(buffers, given, strict=True)):
        return
    for buffer, received in zip(buffers, given, strict=True):
        buffer.copy_(received)
    storage.mark_written()
    rebuild_derived([storage])


def _check_message(storage: QuantizedStorage, message: torch.Tensor) -> None:
    if not torch.equal(message[:_DIGEST], _digest(storage)):
        raise RankMismatchError(
            "a quantized weight must be received from one of the same shape, recipe and buffers, "
            f"{_meaning(storage)}, got another message; give the same kind of weight on every "
            "rank, or move weight.dequantize()."
        )


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.reshape(-1).view(torch.uint8)


def _meaning(storage: QuantizedStorage) -> str:
    names = ", ".join(storage.originals)
    return f"{describe_recipe(storage.recipe)} {list(storage.shape)} with {names}"


def _digest(storage: QuantizedStorage) -> torch.Tensor:
    """Return what the bytes mean, as uint8 [_DIGEST]."""
    digest = hashlib.blake2b(_meaning(storage).encode(), digest_size=_DIGEST).digest()
    return torch.tensor(list(digest), dtype=torch.uint8, device=storage.device)


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _all_quantized(tensors: Sequence[torch.Tensor]) -> bool:
    return all(isinstance(tensor, QuantizedTensor) for tensor in tensors)


def _refusal(name: str, outputs: Sequence[torch.Tensor]) -> UnsupportedError:
    if name not in _MOVED:
        return UnsupportedError(
            f"{name} would write computed or concatenated values into a quantized weight, whose "
            "codes cannot hold them. Reduce gradients or FP32 masters and cast them "
            "(zerocast.CastPlan); to average or gather values, run the collective on "
            "weight.dequantize() and weight.copy_() the result; to move weights, use broadcast, "
            "all_gather into a list, scatter, or send and recv."
        )
    if any(isinstance(tensor, DequantizedView) for tensor in outputs):
        return UnsupportedError(
            f"{name} would write into a view of a quantized weight's value, which is decoded for "
            f"this call, so what is received would be lost. Give it the weight itself (the "
            f"parameter, or its .data without .view()): all its bytes are moved then."
        )
    return UnsupportedError(
        f"{name} moves quantized weights to and from quantized weights of the same kind, got "
        f"{', '.join(type(tensor).__name__ for tensor in outputs)} to be written among others; "
        f"give quantized weights on both sides, or plain tensors (weight.dequantize()) on both."
    )
