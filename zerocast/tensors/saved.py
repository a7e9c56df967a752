"""Whether a quantized weight that came out of a file, or out of a compiled graph, is one.

Kernels trust the shapes of buffers, so a damaged or crafted file must not get as far as a storage:
everything that a weight is made of is compared with what its recipe says here, and recipes are made
anew from their fields, for unpickling looks at none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from zerocast.errors import InputError, ZerocastError
from zerocast.recipes import NOMINAL_DTYPES, RECIPES, Recipe
from zerocast.recipes.format import QParams
from zerocast.tensors.tp_shard import TensorParallelShard

Fields = TypeVar("Fields")

_ADVICE = "the file is damaged or was not written by zerocast; save the weight again."


def checked_recipe(recipe: Any) -> Recipe:
    """``recipe`` made anew by its constructor.

    Raises:
        InputError: where it is no recipe, or has fields that its constructor refuses.
    """
    if type(recipe) not in RECIPES.values():
        raise _damaged(f"a recipe of {', '.join(RECIPES)}", type(recipe).__name__)
    fields = {
        name: _made_anew(value) if isinstance(value, QParams) else value
        for name, value in _fields(recipe).items()
    }
    return _made_anew(recipe, **fields)


def checked_tp_shard(tp_shard: Any) -> TensorParallelShard | None:
    """A new ``tp_shard``, without a group.

    Raises:
        InputError: where it is none.
    """
    if tp_shard is None:
        return None
    if type(tp_shard) is not TensorParallelShard:
        raise _damaged("a TensorParallelShard or None", type(tp_shard).__name__)
    numbers = [tp_shard.dim, tp_shard.start, tp_shard.size, *tp_shard.whole]
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise _damaged("a part of whole numbers", str(numbers))
    return _made_anew(tp_shard, comm=None)


def check_nominal(
    shape: Any,
    dtype: Any,
    recipe: Recipe,
    tp_shard: TensorParallelShard | None,
    *,
    columnwise: bool,
) -> None:
    """Raise :class:`InputError` unless ``recipe`` holds a weight of this shape and dtype."""
    if not isinstance(shape, Sequence) or any(
        type(size) is not int or not 0 <= size < 2**31 for size in shape
    ):
        raise _damaged("a shape of whole numbers", repr(shape))
    if dtype not in NOMINAL_DTYPES:
        raise _damaged(f"a nominal dtype of {', '.join(map(str, NOMINAL_DTYPES))}", repr(dtype))
    if tp_shard is None:
        recipe.check_shape(shape)
    else:
        tp_shard.check(recipe, shape, columnwise=columnwise)


def hold_columnwise(buffers: Any) -> bool:
    """Whether ``buffers`` have a columnwise copy among them.

    Raises:
        InputError: where they are no dictionary, or an empty one.
    """
    if not isinstance(buffers, dict) or not buffers:
        raise _damaged("a dictionary of buffers", type(buffers).__name__)
    return any(str(name).startswith("columnwise_") for name in buffers)


def check_buffers(
    shape: Sequence[int],
    recipe: Recipe,
    buffers: dict[str, torch.Tensor],
    *,
    read_rowwise_only: set[str],
) -> None:
    """Raise :class:`InputError` unless ``buffers`` are what a weight stores.

    They may lack all that only rowwise codes are read with, ``read_rowwise_only``, and all that the
    recipe remembers, as tensors of quantizers do.
    """
    specs = recipe.buffers(shape, columnwise=hold_columnwise(buffers))
    missing = specs.keys() - buffers.keys()
    for left_out in (read_rowwise_only & specs.keys(), set(recipe.state)):
        if left_out <= missing:
            missing -= left_out
    if missing or not buffers.keys() <= specs.keys():
        raise _damaged(f"the buffers {', '.join(specs)}", ", ".join(map(str, buffers)))
    for name, buffer in buffers.items():
        spec = specs[name]
        if not isinstance(buffer, torch.Tensor) or buffer.layout != torch.strided:
            raise _damaged(f"{name} to be a tensor", type(buffer).__name__)
        given = tuple(buffer.shape), buffer.dtype
        if given != (spec.shape, spec.dtype) or not buffer.is_contiguous() or buffer.is_neg():
            raise _damaged(
                f"{name} to be contiguous, {list(spec.shape)} of {spec.dtype}",
                f"{list(given[0])} of {given[1]} with strides {list(buffer.stride())}",
            )
    devices = {buffer.device for buffer in buffers.values()}
    if len(devices) > 1:
        raise _damaged("all buffers on one device", ", ".join(sorted(map(str, devices))))


def check_memory(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`InputError` unless every buffer is plain memory of its own."""
    spans = []
    for name, buffer in buffers.items():
        if type(buffer) is not torch.Tensor:
            raise _damaged(f"{name} to be a plain tensor", type(buffer).__name__)
        if buffer.device.type == "meta":
            continue
        storage, start = buffer.untyped_storage(), buffer.storage_offset() * buffer.itemsize
        if start + buffer.nbytes > storage.nbytes():
            raise _damaged(f"{buffer.nbytes} bytes for {name}", f"{storage.nbytes() - start}")
        spans.append((storage.data_ptr() + start, storage.data_ptr() + start + buffer.nbytes, name))
    spans.sort()
    for (_, end, name), (start, _, after) in itertools.pairwise(spans):
        if start < end:
            raise _damaged("memory of its own for every buffer", f"{name} and {after} in one place")


def check_flags(rebuild_on_use: Any, amax_group: Any) -> None:
    """Raise :class:`InputError` for values that no weight has."""
    if rebuild_on_use not in (None, True, False):
        raise _damaged("rebuild_on_use to be a bool or None", repr(rebuild_on_use))
    if not isinstance(amax_group, str | None):
        raise _damaged("amax_group to be a text or None", repr(amax_group))


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}


def _made_anew(value: Fields, **fields: Any) -> Fields:
    try:
        return type(value)(**_fields(value) | fields)
    except ZerocastError:
        raise
    except Exception as error:  # whatever a constructor says of what it does not know
        raise _damaged(f"the fields of a {type(value).__name__}", repr(_fields(value))) from error


def _damaged(required: str, given: str) -> InputError:
    return InputError(f"a quantized weight that is loaded needs {required}, got {given}; {_ADVICE}")
