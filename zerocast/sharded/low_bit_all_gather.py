"""LowBitAllGather: one weight's way from the sharded master through FSDP2's all-gather.

FSDP2 asks for what to send (:func:`zerocast.sharded.casts.codes_to_send`) and hands over what has
arrived (:meth:`LowBitAllGather.gathered_weight`). A :class:`zerocast.CastPlan` over the ranks that
share the weight casts the codes into this rank's part of the gather and nowhere else, so no rank
holds whole codes while the weight is sharded. Scales do not travel: every rank derives them from
the all-reduced amaxes.

Under tensor parallelism a rank's weight is a part of a larger one
(:class:`zerocast.TensorParallelShard`), whose amaxes its ranks reduce, too. Where FSDP2 does not
shard it beside, there is nothing to gather, and the part is cast where it is
(:func:`zerocast.sharded.casts.ungathered_weight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.arguments import check_shape, check_text
from zerocast.cast import CastPlan
from zerocast.comm import Communicator
from zerocast.errors import UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES, Recipe, as_recipe
from zerocast.sharded.cast_values import CastValues
from zerocast.sharded.master_state import State, check_state, fresh_state, state_before_cast
from zerocast.sharded.placement import check_tp_boundaries
from zerocast.sharded.row_shards import RowShards
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard, rebuild_derived


class AllGatherInput:
    """The codes of this rank's rows of one weight, or part of a weight, and the scales of all of
    it.

    Attributes:
        comm: the ranks that share the weight.
        rows: who has which.
        dtype: the nominal dtype of the gathered weight.
        storage: scales, tensor amax and what the recipe remembers (the tensors of the gather's
            ``state``); no codes.
        sent: by gathered plane, uint8 [rows.sent_bytes]: what this rank sends.
        casts: how many there have been.
        was_asked_for: whether the weight itself was gathered from here, and not only cast with
            others.
    """

    def __init__(
        self,
        gather: LowBitAllGather,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        tp_shard: TensorParallelShard | None,
    ) -> None:
        self.comm, self.dtype = comm, dtype
        recipe, shape = gather.recipe, gather.shape if tp_shard is None else tp_shard.shape
        self.rows = RowShards(shape, comm.size, recipe.numerics.fmt)
        planes = recipe.planes(shape)
        gathered = [plane.codes_name for plane in planes if plane.is_gathered]
        derived = [name for plane in planes if plane.is_derived for name in plane.buffers]
        # All else of a gathered weight is known before the gather, or derived after it.
        left_out = {*gathered, *derived, *recipe.state}
        buffers = {
            name: spec.allocate(device)
            for name, spec in recipe.buffers(shape, columnwise=True).items()
            if name not in left_out
        }
        self.storage = QuantizedStorage(shape, dtype, recipe, buffers | gather.state, tp_shard)
        self.sent = {
            plane: torch.zeros(self.rows.sent_bytes, dtype=torch.uint8, device=device)
            for plane in gathered
        }
        self.casts = 0
        self.was_asked_for = False

    @property
    def own(self) -> list[torch.Tensor]:
        """By gathered plane: the part of ``sent`` that this rank's codes fill."""
        size = self.rows.code_bytes(self.comm.rank)
        return [codes[:size] for codes in self.sent.values()]


