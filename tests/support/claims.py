"""What tests claim over and over, each said once: a failure names the tensor, the element and both
values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from tests.support.tp_shards import tp_shard_of
from zerocast import QuantizedTensor, TensorParallelShard
from zerocast.comm import Communicator

Tensors = Mapping[str, torch.Tensor]


def stored(tensors: Tensors | torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all that tensors hold, by name: of a quantized one every buffer, of another one
    itself; of a module's parameters, where one is given.
    """
    given = dict(tensors.named_parameters()) if isinstance(tensors, torch.nn.Module) else tensors
    found = {}
    for name, tensor in given.items():
        if isinstance(tensor, QuantizedTensor):
            buffers = tensor.quantized_storage.buffers.items()
            found |= {f"{name}.{key}": buffer.clone() for key, buffer in buffers}
        else:
            found[name] = tensor.detach().clone()
    return found


def assert_same_tensors(actual: Tensors, expected: Tensors, what: str = "") -> None:
    """The same names, and under each the same bytes."""
    missing, more = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    assert not missing, f"{what}: there is no {sorted(missing)}"
    assert not more, f"{what}: there is {sorted(more)}, too"
    for name, tensor in expected.items():
        assert_same_bytes(actual[name], tensor, f"{name} {what}".rstrip())


def assert_unsharded_cast(
    weight: torch.Tensor,
    whole: torch.Tensor,
    what: str,
    *,
    with_state: bool = True,
    tp_shard: TensorParallelShard | None = None,
) -> None:
    """A gathered weight is the unsharded cast, in every buffer: codes, scales, amax, padding and
    columnwise copies; a tensor-parallel part is what the cast has of it.

    Args:
        weight: as it was gathered. One of high precision is the master, rounded to its dtype.
        whole: the whole weight, cast by one rank; or the whole master, which is cast here.
        what: the name of the weight, and where and when it was gathered.
        with_state: False where what the recipe remembers is not kept in the weight.
        tp_shard: which rows or columns the weight has; by default those that it says it has.
    """
    if not isinstance(weight, QuantizedTensor):
        assert_same_bytes(weight.detach(), whole.detach().to(weight.dtype), what)
        return
    if not isinstance(whole, QuantizedTensor):
        whole = zerocast.quantize(whole, weight.recipe, dtype=weight.dtype)
    assert weight.dtype == whole.dtype, f"{what}: {weight.dtype}, expected {whole.dtype}"
    own = tp_shard or weight.quantized_storage.tp_shard
    shape = whole.shape if own is None else own.shape
    assert weight.shape == shape, f"{what}: shape {weight.shape}, expected {shape}"
    expected = dict(whole.quantized_storage.buffers) if own is None else tp_shard_of(whole, own)
    if not with_state:
        expected = {k: b for k, b in expected.items() if k not in weight.recipe.state}
    assert_same_tensors(weight.quantized_storage.buffers, expected, f"of {what}")


def message_of(error: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What the ``error`` says that the call raises."""
    with pytest.raises(error) as raised:
        call(*args, **options)
    return str(raised.value)


def one_message(by_rank: Sequence[str]) -> str:
    """What every rank was told, which is the same."""
    for rank, message in enumerate(by_rank):
        assert message == by_rank[0], f"rank {rank}: {message!r}, and rank 0: {by_rank[0]!r}"
    return by_rank[0]


def told_all(
    comm: Communicator, error: type[Exception], call: Callable[..., Any], *args: Any, **options: Any
) -> str:
    """What the ``error`` says that the call raises on every rank, the same on all. Collective."""
    return one_message(comm.all_gather_object(message_of(error, call, *args, **options)))
