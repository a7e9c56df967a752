"""Saves and loads storages, and makes them from other buffers, such as those of a compiled graph.

Kernels rely on the shapes of buffers, so a damaged or crafted file must not give a storage.
All parts of a weight are compared here with what its recipe requires. Recipes are rebuilt by their
constructors, because unpickling checks no field.
"""

from __future__ import annotations

import copyreg
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from zerocast.errors import InputError, ZerocastError
from zerocast.recipes import NOMINAL_DTYPES, RECIPES, BufferSpec, Recipe
from zerocast.recipes.format import QParams
from zerocast.tensors.held_planes import read_rowwise_only
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import TensorParallelShard, check_held_shape

Fields = TypeVar("Fields")

_ADVICE = "the file is damaged or was not written by zerocast; save the weight again."


def reduce_storage(storage: QuantizedStorage) -> tuple[Any, ...]:
    """Return what is pickled: shape, dtype, recipe and bytes.

    The rest of a gather buffer, and the group of a tensor-parallel shard, are left out.
    """
    buffers = {
        name: b if b.untyped_storage().nbytes() == b.nbytes else b.clone()
        for name, b in storage.buffers.items()
    }
    fields = storage.shape, storage.dtype, storage.recipe, buffers, storage.writes.rebuild_on_use
    return restore_storage, (*fields, storage.amax_group, storage.tp_shard)


copyreg.pickle(QuantizedStorage, reduce_storage)


def restore_storage(
    shape: Sequence[int],
    dtype: torch.dtype,
    recipe: Recipe,
    buffers: dict[str, torch.Tensor],
    rebuild_on_use: bool | None,
    amax_group: str | None,
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedStorage:
    """Return the storage that was saved.

    Raises:
        InputError: if a buffer, or anything else, does not match a weight of this recipe.
    """
    recipe, tp_shard = _checked_recipe(recipe), _checked_tp_shard(tp_shard)
    if not isinstance(rebuild_on_use, bool | None):
        raise _damaged("rebuild_on_use to be a bool or None", repr(rebuild_on_use))
    if not isinstance(amax_group, str | None):
        raise _damaged("amax_group to be a string or None", repr(amax_group))
    storage = checked_storage(shape, dtype, recipe, buffers, tp_shard)
    _check_memory(buffers)
    storage.writes.take_over(rebuild_on_use)
    storage.amax_group = amax_group
    return storage


def checked_storage(
    shape: Sequence[int],
    dtype: torch.dtype,
    recipe: Recipe,
    buffers: dict[str, torch.Tensor],
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedStorage:
    """Return a storage of ``buffers`` from any source.

    Raises:
        InputError: if they are not the buffers of such a weight.
    """
    if not isinstance(buffers, dict) or not buffers:
        raise _damaged("a dictionary of buffers", type(buffers).__name__)
    columnwise = any(str(name).startswith("columnwise_") for name in buffers)
    _check_nominal(shape, dtype, recipe, tp_shard, columnwise=columnwise)
    _check_buffers(recipe.buffers(shape, columnwise=columnwise), buffers, recipe)
    return QuantizedStorage(shape, dtype, recipe, buffers, tp_shard)


def _checked_recipe(recipe: Any) -> Recipe:
    """Return ``recipe``, rebuilt by its constructor.

    Raises:
        InputError: if it is not a recipe, or its constructor refuses its fields.
    """
    if type(recipe) not in RECIPES.values():
        raise _damaged(f"a recipe of {', '.join(RECIPES)}", type(recipe).__name__)
    fields = {
        name: _made_again(value) if isinstance(value, QParams) else value
        for name, value in _fields(recipe).items()
    }
    return _made_again(recipe, **fields)


def _checked_tp_shard(tp_shard: Any) -> TensorParallelShard | None:
    """Return ``tp_shard``, rebuilt without a group.

    Raises:
        InputError: if it is not a tensor-parallel shard.
    """
    if tp_shard is None:
        return None
    if type(tp_shard) is not TensorParallelShard:
        raise _damaged("a TensorParallelShard or None", type(tp_shard).__name__)
    numbers = [tp_shard.dim, tp_shard.start, tp_shard.size, *tp_shard.whole]
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise _damaged("a shard of integers", str(numbers))
    return _made_again(tp_shard, comm=None)


def _check_nominal(
    shape: Any,
    dtype: Any,
    recipe: Recipe,
    tp_shard: TensorParallelShard | None,
    *,
    columnwise: bool,
) -> None:
    """Raise :class:`InputError` unless ``recipe`` can hold a weight of this shape and dtype."""
    if not isinstance(shape, Sequence) or any(
        type(size) is not int or not 0 <= size < 2**31 for size in shape
    ):
        raise _damaged("a shape of integers", repr(shape))
    if dtype not in NOMINAL_DTYPES:
        raise _damaged(f"a nominal dtype of {', '.join(map(str, NOMINAL_DTYPES))}", repr(dtype))
    check_held_shape(recipe, shape, tp_shard, columnwise=columnwise)


def _check_buffers(
    specs: Mapping[str, BufferSpec], buffers: Mapping[str, torch.Tensor], recipe: Recipe
) -> None:
    """Raise :class:`InputError` unless ``buffers`` are what a weight stores.

    They may lack what only rowwise codes are read with, and the recipe state, as tensors of
    quantizers do.
    """
    missing = specs.keys() - buffers.keys()
    for left_out in (read_rowwise_only(specs), set(recipe.state)):
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


def _check_memory(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`InputError` unless every buffer is a plain tensor with separate memory."""
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
            raise _damaged("separate memory for every buffer", f"{name} and {after} at one address")


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}


def _made_again(value: Fields, **fields: Any) -> Fields:
    try:
        return type(value)(**_fields(value) | fields)
    except ZerocastError:
        raise
    except Exception as error:  # whatever a constructor raises for unknown fields
        raise _damaged(f"the fields of a {type(value).__name__}", repr(_fields(value))) from error


def _damaged(required: str, given: str) -> InputError:
    return InputError(f"a quantized weight that is loaded needs {required}, got {given}; {_ADVICE}")
