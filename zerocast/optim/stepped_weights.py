"""Collects the weights that an optimizer steps, and checks that all ranks were given the same.

:mod:`zerocast.cast.consistency` compares what a cast depends on. This module compares the options
of an optimizer, and all weights that it steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zerocast.arguments import check_names, why_no_memory
from zerocast.cast.amax_groups import by_first_names
from zerocast.cast.shard_spec import check_castable
from zerocast.comm import Communicator, lines_that_differ
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError, RankMismatchError, StaleCopyError, UnfinishedStepError
from zerocast.layout import Extent
from zerocast.optim.param_groups import ParamGroups, option_lines
from zerocast.recipes import NOMINAL_DTYPES, describe_recipe
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.digest import digest, digests
from zerocast.tensors.wrapped_names import without_wrappers


@dataclass(frozen=True, slots=True)
class StorageKind:
    """The storage format of weights. Weights of one kind share flat buffers, each with one
    all-gather.

    Attributes:
        dtype: the dtype of the buffer's entries; uint8 for codes.
        bits: the number of bits of one weight element.
        planes: the number of buffers that hold a weight: two if the columnwise codes are quantized
            independently and gathered, too.
    """

    dtype: torch.dtype
    bits: int
    planes: int = 1

    @property
    def is_codes(self) -> bool:
        """Whether the entries are the codes of quantized weights."""
        return self.dtype == torch.uint8

    @property
    def alignment(self) -> int:
        """The number of elements in 64 bytes, so that shards start on a cache line and no byte has
        two owners.
        """
        return 512 // self.bits

    def entries(self, elements: int) -> int:
        """Return the number of buffer entries that hold ``elements`` weight elements."""
        return elements * self.bits // (8 * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable parameter.

    Attributes:
        name: the name of the weight in messages.
        param: the parameter that the model holds, whole on every rank.
        group: the index of its group in ``param_groups``.
        kind: its storage kind.
    """

    name: str
    param: torch.Tensor
    group: int
    kind: StorageKind

    @property
    def storage(self) -> QuantizedStorage | None:
        """The bytes of a quantized weight; None for a plain one."""
        return self.param.quantized_storage if isinstance(self.param, QuantizedTensor) else None

    @property
    def planes(self) -> list[torch.Tensor]:
        """The tensors that an all-gather sends: the gathered planes of codes, or a plain weight
        itself.
        """
        storage = self.storage
        return [storage.buffers[name] for name in storage.gathered] if storage else [self.param]

    @property
    def init_value(self) -> torch.Tensor | None:
        """The value that a quantized weight was made from, if it is kept, else None."""
        return self.storage.high_precision_init_val if self.storage else None


def value_digests(weights: Sequence[Weight]) -> list[str]:
    """Return a text for each weight that is equal for equal values under one recipe."""
    values = []
    for weight in weights:
        if (storage := weight.storage) is None:
            values.append(weight.param)
        else:
            left_out = {*storage.derived_names, *storage.recipe.state}
            stored = [digest(b) for name, b in storage.buffers.items() if name not in left_out]
            values.append(torch.stack(stored))
    return [f"{number:x}" for number in digests(values)]


def restart_master(weight: Weight, master: torch.Tensor, extent: Extent) -> None:
    """Restart ``master``, elements ``extent`` of a quantized weight, from the kept value that the
    weight was made from, else from its codes.
    """
    param, kept = weight.param, weight.init_value
    assert isinstance(param, QuantizedTensor)
    values = param.dequantize(torch.float32) if kept is None else kept
    master.copy_(values.reshape(-1)[extent.start : extent.end])


def restart_plain_master(
    master: torch.Tensor, values: torch.Tensor, is_written: torch.Tensor
) -> None:
    """Restart elements of ``master`` from the flat ``values`` of plain weights where ``is_written``
    and ``values`` is not bitwise their rounding. It does not wait for the device.
    """
    bits = torch.int16 if values.itemsize == 2 else torch.int32
    is_other = master.to(values.dtype).view(bits) != values.view(bits)
    torch.where(is_other & is_written, values, master, out=master)


def index_of(weights: Iterable[Weight], param: torch.Tensor, call: str) -> int:
    """Return the index of ``param`` among the weights.

    Raises:
        InputError: if it is not one of them; the message names ``call``.
    """
    for i, weight in enumerate(weights):
        if weight.param is param:
            return i
    raise InputError(
        f"{call} needs one of this optimizer's trainable parameters, got another tensor."
    )


