"""GradientReducer: computes the mean of gradients over ranks, on each rank for its shards.

Gradients are sent by all-to-alls, in rounds (:mod:`zerocast.optim.gradient_rounds`), summed in FP32
in rank order and divided by the number of ranks. So ranks with identical BF16 or FP16 gradients get
exactly that gradient: up to 2^13 ranks the sums are exact in FP32, and so is the quotient. The mean
of any other gradients has the same bits on every transport.

A weight without a gradient on any rank is left out of the step, as in torch. If only some ranks
have a gradient, it counts as zero on the others. The rows of the last round therefore end in notes,
a few numbers that ranks exchange, and flags, one byte for each weight: 1 if the rank has a
gradient. The weights without a gradient may differ between ranks and steps.

Here gradients stay in ``.grad`` until the step; :mod:`zerocast.optim.gradient_overlap` sends them
while the backward pass runs.
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from zerocast.comm.communicator import Wait
from zerocast.errors import InputError
from zerocast.optim.gradient_rounds import BUFFER_BYTES, Round, plan_rounds
from zerocast.optim.shards import ShardedWeights
from zerocast.recipes import NOMINAL_DTYPES

NOTES = 4
"""The number of the caller's integers that are sent with the gradients."""


def check_gradient_dtype(dtype: object) -> None:
    """Raise :class:`InputError` unless gradients can be sent in ``dtype``, or it is None."""
    if dtype is not None and dtype not in NOMINAL_DTYPES:
        raise InputError(
            "gradient_dtype must be torch.bfloat16, torch.float16, torch.float32, or None for each "
            f"gradient's own, got {dtype!r}."
        )


def flag_bytes(weights: int) -> slice:
    """Return the byte range of the flags of this many weights in the tail of the last round. Before
    it are the notes and whether gradients are left over, as int64.
    """
    first = 8 * (NOTES + 1)
    return slice(first, first + weights)