class LowBitAllGather:
    """What all pieces of one master (whole, shard, alias) have in common.

    Args:
        shape: [M, K], of the whole weight, also where tensor parallelism splits it.
        recipe: the scheme.
        name: the weight's, for messages, and for the random words of stochastic rounding.
        state: what the recipe remembers of earlier casts, where there were any.

    Attributes:
        state: the same, by the names of :attr:`Recipe.state`, as the latest cast left it.
        shards: as the latest gather needs them; None before the first.
        cast_values: those that were cast last.
        is_gathered: whether FSDP2 has made shards of the master, which it gathers.
        is_settled: whether the next gather need not ask all ranks if a cast is due.
        plan: by which the weight is cast when it is gathered; None before the first time, and where
            :func:`zerocast.sharded.precompute_scales_for_fsdp` casts it.
        ungathered: the whole weight, where FSDP2 does not shard it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        recipe: Recipe,
        name: str,
        state: State | None = None,
    ) -> None:
        self.shape = check_shape("shape", shape)
        self.recipe = as_recipe(recipe)
        self.name = check_text("name", name)
        self.state = fresh_state(recipe) if state is None else state
        self.shards: AllGatherInput | None = None
        self.cast_values = CastValues()
        self.is_gathered = False
        self.is_settled = False
        self.plan: CastPlan | None = None
        self.ungathered: QuantizedStorage | None = None
        self._gathered: int | None = None  # the cast whose codes the gathered weight holds

    def copy_for(self, master: torch.Tensor) -> LowBitAllGather:
        """For a copy of ``master``, which has never been gathered: its first cast makes the codes
        that ``master`` has.
        """
        state = self.state_before_cast(is_due=self.is_due(master))
        copy = LowBitAllGather(self.shape, self.recipe, self.name, state)
        copy.is_gathered = self.is_gathered
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return LowBitAllGather, (self.shape, self.recipe, self.name, self.state)

    # --- what the recipe remembers ---

    def state_before_cast(self, *, is_due: bool) -> State:
        """A copy of ``state`` from which the cast of the master as it is starts; ``is_due`` says
        whether that is still to be made.
        """
        return state_before_cast(self.recipe, self.state, is_due=is_due)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what :meth:`state_before_cast` gave: a cast is due.

        Raises:
            InputError: where it was of another recipe. Nothing has been changed.
        """
        check_state(self.name, self.state, state)
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self.cast_values.forget()

    # --- when a cast is due ---

    def is_due(self, master: torch.Tensor) -> bool:
        """Whether this rank has written ``master``, its rows, since the latest cast."""
        return master.is_meta or bool(self.cast_values.differ_from(master))  # meta: no value yet

    def mark_cast(self, master: torch.Tensor) -> None:
        """The codes are those of ``master`` now."""
        assert self.shards is not None
        self.shards.casts += 1
        self.cast_values.set_to(master)
        if self.ungathered is not None:
            self.refill(self.ungathered, list(self.shards.sent.values()), self.shards)

    # --- before the all-gather ---

    def prepare(
        self,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        tp_shard: TensorParallelShard | None,
        *,
        is_due: bool,
    ) -> bool:
        """Let ``shards`` be for these ranks, this nominal dtype, device and part; whether they were
        made anew. ``is_due`` says whether the master was written since its latest cast.
        """
        old = self.shards
        wanted = comm, dtype, device, tp_shard
        if old and (old.comm, old.dtype, old.storage.device, old.storage.tp_shard) == wanted:
            return False
        if dtype not in NOMINAL_DTYPES:
            raise UnsupportedError(
                f"{self.name}: a weight that is all-gathered in codes presents FP32, BF16 or FP16, "
                f"got {dtype}; give fully_shard a MixedPrecisionPolicy with such a param_dtype."
            )
        if tp_shard is not None:
            check_tp_boundaries(self.name, tp_shard, self.recipe)
        state = self.state_before_cast(is_due=is_due)
        self.state = {name: tensor.to(device) for name, tensor in state.items()}
        self.shards = AllGatherInput(self, comm, dtype, device, tp_shard)
        self.plan = self.ungathered = None
        self.cast_values.forget()
        return True

    # --- after the all-gather ---

    def gathered_weight(
        self, outputs: Sequence[torch.Tensor], shards: AllGatherInput
    ) -> tuple[QuantizedTensor, list[torch.Tensor]]:
        """The weight around the gathered codes ``outputs``, and all other tensors that it is made
        of, which FSDP2 frees and allocates as it does ``outputs``.
        """
        shape = shards.storage.shape
        with torch.inference_mode(False):
            views = shards.rows.views(list(shards.sent), outputs)
            buffers = {
                name: views[name].view(spec.shape)
                if name in views
                else torch.empty(spec.shape, dtype=spec.dtype, device=shards.storage.device)
                for name, spec in self.recipe.buffers(shape, columnwise=True).items()
                if name not in self.recipe.state
            }
            weight = QuantizedTensor(QuantizedStorage(shape, shards.dtype, self.recipe, buffers))
            weight.quantized_storage.gathered_from = self.name
            self.refill(weight.quantized_storage, outputs, shards)
        return weight, [buffer for name, buffer in buffers.items() if name not in views]

    def refill(
        self, weight: QuantizedStorage, outputs: Sequence[torch.Tensor], shards: AllGatherInput
    ) -> None:
        """Let a weight of :meth:`gathered_weight`, whose ``outputs`` were gathered again, be
        whole.
        """
        if self._gathered != shards.casts:
            self._gathered = shards.casts
            weight.mark_written()
            unchanged: tuple[torch.Tensor, ...] = ()
        else:  # the same bytes as before: a backward that saved these tensors may read them
            unchanged = tuple(weight.buffers.values())
        with torch.autograd._unsafe_preserve_version_counter(unchanged):
            for name, buffer in shards.storage.buffers.items():
                if name in weight.buffers:
                    weight.buffers[name].copy_(buffer)
            shards.rows.store(shards.sent, outputs, weight.buffers)
            rebuild_derived([weight])
