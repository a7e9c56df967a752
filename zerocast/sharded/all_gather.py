"""LowBitAllGather: casts one sharded master and builds the weight from what FSDP2 gathers.

FSDP2 requests the tensors to send (:func:`zerocast.sharded.casts.codes_to_send`) and passes on the
gathered ones (:meth:`LowBitAllGather.gathered_weight`). A :class:`zerocast.CastPlan` over the ranks
that share the weight casts codes and scales directly into this rank's send buffers. No rank holds
all codes while the weight is sharded. Before the cast, ranks reduce the amaxes of tensors and of
blocks that span ranks ("Note: full and boundary" in :mod:`zerocast.cast.amax_buffers`).

Under tensor parallelism a rank's weight is a shard of a larger one
(:class:`zerocast.TensorParallelShard`), whose amaxes are also reduced over the tensor-parallel
ranks. If FSDP2 does not shard it as well, nothing is gathered, and the shard is cast in place
(:func:`zerocast.sharded.parallel_linear.kept_weight`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.arguments import check_shape, check_text
from zerocast.cast import CastPlan
from zerocast.cast.verified import Verification, VerifyMode
from zerocast.cast.whole_cast import HeldWeight
from zerocast.comm import Communicator, SingleRank, announcing
from zerocast.errors import UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES, Recipe, as_recipe
from zerocast.sharded.all_gather_input import AllGatherInput
from zerocast.sharded.placement import check_tp_boundaries, to_local, tp_shard_of
from zerocast.sharded.state import CastValues, State, fresh_state
from zerocast.tensors import (
    QuantizedStorage,
    QuantizedTensor,
    TensorParallelShard,
    prepare_expansion,
    rebuild_derived,
)
from zerocast.tensors.quantize import plain_master


class LowBitAllGather:
    """The cast and gather of one master, shared by all of its pieces (whole, shard, alias).

    Args:
        shape: [M, K] of the whole weight, or a stack's shape, even under tensor parallelism.
        recipe: the quantization recipe.
        name: the weight's name, for messages and for the random bits of stochastic rounding.
        state: the recipe's state after earlier casts, if there were any.
        for_linear: whether the weight belongs to a :class:`zerocast.nn.Linear`, which multiplies by
            codes. Any other module gets the dequantized rowwise codes as a plain tensor.
        is_copy: whether ``state`` already includes the cast of the master, made elsewhere.

    Attributes:
        state: the state after the latest cast, by the names of :attr:`Recipe.state`.
        is_sent: whether a gather has sent :attr:`shards`; an amax group casts them before, too.
        cast_values: the values that were cast last.
        is_gathered: whether FSDP2 has sharded the master, and gathers it.
        is_settled: whether the next gather may skip asking all ranks if a cast is due.
        comm: the ranks that share :attr:`shards`.
        kept: the whole weight, permanently, where FSDP2 does not shard it; else None.
        verify: how ranks compare the weight after the first gather of each cast, one weight at a
            time, in FSDP2's gather order.
        cast_group: this gather, and those of its amax group that were cast with it.
        latest: a weak reference to the plan of the latest cast, and all gathers that it cast.
    """

    verify: VerifyMode = "off"
    cast_group: Sequence[LowBitAllGather] = ()
    latest: tuple[weakref.ref[CastPlan], Sequence[LowBitAllGather]] | None = None
    _verified = 0  # the cast that was compared last

    def __init__(
        self,
        shape: Sequence[int],
        recipe: Recipe,
        name: str,
        state: State | None = None,
        for_linear: bool = True,
        is_copy: bool = False,
    ) -> None:
        self.for_linear = for_linear
        self.shape = check_shape("shape", shape)
        self.recipe = as_recipe(recipe)
        self.name = check_text("name", name)
        self.state = fresh_state(recipe) if state is None else state
        self.is_sent = False
        self.cast_values = CastValues()
        self.cast_values.are_loaded = is_copy
        self.is_gathered = False
        self.is_settled = False
        self.kept: QuantizedStorage | None = None
        self._shards: AllGatherInput | None = None
        self.comm: Communicator = SingleRank()
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self._gathered: int | None = None  # the cast whose codes the gathered weight holds

    def copy_for(self, master: torch.Tensor) -> LowBitAllGather:
        """Return a gather without codes for a copy of ``master``.

        Its first cast gives the codes that ``master`` has, or those of the next cast of ``master``
        if either is written before.
        """
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        is_copy = bool(state) and not self.is_due(master)
        copy = LowBitAllGather(self.shape, self.recipe, self.name, state, self.for_linear, is_copy)
        copy.is_gathered, copy.verify = self.is_gathered, self.verify
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.shape, self.recipe, self.name, self.state, self.for_linear
        return LowBitAllGather, (*given, self.cast_values.are_loaded)

    @property
    def columnwise(self) -> bool:
        """Whether the gathered weight has a columnwise copy. Only products read one, and shards
        must be enough to make it; without it the products of a layer decode the rowwise codes.
        """
        return self.for_linear and self.recipe.columnwise_has_shards

    # --- the parameter ---

    def find(self, parameter: torch.Tensor) -> None:
        """Note that this rank's rows are those of ``parameter``, a DTensor."""
        self._parameter = weakref.ref(parameter)

    @property
    def is_found(self) -> bool:
        """Whether :attr:`parameter` was noted and still exists."""
        return self._parameter is not None and self._parameter() is not None

    @property
    def parameter(self) -> torch.Tensor:
        """The layer's sharded parameter, as :meth:`find` noted it last."""
        parameter = None if self._parameter is None else self._parameter()
        assert parameter is not None, self.name
        return parameter

    @property
    def master(self) -> torch.Tensor:
        """This rank's rows, where FSDP2 stores them. Under FSDP2's CPU offload their device is not
        that of the codes.
        """
        return to_local(self.parameter).value  # type: ignore[attr-defined]

    @property
    def tp_shard(self) -> TensorParallelShard | None:
        """The part of the weight that this rank holds after FSDP2's gather; None if it is whole."""
        return tp_shard_of(self.name, self.parameter, is_fsdp_sharded=self.is_gathered)

    # --- the recipe's state ---

    def load_state(
        self, state: Mapping[str, torch.Tensor], master: torch.Tensor, *, is_due: bool
    ) -> None:
        """Resume from a ``state`` that :func:`zerocast.sharded.state.check_state` has accepted.

        ``master`` are this rank's rows. ``state`` precedes their cast if ``is_due``, else follows
        it.
        """
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self.cast_values.forget()
        self.is_settled = False
        if self.state and not (is_due or master.is_meta):
            self.cast_values.set_to(master, are_loaded=True)

    def is_due(self, master: torch.Tensor) -> bool:
        """Return whether this rank has written ``master``, its rows, since the latest cast."""
        return master.is_meta or bool(self.cast_values.differ_from(master))  # meta: no value yet

    # --- before the all-gather ---

    @property
    def is_cast(self) -> bool:
        """Whether a cast has been made. Before it, dtype, device and ranks are unknown."""
        return self._shards is not None

    @property
    def shards(self) -> AllGatherInput:
        """The shards that this rank sends; they exist after the first cast (:attr:`is_cast`)."""
        assert self._shards is not None, self.name
        return self._shards

    def prepare(
        self, comm: Communicator, dtype: torch.dtype, device: torch.device, *, is_due: bool
    ) -> bool:
        """Make :attr:`shards` for these ranks, nominal dtype and device, if they differ from the
        current ones. Return whether a cast must fill them: they are new, or the state was loaded.

        ``is_due`` says whether the master was written since its latest cast. If not, the state is
        rewound, so that the cast is repeated.

        Raises:
            InputError: if tensor-parallel shards begin or end inside a block.
            UnsupportedError: if a quantized weight cannot present ``dtype``.
        """
        tp_shard, held = self.tp_shard, None
        wanted = comm, dtype, device, tp_shard
        if self._shards is not None:
            old = self._shards.storage
            held = self.comm, old.dtype, old.device, old.tp_shard
        is_new = held != wanted
        if not (is_new or self.cast_values.are_loaded):
            return False
        if dtype not in NOMINAL_DTYPES:
            raise UnsupportedError(
                f"{self.name}: a weight that is all-gathered in codes presents FP32, BF16 or FP16, "
                f"got {dtype}; give fully_shard a MixedPrecisionPolicy with such a param_dtype."
            )
        if tp_shard is not None:
            check_tp_boundaries(self.name, tp_shard, self.recipe, columnwise=self.columnwise)
        if is_new:
            self.state = {name: t.clone().to(device) for name, t in self.state.items()}
            shape, self.comm = self.shape if tp_shard is None else tp_shard.shape, comm
            self._shards = AllGatherInput(
                shape, dtype, self.recipe, self.state, comm.size, comm.rank, device,
                columnwise=self.columnwise, tp_shard=tp_shard,
            )  # fmt: skip
            self.is_sent, self.kept, self.latest = False, None, None
        if self.state and not is_due:
            self.recipe.rewind(self.state)
        self.cast_values.forget()
        return True

    def mark_cast(
        self,
        cast_group: Sequence[LowBitAllGather],
        plan: CastPlan,
        together: Sequence[LowBitAllGather],
    ) -> None:
        """Note that ``plan`` has cast this master and all others of ``together``, which include
        ``cast_group``.
        """
        self.latest = weakref.ref(plan), together
        self.cast_group = [self, *(other for other in cast_group if other is not self)]
        self.shards.casts += 1
        self.cast_values.set_to(self.master)
        if self.kept is not None:
            self.refill(self.kept, self.shards.flat, self.shards)

    # --- after the all-gather ---

    def gathered_weight(
        self, outputs: Sequence[torch.Tensor], shards: AllGatherInput
    ) -> tuple[QuantizedTensor, list[torch.Tensor]]:
        """Return the weight around the gathered codes ``outputs``, and its other tensors. FSDP2
        frees and allocates those as it does ``outputs``.
        """
        shape, device = shards.storage.shape, shards.storage.device
        with torch.inference_mode(False):
            views = shards.views(outputs)
            buffers = {
                name: views[name].view(spec.shape) if name in views else spec.allocate(device)
                for name, spec in self.recipe.buffers(shape, columnwise=self.columnwise).items()
                if name not in self.recipe.state
            }
            weight = QuantizedTensor(
                QuantizedStorage(shape, shards.storage.dtype, self.recipe, buffers)
            )
            weight.quantized_storage.gathered_from = self.name
            self.refill(weight.quantized_storage, outputs, shards)
        return weight, [buffer for name, buffer in buffers.items() if name not in views]

    def refill(
        self, weight: QuantizedStorage, outputs: Sequence[torch.Tensor], shards: AllGatherInput
    ) -> None:
        """Fill a weight of :meth:`gathered_weight` from ``outputs``, which were gathered again."""
        unchanged: tuple[torch.Tensor, ...] = ()
        if self._gathered != shards.casts:
            self._gathered = shards.casts
            weight.mark_written()
        else:  # the same bytes as before: a backward that saved these tensors may read them
            unchanged = tuple(weight.buffers.values())
        with torch.autograd._unsafe_preserve_version_counter(unchanged):
            for name, buffer in shards.storage.buffers.items():
                if name in weight.buffers:
                    weight.buffers[name].copy_(buffer)
            shards.store_codes(outputs, weight.buffers)
            for launch in prepare_expansion(weight.matrices, shards.whole_scales(outputs)):
                launch()
            rebuild_derived([weight])
        if self.verify != "off" and self._verified != shards.casts:
            with announcing([self.comm]):
                self._compare(weight)
            self._verified = shards.casts  # after an error the next gather is compared as well

    def _compare(self, weight: QuantizedStorage) -> None:
        """Compare the gathered ``weight``. Collective over the ranks that share it; HSDP replicas
        are not compared with each other.

        Raises:
            VerificationError: on every rank, if any rank holds bytes that differ from the cast.
        """
        shards, others = self.shards, self.cast_group[1:]
        whole, label = shards.storage, "together" if others else None
        held = QuantizedStorage(
            whole.shape, whole.dtype, whole.recipe, weight.buffers | self.state, whole.tp_shard
        )
        weights = [HeldWeight(self.name, held, shards.owners, label)]
        for other in others:
            storage, owners = other.shards.storage, other.shards.owners
            weights.append(HeldWeight(other.name, storage, owners, label, is_compared=False))

        def master(_: Communicator, place: int) -> torch.Tensor | None:
            own = self.cast_group[place].master
            return plain_master(own, held.device) if own.numel() else None

        tp_comms = [] if whole.tp_shard is None else [whole.tp_shard.require_comm()]
        verification = Verification(self.verify, {self.comm: weights}, tp_comms, master)
        verification.check(shards.casts)

    @torch.no_grad()
    def gathered_value(
        self,
        outputs: Sequence[torch.Tensor],
        shards: AllGatherInput,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the dequantized codes ``outputs``, of the weight's shape and dtype, in ``out`` if
        it is given.
        """
        unchanged = () if out is None or self._gathered != shards.casts else (out,)
        value = self.gathered_weight(outputs, shards)[0].dequantize()
        if out is None:
            return value
        with torch.autograd._unsafe_preserve_version_counter(unchanged):
            return out.copy_(value)


def gather_of(tensor: torch.Tensor) -> LowBitAllGather | None:
    """Return the gather of a master, sharded or not; None for any other tensor."""
    return getattr(to_local(tensor), "low_bit_all_gather", None)
