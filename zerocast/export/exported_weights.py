"""The tensors of a model under the names of a checkpoint, whole on every rank, a bucket at a time.

A quantized weight is exported either as the bytes that the model was trained with, or cast from its
masters by the dialect's recipe. In both cases only codes are gathered, and the exported weight
equals ``zerocast.quantize`` of the whole weight on any number of ranks. A rank holds its shards and
two buckets, never the model; see "Note: two buckets" in :mod:`zerocast.export.stages`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from zerocast.arguments import check_flag, check_integer, check_module
from zerocast.cast import CastPlan
from zerocast.cast.amax_groups import AUTO, Groups
from zerocast.comm import Attempt, Group, as_communicator, raise_together, raising_together
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import InputError, UnsupportedError, ZerocastError
from zerocast.export.bucket_tensors import named_tensors
from zerocast.export.configuration import Configuration, check_ties, check_weights_are_read
from zerocast.export.dialects import Dialect
from zerocast.export.entries import (
    Entry,
    ExportSource,
    Names,
    gathered_dtype,
    in_nominal_dtype,
    own_rows,
    stored_tensors,
)
from zerocast.export.entry_groups import AmaxGroups
from zerocast.export.experts import has_place, matrix_entries
from zerocast.export.include import Include, included_weights
from zerocast.export.input_scales import InputScales, with_input_scales
from zerocast.export.known_dialects import as_dialect
from zerocast.export.master_shards import MasterShards
from zerocast.export.package_names import package_names
from zerocast.export.shard_plan import EntryOwners, ShardPlan
from zerocast.export.stages import (
    NamedTensors,
    Stage,
    in_buckets,
    in_stages,
    in_turn,
    largest_shares,
)
from zerocast.export.stored_names import renamed
from zerocast.export.tp_parts import check_part, tp_part
from zerocast.export.transposed import is_transposed, transposed, transposed_shape, with_masters
from zerocast.export.unwrapping import unwrapped
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import reshard, to_local
from zerocast.tensors import QuantizedTensor

BUCKET_BYTES = 1 << 30
"""The default size of a bucket, whose tensors are whole on a rank at once, in bytes."""


class Export(Uncopied):
    """A plan of all tensors that are exported of a model. Making one is collective.

    Args:
        model: any module with quantized weights, whole on every rank, or with masters sharded by
            ``fully_shard`` (``convert(..., weights="master")``). Or a ZeroOptimizer or CastPlan,
            to export its weights alone.
        dialect: the dialect of the checkpoint, or its name.
        optimizer: the ZeroOptimizer that holds the masters of ``model``; needed to cast from them.
        from_masters: False exports the bytes that the model was trained with, which the dialect
            must be able to store; True casts the masters by the dialect's recipe.
        include: linear layers that are not quantized in the model and are also cast by the
            dialect's recipe: exact names, or patterns with ``*``. Or a mapping from exact names of
            parameters, also of stacks of experts, to the recipes by which they are cast.
        amax_groups: weights that are cast and share one tensor amax. "auto" groups those that
            servers are known to fuse and that are cast by the dialect's recipe, as in
            :func:`zerocast.nn.convert`. Or patterns of names, as in :class:`zerocast.CastPlan`.
            Weights that were converted in groups are always grouped.
        dtype: FP32, BF16 or FP16: the dtype that masters are rounded to before a cast, and in which
            other parameters are stored. By default their dtype; masters of FSDP2 have the dtype of
            the latest gather, except those that transformers keeps in FP32.
        names: maps names in the model to names in the checkpoint: a function, or a mapping, where
            missing names are kept. By default the names of transformers for its models.
        modules: names in the checkpoint of the unquantized modules, for an optimizer or a plan,
            which do not know their modules; needed only for the section.
        input_scales: for ``modelopt/fp8`` and the dialects ``nvfp4-w4a4``, the static input scale
            of every quantized module by its name in the checkpoint, as the dialect stores it; or a
            safetensors file with :attr:`Dialect.input_scale` of each.
        bucket_bytes: the approximate bytes of codes per bucket.
        group: the ranks that export together; by default those of ``optimizer``, or all.

    Attributes:
        comm: the communicator of these ranks.
        dialect: the dialect of the checkpoint.
        held_amaxes: the tensor amaxes of a refit's earlier casts, for :class:`ShardPlan`.
        entries: the exported tensors in the order of the model, tied ones once.
        config: the contents of ``config.json``: the section, with the modules that it names.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument, or if a weight cannot be
            exported this way on any rank.
    """

    instead = "make one of the other model"

    def __init__(
        self,
        model: ExportSource,
        dialect: Dialect | str,
        *,
        optimizer: ZeroOptimizer | None = None,
        from_masters: bool = False,
        include: Include = (),
        amax_groups: Groups = AUTO,
        dtype: torch.dtype | None = None,
        names: Names = None,
        modules: Sequence[str] | None = None,
        input_scales: InputScales = None,
        bucket_bytes: int = BUCKET_BYTES,
        group: Group = None,
    ) -> None:
        optimizer = model if isinstance(model, ZeroOptimizer) else optimizer
        if group is None and isinstance(optimizer, ZeroOptimizer):
            group = optimizer.comm
        self.comm = as_communicator(group)
        self._model, self._from_masters = model, from_masters
        self.held_amaxes: dict[str, torch.Tensor] | None = None
        self._owners: EntryOwners | None = None
        with raising_together(self.comm):
            if not isinstance(model, ZeroOptimizer | CastPlan):
                check_module("model", model)
            if not isinstance(optimizer, ZeroOptimizer | None):
                raise InputError(
                    f"optimizer must be the zerocast.optim.ZeroOptimizer of the model, or None, "
                    f"got {type(optimizer).__name__}; masters of FSDP2 are in the model."
                )
            check_flag("from_masters", from_masters)
            if dtype is not None and dtype not in NOMINAL_DTYPES:
                raise InputError(
                    f"dtype must be one of {', '.join(map(str, NOMINAL_DTYPES))}, or None, got "
                    f"{dtype!r}."
                )
            self._dtype = dtype
            self._bucket_bytes = check_integer("bucket_bytes", bucket_bytes, 1, 2**62)
            self.dialect = as_dialect(dialect)
            if torch.distributed.is_available() and isinstance(model, torch.nn.Module):
                reshard(model)
            self._model = model = unwrapped(model)
            if isinstance(model, torch.nn.Module):
                check_ties(model)
            self._shards = MasterShards(model, optimizer, from_masters, self.comm)
            self._included = included_weights(model, include)
            found = [self._entry(*named) for named in stored_tensors(model).items()]
            if dtype is None:
                found = in_nominal_dtype(model, found)
            recast = {
                each.name
                for each in found
                if each.shard is not None and (from_masters or gather_of(each.tensor) is None)
            }
            groups = AmaxGroups(model, amax_groups, recast)
            found = groups.of_weights(found)
            parts = [
                (entry, [*matrix_entries(entry.dialect, model, entry, from_masters)])
                for entry in found
            ]
            self._names = package_names(model, parts) if names is None else names
            entries = [each for _, own in parts for each in own]
            entries = groups.of_entries(entries)
            of_weights = {entry.name: [each.name for each in own] for entry, own in parts}
            entries = renamed(entries, self._names, self.dialect)
            if not any(entry.recipe for entry in entries):
                raise InputError(
                    f"an export to {self.dialect.name} needs a model with quantized weights, or "
                    f"masters that FSDP2 gathers in codes, got one with none; call "
                    f"zerocast.nn.convert first, or name layers in include. No dialect stores "
                    f"codes of embeddings, or of matrices [in, out] such as GPT-2's Conv1D."
                )
            check_weights_are_read(self.dialect, entries, model)
            groups.check_fused(self.dialect, of_weights, entries)
            self.entries = with_input_scales(self.dialect, entries, input_scales)
            self.config = Configuration(model, self.entries, self.dialect, self._names, modules)

    # --- what is exported ---

    def _entry(self, name: str, tensor: torch.Tensor) -> Entry:
        gather, local = gather_of(tensor), to_local(tensor)
        trained: Recipe | None = None
        chosen = self._included.get(name)
        if chosen is not None and tensor.dim() > 2:
            chosen = dataclasses.replace(chosen, per_matrix=True)
        dialect = self.dialect.of(name)
        if not has_place(dialect, self._model, name, tensor):
            return Entry(name, as_plain(tensor), self._dtype or tensor.dtype, dialect)
        if isinstance(local, QuantizedTensor):
            trained, shard = local.recipe, self._shards.of_codes(name, tensor)
            dtype = (self._dtype if self._from_masters else None) or tensor.dtype
        elif gather is not None:
            trained, shard = gather.recipe, own_rows(name, tensor)
            dtype = self._dtype or gathered_dtype(gather)
        elif name in self._included:
            shard, dtype = self._shards.of_plain(name, tensor), self._dtype or tensor.dtype
        else:
            is_value = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
            dtype = self._dtype if self._dtype and is_value else tensor.dtype
            return Entry(name, tensor, dtype, dialect)
        tp_shard = tp_part(name, tensor)
        transposes = tensor.dim() > 2 and is_transposed(self._model, name)
        shape = tensor.shape if tp_shard is None else tp_shard.whole
        shape = transposed_shape(shape) if transposes else shape
        dialect = self.dialect.of_weight(name, trained or chosen, shape)
        recipe = (chosen or dialect.recipe) if trained is None or self._from_masters else trained
        entry = Entry(name, tensor, dtype, dialect, recipe, shard, tp_shard=tp_shard)
        if trained is None or self._from_masters:
            recipe.check_shape(shape)
            if chosen is not None and not dialect.holds(chosen, shape):
                raise InputError(
                    f"include has {recipe} for {name}, whose bytes {dialect.name} cannot hold; "
                    f"choose another recipe, such as {dialect.recipe}, or another dialect."
                )
        elif not dialect.holds(trained, shape):
            raise InputError(
                f"{name} was trained with {trained}, whose bytes {dialect.name} cannot hold; "
                f"give from_masters=True to cast its masters by {dialect.recipe}."
            )
        elif shard is not None and trained.state:
            raise UnsupportedError(
                f"{name} was trained with {trained}, whose bytes depend on earlier casts; give "
                f"from_masters=True to cast its masters by {dialect.recipe}."
            )
        entry = transposed(entry, from_masters=self._from_masters) if transposes else entry
        if entry.tp_shard is not None and (tensor.dim() < 3 or dialect.fuses_experts):
            check_part(name, entry.tp_shard, recipe)
        return entry

    # --- its tensors ---

    def plan_buckets(self) -> list[list[Entry]]:
        """Return the entries of each bucket, in order: the same on any number of ranks."""
        return in_buckets(self.entries, self._bucket_bytes)

    def plan_stages(self, *, keeps_bucket: bool = False) -> list[list[Stage]]:
        """Return the stages of each bucket; see :func:`in_stages`. Collective."""
        owned = [each for each in self.entries if each.shard is not None]
        if self._owners is None:
            self._owners = EntryOwners(owned)
        shares = dict.fromkeys((each.name for each in self.entries), 0.0)
        shares |= largest_shares(self.comm, owned)
        return [
            in_stages(bucket, self._bucket_bytes, shares, keeps_bucket=keeps_bucket)
            for bucket in self.plan_buckets()
        ]

    def buckets(self) -> Iterator[NamedTensors]:
        """Yield the tensors of each bucket, whole on every rank. Collective.

        While the caller uses a bucket, the first stage of the next is in flight. Release its
        tensors before asking for the next, so that a rank holds only its shards and two buckets.

        Raises:
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        planned = self.plan_stages(keeps_bucket=True)
        gathered = self._in_turn(itertools.chain(*planned))
        for bucket in planned:
            tensors = NamedTensors()
            for _ in bucket:
                stage = next(gathered)
                tensors.update(stage)
                stage.clear()
            yield tensors

    def stages(self) -> Iterator[NamedTensors]:
        """Yield the tensors of each stage, so that no whole bucket is held. Collective."""
        return self._in_turn(itertools.chain(*self.plan_stages()))

    def _in_turn(self, stages: Iterable[Stage]) -> Iterator[NamedTensors]:
        is_single = self.comm.size == 1  # nothing is exchanged
        for goes_alone, group in itertools.groupby(stages, lambda each: each.goes_alone):
            run = [stage.entries for stage in group]
            if goes_alone or is_single:
                yield from (self.gather(each, self.cast(each))() for each in run)
            else:
                yield from in_turn(run, self._begin, self._exchange, self.gather)

    @torch.no_grad()
    def gather(self, bucket: Sequence[Entry], plan: ShardPlan | None) -> Callable[[], NamedTensors]:
        """Start the gather of the weights that ``plan`` has cast. The returned function waits for
        it, and returns all tensors of ``bucket``.
        """
        return functools.partial(
            named_tensors, self.comm, bucket, plan.start_gather() if plan else dict
        )

    def cast(self, bucket: Sequence[Entry]) -> ShardPlan | None:
        """Cast the weights of ``bucket`` and return their plan; None if none is cast."""
        plan, error = self._begin(bucket)
        self._exchange(plan, error)
        if plan is not None:
            plan.encode()
        return plan

    @torch.no_grad()
    def _begin(self, bucket: Sequence[Entry]) -> tuple[ShardPlan | None, ZerocastError | None]:
        """Plan the cast of ``bucket``, and run its steps before the first exchange between ranks;
        return the plan, if anything is cast, and this rank's error, if any. Collective if masters
        are transposed.
        """
        assert self._owners is not None
        entries = [with_masters(each) for each in bucket if each.shard is not None]
        attempt, plan = Attempt(), None
        with attempt:
            if entries:
                plan = ShardPlan(entries, self._owners, self.held_amaxes)
                plan.measure()
        return plan, attempt.error

    def _exchange(self, plan: ShardPlan | None, error: ZerocastError | None) -> None:
        """Run the exchanges of a bucket's cast; raise the ``error`` of any rank on all ranks."""
        raise_together(self.comm, error)
        if plan is not None:
            plan.exchange()