def collect_weights(param_groups: ParamGroups) -> list[Weight]:
    """Return the weights of all groups in order.

    Raises:
        InputError: if a weight has an unsupported dtype or device, or does not support a sharded
            cast; if two weights share memory or a name; if there are no weights.
        UnfinishedStepError, StaleCopyError: if a weight does not hold the whole value that its
            master would start from.
    """
    weights = []
    given = (param for group in param_groups for param in group["params"])
    quantized = [param for param in given if isinstance(param, QuantizedTensor)]
    QuantizedStorage.share_forms(param.quantized_storage for param in quantized)
    for g, group in enumerate(param_groups):
        places = [f"param_groups[{g}]['params'][{i}]" for i in range(len(group["params"]))]
        names = map(without_wrappers, group.get("param_names", places))
        for name, param in zip(names, group["params"], strict=True):
            weights.append(Weight(name, param, g, storage_kind(name, param)))
    if not weights:
        raise InputError(
            "ZeroOptimizer needs at least one parameter that requires a gradient, got none."
        )
    check_names("params", [weight.name for weight in weights])
    first = weights[0]
    for weight in weights:
        if weight.param.device != first.param.device:
            raise InputError(
                f"all weights of one ZeroOptimizer must be on one device: {first.name} is on "
                f"{first.param.device} and {weight.name} on {weight.param.device}; make an "
                "optimizer for each device."
            )
    if first.param.is_meta:
        raise InputError(
            f"the weights of a ZeroOptimizer must hold the values that masters start from, got "
            f"{first.name} on the meta device; call model.to_empty(device=...) and load or reset "
            f"its parameters first."
        )
    for weight in weights:
        _check_whole(weight)
    _check_memory(weights)
    return weights


def _check_whole(weight: Weight) -> None:
    if weight.storage is None:
        if problem := why_no_memory(weight.param):
            raise InputError(f"the weight {weight.name} of a ZeroOptimizer must not be {problem}.")
        return
    if weight.init_value is not None:
        return
    try:
        weight.storage.writes.require_scales()
    except (StaleCopyError, UnfinishedStepError) as error:
        raise type(error)(
            f"no master can start from {weight.name}: {error} Where a checkpoint is loaded into "
            f"the new optimizer, write the weight before it is made (param.zero_())."
        ) from None


def storage_kind(name: str, param: torch.Tensor) -> StorageKind:
    """Return the storage kind of the weight ``name``.

    Raises:
        InputError: if its dtype is unsupported, or it does not support a sharded cast.
    """
    if isinstance(param, QuantizedTensor):
        storage = param.quantized_storage
        check_castable(name, storage)
        return StorageKind(torch.uint8, param.recipe.numerics.fmt.bits, len(storage.gathered))
    if param.dtype not in NOMINAL_DTYPES:
        raise InputError(
            f"{name} must be a quantized weight, or plain bfloat16, float16 or float32, because "
            f"its master is FP32; got {param.dtype}."
        )
    return StorageKind(param.dtype, 8 * param.dtype.itemsize)


def _check_memory(weights: Sequence[Weight]) -> None:
    """Raise :class:`InputError` if two parameters overlap, because moving would separate them."""
    spans = []
    for weight in weights:
        for data in weight.planes:
            strides = zip(data.shape, data.stride(), strict=True)
            extent = sum((n - 1) * stride for n, stride in strides) + 1
            if data.numel():
                begin = data.data_ptr()
                spans.append((begin, begin + extent * data.element_size(), weight.name))
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise InputError(
                f"{name} and {other} are different parameters in the same memory; tie weights by "
                "giving both modules the same Parameter object."
            )


# --- whether all ranks were given the same ---


def check_same_optimizer(
    comm: Communicator, optimizer: str, param_groups: ParamGroups, weights: Sequence[Weight]
) -> None:
    """Compare optimizer, options and weights of all ranks. Collective.

    The values of a weight may differ between ranks, but must not be those of another weight.

    Args:
        optimizer: a description of the optimizer and its options.

    Raises:
        RankMismatchError: on every rank, naming both sides of the first difference.
    """
    recipes = {id(w.storage.recipe): w.storage.recipe for w in weights if w.storage is not None}
    texts = {key: describe_recipe(recipe) for key, recipe in recipes.items()}
    labels = [w.storage.amax_group if w.storage is not None else None for w in weights]
    groups = by_first_names(labels, [w.name for w in weights])
    stored = [
        f"{w.name}: {tuple(w.param.shape)} of {_stored(w, texts, g)} in param_groups[{w.group}]"
        for w, g in zip(weights, groups, strict=True)
    ]
    named = all("param_names" in group for group in param_groups if group["params"])
    check_same(
        comm,
        [f"{optimizer}, {named=}", *option_lines(param_groups), *stored],
        "every rank must optimize the same weights in the same order with the same options",
    )
    if named:
        return
    # Without names, only values distinguish weights of one shape, and show their order.
    values = value_digests(weights)
    lines = [f"{tuple(w.param.shape)} {v}" for w, v in zip(weights, values, strict=True)]
    everyone = lines_that_differ(comm, lines) or []
    for rank, theirs in enumerate(everyone):
        for i, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            # Ranks may start from different values, but not likely from those of another weight.
            if first != other and other in everyone[0]:
                there = weights[everyone[0].index(other)].name
                raise RankMismatchError(
                    "every rank must list the weights in the same order: what rank 0 gave as "
                    f"{there}, rank {rank} gave as {weights[i].name}; give "
                    "model.named_parameters(), whose names are compared."
                )


def _stored(weight: Weight, recipes: Mapping[int, str], amax_group: str | None) -> str:
    """Return a description of the weight's storage; ``recipes`` are the texts of all recipes."""
    storage = weight.storage
    if storage is None:
        return str(weight.param.dtype)
    columnwise = "with" if storage.has_columnwise else "without"
    group = "" if amax_group is None else f", amax group {amax_group}"
    return f"{recipes[id(storage.recipe)]}, {storage.dtype}, {columnwise} a columnwise copy{group},"
