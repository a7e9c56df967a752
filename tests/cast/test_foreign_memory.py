"""Masters and buffers that have no memory of their own, or share it, are refused on every rank
before anything is written: never a segmentation fault, never wrong bytes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zerocast
from tests.support.claims import told_all
from tests.support.planned import NUMEL, SHAPE
from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.comm import Communicator, SingleRank
from zerocast.errors import InputError

HALF = NUMEL // 2
NVFP4 = zerocast.NVFP4BlockScaling()


class Wrapped(torch.Tensor):
    """A tensor that stands for another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def fake() -> torch.Tensor:
    """A FakeTensor."""
    with FakeTensorMode():
        return torch.ones(HALF)


def freed() -> torch.Tensor:
    """A tensor without memory."""
    tensor = torch.ones(HALF)
    tensor.untyped_storage().resize_(0)
    return tensor


MASTERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: Wrapped(torch.ones(HALF)), "to_local"),
    "quantized": (
        lambda: zerocast.quantize(torch.ones(32, 32), NVFP4, dtype=torch.float32),
        "FP32 master in place of a quantized weight",
    ),
    "fake": (fake, "FakeTensor"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(HALF)), "torch.func"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(HALF)]), "nested"),
    "sparse": (lambda: torch.ones(HALF).to_sparse(), "to_dense"),
    "csr": (lambda: torch.ones(32, 32).to_sparse_csr(), "to_dense"),
    "mkldnn": (lambda: torch.ones(HALF).to_mkldnn(), "to_dense"),
    "negative": (lambda: torch._neg_view(torch.ones(HALF)), "resolve_neg"),
    "freed": (freed, "given back"),
}


@on_ranks("in_process", 2)
@pytest.mark.filterwarnings("ignore:.*(nested|CSR).*:UserWarning")
@pytest.mark.parametrize("kind", MASTERS)
def test_masters_without_memory_of_their_own(comm: Communicator, kind: str) -> None:
    """A plan, a functional call, ``cast(masters)`` and ``bind`` refuse them on all ranks, and name
    what to give.
    """
    make, text = MASTERS[kind]
    weight, right, start = zerocast.empty(SHAPE, NVFP4), torch.ones(HALF), HALF * comm.rank
    wrong = make() if comm.rank == 1 else right
    plan = zerocast.CastPlan([weight], [right], [start], comm)
    args = [weight], [wrong], [start], comm
    for call in (
        lambda: zerocast.CastPlan(*args),
        lambda: zerocast.quantize_master_weights(*args),
        lambda: plan.cast([wrong]),
        lambda: plan.bind([wrong]),
    ):
        message = told_all(comm, InputError, call)
        assert text in message
        assert "model_weights[0]" in message
    plan.cast()


def test_quantize_reads_a_negative_view() -> None:
    """``quantize`` resolves what torch would: the signs of a view with the negative bit."""
    x = torch.randn(SHAPE)
    for backend in ("reference", "cpu"):
        with zerocast.use_backend(backend):
            assert_same_storage(
                zerocast.quantize(torch._neg_view(x), NVFP4), zerocast.quantize(-x, NVFP4), backend
            )


def two_weights_in_one_buffer() -> dict[str, Any]:
    """Codes that overlap by a byte."""
    weights = [zerocast.empty(SHAPE, NVFP4) for _ in range(2)]
    flat = torch.zeros(NUMEL, dtype=torch.uint8)
    zerocast.replace_raw_data(weights[0], flat[:HALF])
    zerocast.replace_raw_data(weights[1], flat[HALF - 1 : NUMEL - 1])
    return {"model_weights": weights}


def a_master_in_codes() -> dict[str, Any]:
    """A master that lies in the codes of another weight."""
    weights = [zerocast.empty(SHAPE, NVFP4) for _ in range(2)]
    flat = torch.zeros(4 * NUMEL)
    zerocast.replace_raw_data(weights[1], flat.view(torch.uint8)[16 : 16 + HALF])
    return {"model_weights": weights, "master_weights": [flat[:NUMEL], torch.ones(NUMEL)]}


def one_shard_buffer_for_two() -> dict[str, Any]:
    """One buffer that is to receive the codes of two weights."""
    codes = torch.zeros(HALF, dtype=torch.uint8)
    return {"fsdp_shard_model_weights": [codes, codes]}


def the_codes_of_another_weight() -> dict[str, Any]:
    """A shard's buffer that is another weight's codes."""
    weights = [zerocast.empty(SHAPE, NVFP4) for _ in range(2)]
    return {"model_weights": weights, "fsdp_shard_model_weights": [weights[1].rowwise_data, None]}


@pytest.mark.parametrize(
    "spoil",
    [
        two_weights_in_one_buffer,
        a_master_in_codes,
        one_shard_buffer_for_two,
        the_codes_of_another_weight,
    ],
)
def test_overlapping_memory(spoil: Callable[[], dict[str, Any]]) -> None:
    """What a cast writes is written once, and is no master; both are named."""
    call = {
        "model_weights": [zerocast.empty(SHAPE, NVFP4) for _ in range(2)],
        "master_weights": [torch.ones(NUMEL), torch.ones(NUMEL)],
        "start_offsets": [0, 0],
        "group": SingleRank(),
    }
    for cast in (zerocast.CastPlan, zerocast.quantize_master_weights):
        with pytest.raises(InputError, match="overlap"):
            cast(**(call | spoil()))


def test_masters_may_lie_beside_a_buffer_and_in_none() -> None:
    """Memory up to the first byte of the codes, or from their end on, is no part of them; what lies
    in any buffer of a weight, the lowest and the highest too, is refused by the buffer's name.
    """
    weight = zerocast.empty(SHAPE, NVFP4)
    flat = torch.zeros(2 * NUMEL, dtype=torch.uint8)
    zerocast.replace_raw_data(weight, flat[NUMEL : NUMEL + HALF])
    plan = zerocast.CastPlan([weight], [torch.ones(NUMEL)], [0], SingleRank())
    check = plan._prepared.addresses.check_masters
    check([("before", flat[:NUMEL]), ("behind", flat[NUMEL + HALF :]), ("nothing", flat[:0])])
    for name, buffer in weight.quantized_storage.buffers.items():
        with pytest.raises(InputError, match=f"{name} of model_weights"):
            check([("a master", buffer)])


@on_ranks("in_process", 2)
def test_a_shard_may_be_received_where_the_gather_puts_it(comm: Communicator) -> None:
    """A shard's own buffer may be the slice of its weight's codes."""
    x = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, NVFP4, dtype=torch.float32)
    start = HALF * comm.rank
    own = weight.rowwise_data.view(-1)[start // 2 : (start + HALF) // 2]
    mine = x[start : start + HALF].clone()
    plan = zerocast.CastPlan([weight], [mine], [start], comm, fsdp_shard_model_weights=[own])
    plan.cast()
    plan.all_gather()
    assert_same_storage(weight, zerocast.quantize(x.view(SHAPE), NVFP4), "gathered")


def test_weights_on_the_meta_device() -> None:
    """They hold no bytes to cast into."""
    weight = zerocast.empty(SHAPE, NVFP4, device="meta")
    with pytest.raises(InputError, match="meta"):
        zerocast.CastPlan([weight], [torch.ones(NUMEL, device="meta")], [0], SingleRank())