class GradientReducer:
    """A reducer of the gradients of all weights of an optimizer, with persistent buffers.

    Args:
        shards: the weights and their owners.
        dtype: the dtype in which gradients are sent; None for that of the weights.
        buffer_bytes: as for :func:`zerocast.optim.gradient_rounds.cut_rounds`.

    Attributes:
        reduced: FP32 [num_columns]: the mean gradients of this rank's shards.
    """

    def __init__(
        self,
        shards: ShardedWeights,
        dtype: torch.dtype | None = None,
        buffer_bytes: int | None = BUFFER_BYTES,
    ) -> None:
        self._shards, self._dtype = shards, dtype
        self.reduced = torch.zeros_like(shards.masters)
        self._flag_bytes = flag_bytes(len(shards.weights))
        self._rounds = plan_rounds(shards, dtype, self._flag_bytes.stop, buffer_bytes)
        self._under_way: deque[tuple[Round, Wait, bool]] = deque()
        self._kept: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None
        self._tail = self._sent_tail = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reduce_mean(self, notes: Sequence[int] = (0,) * NOTES) -> None:
        """Fill :attr:`reduced` with the mean gradients, and exchange ``notes``. Collective: one
        all-to-all for each round.
        """
        gradients = self._grads()
        for each in self._rounds:
            self._make_room(each)
            for i in each.pieces:
                each.pack(i, gradients[i])
            if each is self._rounds[-1]:
                self._write_tail(notes)
            self._begin(each, replaces=True)
        self._finish()
        self._divide()

    # --- rounds ---

    def _make_room(self, round_: Round) -> None:
        """Wait until no exchange uses the buffer of a round."""
        place = round_.buffer.data_ptr()
        while any(each.buffer.data_ptr() == place for each, *_ in self._under_way):
            self._finish_first()

    def _begin(self, round_: Round, *, replaces: bool) -> None:
        self._under_way.append((round_, self._start(round_), replaces))

    def _start(self, round_: Round) -> Wait:
        """Begin the exchange and return a callable that waits for it."""
        return round_.begin(self._shards.comm)

    def _finish_first(self) -> None:
        each, wait, replaces = self._under_way.popleft()
        wait()
        each.sum_into(self.reduced, replaces=replaces)
        if each is self._rounds[-1]:
            self._answers = each.tail.clone()  # other rounds use its buffer, too

    def _finish(self) -> None:
        """Wait for all exchanges."""
        while self._under_way:
            self._finish_first()

    def _write_tail(self, notes: Sequence[int], *, leftover: bool = False) -> None:
        numbers = torch.tensor([*notes, leftover], dtype=torch.int64, device="cpu")
        flags = torch.tensor(self._present(), dtype=torch.uint8, device="cpu")
        own, tail = torch.cat((numbers.view(torch.uint8), flags)), self._rounds[-1].tail
        # A GPU waits for what is sent from the host, and a CUDA graph cannot hold that.
        if not torch.equal(own, self._tail):
            self._tail, self._sent_tail = own, own.to(tail.device)
        tail.copy_(self._sent_tail)

    def _divide(self) -> None:
        if self._shards.comm.size > 1:
            self.reduced.div_(self._shards.comm.size)

    def notes(self) -> list[list[int]]:
        """Return every rank's notes, followed by whether it has gradients left over."""
        return self._answers[:, : self._flag_bytes.start].contiguous().view(torch.int64).tolist()

    # --- what is reduced ---

    def _grads(self) -> list[torch.Tensor | None]:
        return [weight.param.grad for weight in self._shards.weights]

    def _present(self) -> list[bool]:
        """Return for each weight whether this rank has a gradient."""
        return [grad is not None for grad in self._grads()]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return a view of each weight's mean gradient on this rank's shard; None if no rank has a
        gradient.
        """
        present = self._present()
        # Read only if this rank lacks one, because on a GPU this waits for the reduction.
        if not all(present):
            present = self._answers[:, self._flag_bytes].amax(0).tolist()
        return [
            self.reduced[shard.columns] if is_there else None
            for shard, is_there in zip(self._shards.own, present, strict=True)
        ]

    def error(self) -> InputError | None:
        """Return the error for a gradient that cannot be reduced."""
        errors = map(self._dtype_error, range(len(self._shards.weights)))
        return next((error for error in errors if error is not None), None)

    def _dtype_error(self, index: int) -> InputError | None:
        """Return the error for a gradient that would be rounded without ``gradient_dtype``."""
        weight = self._shards.weights[index]
        grad, dtype = weight.param.grad, weight.param.dtype
        if self._dtype is not None or grad is None or grad.dtype == dtype:
            return None
        if torch.promote_types(grad.dtype, dtype) == dtype:
            return None
        return InputError(
            f"gradients are sent in the dtypes of their weights, {dtype} for {weight.name}, and "
            f"its gradient is {grad.dtype}; make the optimizer with gradient_dtype=torch.float32, "
            "or with another dtype, to which gradients are then rounded."
        )

    # --- between clipping and the step ---

    def keep(self) -> None:
        """Keep the reduced gradients for the next step, and note the gradients they came from."""
        self._kept = [
            None if grad is None else (weakref.ref(grad), grad._version) for grad in self._grads()
        ]

    def drop(self) -> None:
        """Discard what was kept, so that the next step reduces the gradients."""
        self._kept = None

    @property
    def kept(self) -> bool:
        """Whether the next step uses gradients that were reduced earlier."""
        return self._kept is not None

    def changed(self) -> InputError | None:
        """Return the error for a gradient that has changed since it was reduced and kept."""
        for weight, kept in zip(self._shards.weights, self._kept or (), strict=True):
            grad = weight.param.grad
            version = None if grad is None else grad._version
            if grad is not (kept and kept[0]()) or version != (kept and kept[1]):
                return InputError(
                    f"a step uses the gradients that clip_grad_norm_ has reduced, and that of "
                    f"{weight.name} has changed since; call optimizer.clip_grad_norm_ last before "
                    "optimizer.step(), or optimizer.zero_grad() where no step followed it."
                )
        return None

    def unscale_(self, inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Do nothing. Subclasses multiply gradients that a GradScaler cannot see by ``inv_scale``,
        FP32 [], and set ``found_inf``, FP32 [], to 1 if any is not finite.
        """

    def scale_(self, factor: torch.Tensor) -> None:
        """Multiply the mean gradients by ``factor``, FP32 []."""
        self.reduced.mul_(factor)

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all mean gradients: FP32 [], the same on all ranks. Collective."""
        comm = self._shards.comm
        shards = self._own_gradients()
        if math.isinf(norm_type):
            largest = self.reduced.new_zeros(1)
            for shard in shards:
                largest = torch.maximum(largest, shard.abs().max())  # NaN stays NaN
            bits = largest.view(torch.int32)  # ordered like the magnitudes, NaN is the largest
            comm.all_reduce_max_(bits)
            return bits.view(torch.float32)[0]
        # Gathered and summed locally, so that it has the same bits on every transport.
        totals = torch.zeros(comm.size, dtype=torch.float64, device=self.reduced.device)
        for shard in shards:
            norm = torch.linalg.vector_norm(shard, norm_type, dtype=torch.float64)
            totals[comm.rank] += norm**norm_type
        comm.all_gather_(totals)
        return totals.sum().pow(1 / norm_type).float()

    def _own_gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients of the weights of which this rank owns elements."""
        return [self.reduced[shard.columns] for shard in self._shards.own if shard.extent]
