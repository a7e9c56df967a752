"""The weights that an optimizer is given: each once, trainable, of a kind that ranks can share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from zerocast.cast.shard_spec import check_castable
from zerocast.errors import InputError
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.digest import digest

Param = torch.Tensor | tuple[str, torch.Tensor]
"""A parameter, or its name and the parameter, as ``model.named_parameters()`` gives them."""

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a weight that is not quantized may be."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """How weights are stored; those of one kind share flat buffers, each with one all-gather.

    Attributes:
        dtype: of the buffer's entries: uint8 for codes.
        bits: of one weight element.
        planes: buffers that a weight has a part in: two where the columnwise codes are quantized
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
        """Elements in 64 bytes: parts start on a cache line, and no byte has two owners."""
        return 512 // self.bits

    def entries(self, elements: int) -> int:
        """Entries of the buffer that hold ``elements`` weight elements."""
        return elements * self.bits // (8 * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable parameter.

    Attributes:
        name: what messages call it.
        param: the parameter that the model holds, whole on every rank.
        group: its place in ``param_groups``.
        kind: how it is stored.
    """

    name: str
    param: torch.Tensor
    group: int
    kind: StorageKind


def planes(param: torch.Tensor) -> list[torch.Tensor]:
    """What an all-gather moves of a weight: its planes of codes, or a plain weight itself."""
    if isinstance(param, QuantizedTensor):
        return [param.quantized_storage.buffers[name] for name in param.quantized_storage.gathered]
    return [param]


def value_digests(params: Sequence[torch.Tensor]) -> list[str]:
    """For each weight a text that is the same for the same value, under one recipe."""
    digests = [_digest(param) for param in params]
    # Read together, for on a GPU each reading would wait.
    return [f"{number:x}" for number in torch.stack(digests).tolist()] if digests else []


def _digest(param: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, QuantizedTensor):
        return digest(param)
    storage = param.quantized_storage
    left_out = {*storage.derived_names, *storage.recipe.state}
    stored = [digest(b) for name, b in storage.buffers.items() if name not in left_out]
    return digest(torch.stack(stored))


def trainable_groups(
    params: Iterable[Param] | Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[Param]]:
    """Param groups as torch knows them, without frozen parameters and with each parameter once in
    its group; and the frozen ones.

    A group that becomes empty stays, so that the caller's groups keep their places.

    Raises:
        InputError: for a group that is none.
    """
    given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    for g, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise InputError(
                f"param_groups[{g}] must be a dict with the key 'params', got {group!r}; give "
                "parameters, or groups such as {'params': [...], 'lr': 1e-3}, not both."
            )
    frozen: list[Param] = []
    return [
        group | {"params": list(_trainable(group["params"], frozen))} for group in groups
    ], frozen


def _trainable(params: torch.Tensor | Iterable[Param], frozen: list[Param]) -> Iterator[Param]:
    seen: set[int] = set()
    for item in [params] if isinstance(params, torch.Tensor) else params:
        param = _tensor(item)
        if id(param) in seen:
            continue
        seen.add(id(param))
        if getattr(param, "requires_grad", True):  # torch refuses what is no tensor
            yield item
        else:
            frozen.append(item)


def _tensor(param: Param) -> torch.Tensor:
    return param[1] if isinstance(param, tuple) else param


def unfrozen(frozen: Iterable[Param]) -> InputError | None:
    """What is wrong where one of the parameters that were ``frozen`` has a gradient to step by."""
    for param in frozen:
        tensor = _tensor(param)
        if tensor.requires_grad and tensor.grad is not None:
            name = param[0] if isinstance(param, tuple) else f"a parameter {tuple(tensor.shape)}"
            return InputError(
                f"{name} has a gradient, and did not require one when the ZeroOptimizer was made, "
                "which left it out; make a new optimizer once parameters are unfrozen, or freeze "
                "them after it was made."
            )
    return None


def collect_weights(param_groups: Sequence[dict[str, Any]]) -> list[Weight]:
    """The weights of all groups in order.

    Raises:
        InputError: for a weight of another dtype or device than can be served, one that no sharded
            cast can fill, two weights that share memory, or none.
    """
    weights = []
    for g, group in enumerate(param_groups):
        for i, param in enumerate(group["params"]):
            name = (
                group["param_names"][i]
                if "param_names" in group
                else f"param_groups[{g}]['params'][{i}]"
            )
            weights.append(Weight(name, param, g, _kind(name, param)))
    if not weights:
        raise InputError(
            "ZeroOptimizer needs at least one parameter that requires a gradient, got none."
        )
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
    _check_memory(weights)
    return weights


def _kind(name: str, param: torch.Tensor) -> StorageKind:
    if isinstance(param, QuantizedTensor):
        check_castable(name, param.quantized_storage)
        return StorageKind(
            torch.uint8, param.recipe.numerics.fmt.bits, len(param.quantized_storage.gathered)
        )
    if param.dtype not in PLAIN_DTYPES:
        raise InputError(
            f"{name} must be a quantized weight, or plain bfloat16, float16 or float32, because "
            f"its master is FP32; got {param.dtype}."
        )
    return StorageKind(param.dtype, 8 * param.dtype.itemsize)


def _check_memory(weights: Sequence[Weight]) -> None:
    """Raise where two parameters overlap: moved to a place of its own each, they would part."""
    spans = []
    for weight in weights:
        for data in planes(weight.param):
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
