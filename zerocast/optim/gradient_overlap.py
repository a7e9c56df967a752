"""OverlappingReducer: sends gradients while the backward pass runs, and does not keep them whole.

Note: gradients that overlap the backward
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``overlap_grad_reduce`` a weight's gradient is copied into its bucket's buffer as soon as
backward has it, and ``.grad`` is freed. A bucket that is full is sent, while backward fills the
next one; when a third is needed the first is waited for and added to FP32 sums of this rank's
shards (ZeRO-2). So beside the sums gradients take two buckets and what one layer's backward makes.

Buckets are sent in one order on all ranks, the last layers' first; a bucket that would overtake
another waits for it, its gradients in ``.grad``. Every backward pass sends every bucket once: at
its end the buckets that are not full are sent, with zeros for weights that it did not reach. So
between two steps all ranks must make the same number of backward passes, each through at least one
weight of the optimizer; which weights may differ. Passes inside a pass count (checkpointing with
``use_reentrant=True``) and send everything again each time: use ``use_reentrant=False``.

A gradient that comes too late for its bucket, or was not made by backward (``param.grad = ...``),
stays in ``.grad`` and is sent with the next pass, or in one more exchange at the step. The step, or
``optimizer.zero_grad()``, resets the sums. ``model.zero_grad()`` does not change them.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerocast.errors import InputError
from zerocast.optim.gradients import NOTES, GradientReducer
from zerocast.optim.shards import ShardedWeights

_HOOKS: Any = WeakIdKeyDictionary()
"""The finalizers that remove hooks, by parameter: a new optimizer removes those of the former one,
so that it alone takes gradients.
"""


def release_gradients(shards: ShardedWeights) -> None:
    """Let no earlier optimizer of these weights take their gradients any more."""
    for weight in shards.weights:
        if (handle := _HOOKS.pop(weight.param, None)) is not None:
            handle.remove()


class OverlappingReducer(GradientReducer):
    """A reducer whose :attr:`reduced` holds sums from the first backward pass on, and means from
    :meth:`reduce_mean` on.
    """

    def __init__(self, shards: ShardedWeights, dtype: torch.dtype | None = None) -> None:
        super().__init__(shards, dtype, buffer_bytes=None)
        self._buckets = self._rounds[:-1]
        self._bucket_of = {i: n for n, each in enumerate(self._buckets) for i in each.pieces}
        self._reached = set[int]()  # weights with a gradient since the last step
        self._forget()
        this = weakref.ref(self)
        for i, weight in enumerate(shards.weights):

            def arrive(param: torch.Tensor, index: int = i) -> None:
                if (reducer := this()) is not None:
                    reducer.arrive(index)

            _HOOKS[weight.param] = weight.param.register_post_accumulate_grad_hook(arrive)

    def _forget(self) -> None:
        """Begin with no pass and no sums."""
        self._begin_pass()
        self._passes = 0
        self._reached.clear()
        self._is_mean = self._is_late = self._awaits_end = False
        self._refused: InputError | None = None

    def _begin_pass(self) -> None:
        self._bucket = 0  # the one that is filled
        self._waiting: dict[int, list[int]] = {}  # weights whose gradients later buckets take
        self._packed = set[int]()  # weights of the bucket that is filled
        self._awaited = self._to_come()

    def _to_come(self) -> int:
        """Return how many gradients fill the bucket."""
        weights = self._shards.weights
        members = self._buckets[self._bucket].pieces if self._bucket < len(self._buckets) else ()
        return sum(weights[i].param.requires_grad for i in members)

    # --- while backward runs ---

    @torch.no_grad()
    def arrive(self, index: int) -> None:
        """Take the gradient that backward has put into ``.grad`` of a weight."""
        self._is_late |= self._is_mean
        if not self._awaits_end:
            self._awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if index not in self._bucket_of:  # it has no elements
            self._reached.add(index)
            self._shards.weights[index].param.grad = None
            return
        bucket = self._bucket_of[index]
        if bucket < self._bucket or index in self._packed:
            return  # it goes with the next pass
        self._waiting.setdefault(bucket, []).append(index)
        if bucket == self._bucket:
            self._fill()

    def _fill(self) -> None:
        """Pack what has arrived for the bucket that is filled; go on to the next when it is
        full.
        """
        while self._bucket < len(self._buckets):
            arrived = self._waiting.pop(self._bucket, [])
            if arrived:
                self._make_room(self._buckets[self._bucket])
            for index in arrived:
                self._take(index)
            if len(self._packed) < self._awaited:
                return
            self._send()

    def _take(self, index: int) -> None:
        """Pack a gradient, if there is one, and free it."""
        param = self._shards.weights[index].param
        if param.grad is not None:
            self._reached.add(index)
            self._refused = self._refused or self._dtype_error(index)
        self._buckets[self._bucket].pack(index, param.grad)
        self._packed.add(index)
        param.grad = None

    def _send(self) -> None:
        """Send the bucket that is filled, with zeros for what has not arrived."""
        each = self._buckets[self._bucket]
        self._make_room(each)
        for index in each.pieces.keys() - self._packed:
            self._take(index)
        self._begin(each, replaces=not self._passes)
        self._bucket += 1
        self._packed.clear()
        self._awaited = self._to_come()

    def _end_backward(self) -> None:
        self._awaits_end = False
        self._end_pass()

    @torch.no_grad()
    def _end_pass(self) -> None:
        while self._bucket < len(self._buckets):
            self._send()
        self._passes += 1
        self._begin_pass()

    def _end_broken_pass(self) -> None:
        """Send what a backward pass that has failed left unsent."""
        self._awaits_end = False
        if self._bucket or self._packed or self._waiting:
            self._end_pass()

    # --- at the step ---

    def reduce_mean(self, notes: Sequence[int] = (0,) * NOTES) -> None:
        """Fill :attr:`reduced` with the mean gradients, and exchange ``notes``. Collective."""
        self._end_broken_pass()
        left = {i for i in self._bucket_of if self._shards.weights[i].param.grad is not None}
        self._reached |= left
        self._make_room(self._rounds[-1])
        self._write_tail(notes, leftover=bool(left))
        self._begin(self._rounds[-1], replaces=False)
        self._finish()
        if any(each[-1] for each in self.notes()):
            self._end_pass()
            self._finish()
        if not self._passes:
            self.reduced.zero_()
        if not self._is_mean:
            self._divide()
        self._is_mean = True

    def _present(self) -> list[bool]:
        return [i in self._reached for i in range(len(self._shards.weights))]

    def error(self) -> InputError | None:
        """Return the error for gradients that cannot be reduced as they are."""
        return self._refused or self.changed() or super().error()

    def keep(self) -> None:
        """Keep what was reduced just now for the next step."""
        self._kept = []

    def drop(self) -> None:
        """Forget all gradients. Collective where a backward pass has failed half way."""
        super().drop()
        self._end_broken_pass()
        self._finish()
        self._forget()

    def changed(self) -> InputError | None:
        """Return the error for gradients that came after the mean was taken."""
        is_left = self.kept and any(grad is not None for grad in self._grads())
        if not (self._is_late or is_left):
            return None
        return InputError(
            "a step uses the gradients that clip_grad_norm_ or a step that failed has reduced, and "
            "more have come since; call optimizer.clip_grad_norm_ last before optimizer.step(), or "
            "optimizer.zero_grad() where no step followed it."
        )

    def unscale_(self, inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Multiply the sums by ``inv_scale``, FP32 []; set ``found_inf``, FP32 [], to 1 where one
        is not finite.
        """
        self._end_broken_pass()
        self._finish()
        if self._passes and self._own_gradients():
            torch._amp_foreach_non_finite_check_and_unscale_(
                self._own_gradients(), found_inf, inv_scale
            )
