"""OverlappingReducer: sends gradients while the backward pass runs, and frees them (ZeRO-2).

Note: gradients that overlap the backward
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``overlap_grad_reduce`` a weight's gradient is copied into its bucket's buffer when backward
reaches the next weight, because all hooks of the first have run then. The gradient is then freed. A
full bucket is sent while backward fills the next one. When a third is needed, the reducer waits for
the first and adds it to FP32 sums of this rank's shards. So besides the sums, gradients occupy two
buckets and the gradients of two layers.

Buckets are sent in the same order on all ranks, the last layers' first. If a bucket is full before
an earlier one, its gradients wait in ``.grad``. Every backward pass sends every bucket once. At its
end, buckets that are not full are sent, with zeros for weights that it did not reach. So between
two steps all ranks must make the same number of backward passes, each through at least one weight
of the optimizer; the weights may differ. Nested passes (checkpointing with ``use_reentrant=True``)
count and send every bucket again: use ``use_reentrant=False``.

A gradient that is too late for its bucket, or was not made by backward (``param.grad = ...``),
stays in ``.grad``. It is sent with the next pass, or in one more exchange at the step. The same
holds for a gradient that is a view, because other code owns its memory and may still write it.
torch's DDP does so with ``gradient_as_bucket_view=True``. The step, or ``optimizer.zero_grad()``,
resets the sums.

A taken gradient is replaced by a :class:`TakenGradient`, whose use is an error. A step raises if it
was replaced or removed. It is removed before backward accumulates the next gradient.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerocast.comm.communicator import Wait
from zerocast.errors import InputError, RankMismatchError
from zerocast.optim.gradient_rounds import Round
from zerocast.optim.gradients import NOTES, GradientReducer
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.taken_gradient import TakenGradient

_HOOKS: Any = WeakIdKeyDictionary()
"""The handles of gradient hooks, by parameter. A new optimizer removes the hooks of the former one.
"""


def release_gradients(shards: ShardedWeights) -> None:
    """Remove the gradient hooks that earlier optimizers have registered for these weights."""
    for weight in shards.weights:
        if (handle := _HOOKS.pop(weight.param, None)) is not None:
            handle.remove()


class OverlappingReducer(GradientReducer):
    """A reducer that sends gradients during backward.

    :attr:`reduced` holds sums from the first backward pass, and means from :meth:`reduce_mean`.
    """

    def __init__(self, shards: ShardedWeights, dtype: torch.dtype | None = None) -> None:
        super().__init__(shards, dtype, buffer_bytes=None)
        self._buckets = self._rounds[:-1]
        self._bucket_of = {i: n for n, each in enumerate(self._buckets) for i in each.pieces}
        self._taken: dict[int, TakenGradient] = {}  # since the last step, by weight
        self._forget()
        this = weakref.ref(self)
        for i, weight in enumerate(shards.weights):

            def announce(grad: torch.Tensor, index: int = i) -> None:
                if (reducer := this()) is not None:
                    reducer.announce(index)

            _HOOKS[weight.param] = weight.param.register_hook(announce)

    def _forget(self) -> None:
        """Reset to no passes and no sums."""
        for index, taken in self._taken.items():
            param = self._shards.weights[index].param
            if param.grad is taken:
                param.grad = None
        self._taken.clear()
        self._left = set[int]()  # weights whose gradients of backward stay in .grad
        self._announced: tuple[int, torch.Tensor | None, int] | None = None
        self._begin_pass()
        self._passes = 0
        self._is_mean = self._is_late = self._is_running = False
        self._refused: InputError | None = None

    def _begin_pass(self) -> None:
        self._bucket = 0  # the bucket that is being filled
        self._waiting: dict[int, list[int]] = {}  # weights whose gradients belong to later buckets
        self._packed = set[int]()  # packed weights of the current bucket
        self._awaited = self._num_gradients()
        self._has_begun = False

    def _num_gradients(self) -> int:
        """Return the number of gradients of the current bucket."""
        weights = self._shards.weights
        members = self._buckets[self._bucket].pieces if self._bucket < len(self._buckets) else ()
        return sum(weights[i].param.requires_grad for i in members)

    # --- while backward runs ---

    def announce(self, index: int) -> None:
        """Take the previous gradient, and prepare ``.grad`` for that of weight ``index``."""
        self._take_announced()
        self._refused = self._refused or self._replaced(index)
        param = self._shards.weights[index].param
        if isinstance(param.grad, TakenGradient):
            param.grad = None
        self._announced = index, param.grad, 0 if param.grad is None else param.grad._version
        if not self._is_running:
            self._is_running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _take_announced(self) -> None:
        """Take the announced gradient if it has arrived. ``torch.autograd.grad`` writes no
        ``.grad``.
        """
        if self._announced is None:
            return
        (index, before, version), self._announced = self._announced, None
        param = self._shards.weights[index].param
        if param.grad is not before or (before is not None and before._version != version):
            self._arrive(index)
        elif before is None and index in self._taken:
            param.grad = self._taken[index]

    def _arrive(self, index: int) -> None:
        """Take the gradient that backward has put into ``.grad`` of a weight."""
        self._is_late |= self._is_mean
        self._has_begun = True
        self._left.add(index)
        if index not in self._bucket_of:  # it has no elements
            self._release(index)
            return
        bucket = self._bucket_of[index]
        if bucket < self._bucket or index in self._packed:
            return  # it is sent with the next pass
        self._waiting.setdefault(bucket, []).append(index)
        if bucket == self._bucket:
            self._fill()

    def _fill(self) -> None:
        """Pack the arrived gradients of the current bucket. Send it and continue with the next when
        it is full.
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
        gradient = self._gradient(index)
        if gradient is not None and self._is_running and gradient._base is not None:
            gradient = None  # other code may write its memory until backward ends
        self._buckets[self._bucket].pack(index, gradient)
        self._packed.add(index)
        if gradient is not None:
            self._refused = self._refused or self._dtype_error(index)
            self._release(index)

    def _release(self, index: int) -> None:
        """Free a gradient, and replace it by a :class:`TakenGradient`."""
        param = self._shards.weights[index].param
        if (gradient := param.grad) is not None:
            taken = TakenGradient.like(gradient.shape, gradient.dtype, gradient.device)
            param.grad = self._taken[index] = taken
        self._left.discard(index)

    def _send(self) -> None:
        """Send the current bucket, with zeros for missing gradients."""
        each = self._buckets[self._bucket]
        self._make_room(each)
        for index in each.pieces.keys() - self._packed:
            self._take(index)
        self._begin(each, replaces=not self._passes)
        self._bucket += 1
        self._packed.clear()
        self._awaited = self._num_gradients()

    def _start(self, round_: Round) -> Wait:
        wait = self._in_as_many_passes(partial(super()._start, round_))
        return partial(self._in_as_many_passes, wait)

    def _in_as_many_passes(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, part of an exchange. Explain the likely cause if other
        ranks call another collective.
        """
        try:
            return call()
        except RankMismatchError as error:
            raise RankMismatchError(
                "with overlap_grad_reduce every rank must run equally many backward passes between "
                f"two steps, and some have run more than others, this rank {self._passes} so far. "
                f"On a rank without a batch, run the backward of a loss times 0. ({error})"
            ) from error

    def _end_backward(self) -> None:
        self._take_announced()
        if self._has_begun:
            self._end_pass()
        self._is_running = False

    @torch.no_grad()
    def _end_pass(self) -> None:
        while self._bucket < len(self._buckets):
            self._send()
        self._passes += 1
        self._begin_pass()

    def _end_broken_pass(self) -> None:
        """Send what a failed backward pass has not sent."""
        self._is_running = False
        self._take_announced()
        if self._has_begun:
            self._end_pass()

    # --- at the step ---

    def reduce_mean(self, notes: Sequence[int] = (0,) * NOTES) -> None:
        """Fill :attr:`reduced` with the mean gradients, and exchange ``notes``. Collective."""
        self._end_broken_pass()
        left = any(self._gradient(i) is not None for i in self._bucket_of)
        self._make_room(self._rounds[-1])
        self._write_tail(notes, leftover=left)
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

    def _gradient(self, index: int) -> torch.Tensor | None:
        """Return the gradient in ``.grad`` of a weight; None if there is none or it was taken."""
        gradient = self._shards.weights[index].param.grad
        return None if isinstance(gradient, TakenGradient) else gradient

    def _grads(self) -> list[torch.Tensor | None]:
        return list(map(self._gradient, range(len(self._shards.weights))))

    def _present(self) -> list[bool]:
        return [i in self._taken or grad is not None for i, grad in enumerate(self._grads())]

    def error(self) -> InputError | None:
        """Return the error for gradients that cannot be reduced."""
        return self._refused or self.changed() or super().error()

    def keep(self) -> None:
        """Keep the reduced gradients for the next step."""
        self._kept = []

    def drop(self) -> None:
        """Discard all gradients. Collective if a backward pass has failed midway."""
        super().drop()
        self._end_broken_pass()
        self._finish()
        self._forget()

    def changed(self) -> InputError | None:
        """Return the error for gradients that arrived after the mean was computed, or for a taken
        gradient that other code has replaced or removed.
        """
        for index in () if self._is_running else self._taken:  # running: backward has failed
            if (error := self._replaced(index)) is not None:
                return error
        is_left = self.kept and any(grad is not None for grad in self._grads())
        if not (self._is_late or is_left):
            return None
        return InputError(
            "a step uses the gradients that clip_grad_norm_ or a step that failed has reduced, and "
            "gradients were added since; call optimizer.clip_grad_norm_ last before "
            "optimizer.step(), or optimizer.zero_grad() where no step followed it."
        )

    def _replaced(self, index: int) -> InputError | None:
        """Return the error for a taken gradient that was then replaced or removed."""
        weight, taken = self._shards.weights[index], self._taken.get(index)
        if taken is None or weight.param.grad is taken or index in self._left:
            return None
        return InputError(
            f"the gradient of {weight.name} was taken during backward, and other code has replaced "
            "or removed it in .grad since; change gradients in hooks of their weights, drop all of "
            "them with optimizer.zero_grad(), or leave out overlap_grad_reduce."
        )

    def unscale_(self, inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Multiply the sums by ``inv_scale``, FP32 []. Set ``found_inf``, FP32 [], to 1 if any is
        not finite.
        """
        self._end_broken_pass()
        self._finish()
        if self._passes and self._own_gradients():
            torch._amp_foreach_non_finite_check_and_unscale_(
                self._own_gradients(), found_inf, inv_scale
            )
