"""Plain weights (biases, norms, embeddings) that other code writes, also where torch does not count
it: their masters start again from what was written, on every rank, or all ranks are told.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

import zerocast
from tests.optim.training import NVFP4, Training, Whole, assert_cast_of, assert_same_lists
from tests.support.claims import message_of, told_all
from tests.support.ranks import on_gloo, on_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError
from zerocast.optim import ZeroOptimizer


def by_address(param: torch.Tensor, value: torch.Tensor) -> None:
    """As a kernel of another library does."""
    ctypes.memmove(param.data_ptr(), value.contiguous().data_ptr(), value.nbytes)


def in_inference_mode(param: torch.Tensor, value: torch.Tensor) -> None:
    """Which counts nothing."""
    with torch.inference_mode():
        param.copy_(value)


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "param.data.copy_": lambda param, value: param.data.copy_(value),
    "param.data[...]": lambda param, value: param.data.__setitem__(..., value),
    "param.detach().copy_": lambda param, value: param.detach().copy_(value),
    "from_dlpack": lambda param, value: torch.from_dlpack(param.detach()).copy_(value),
    "inference_mode": in_inference_mode,
    "by_address": by_address,
}


def plain(params: list[Any]) -> list[torch.nn.Parameter]:
    """Those that hold no codes: BF16, FP32, and one element of BF16."""
    return [p for p in params if not isinstance(p, zerocast.QuantizedTensor)]


def given(params: list[Any]) -> list[torch.Tensor]:
    """Other values, in the weights' dtypes."""
    return [torch.linspace(-3, 5, p.numel()).view(p.shape).to(p.dtype) for p in params]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_all_gather": True, "bucket_size": 20},
    {"overlap_cast": True, "overlap_grad_reduce": True},
    {"shard": "matrix"},
]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_next_step_starts_from_what_was_written(
    write: Callable[..., Any], options: dict[str, Any], size: int
) -> None:
    """Step, write, step twice: masters are those of the optimizer stepped on from these values, and
    weights their cast. Quantized weights go on as they were.
    """

    def train(comm: Communicator) -> None:
        t, whole = Training(comm, NVFP4, SGD, lr=0.125, **options), Whole(ranks=size)
        whole.optimizer = SGD(whole.masters, lr=0.125)
        params = t.train(0)
        masters = whole.train(0)[-len(plain(params)) :]
        for param, master, value in zip(plain(params), masters, given(plain(params)), strict=True):
            write(param, value)
            master.copy_(value)
        t.train(1, 2)
        t.optimizer.wait_for_all_gather()
        assert_same_lists(t.masters(), whole.train(1, 2), "masters")
        assert_cast_of(t.params, whole.masters)

    run_in_process(size, train)


@on_ranks("in_process", 2)
@pytest.mark.parametrize("clips", [False, True])
def test_a_write_between_backward_and_step_is_followed(comm: Communicator, clips: bool) -> None:
    """After the clipping, too, which has reduced the gradients."""
    t, whole = Training(comm, NVFP4, SGD, lr=0.125), Whole(NVFP4, SGD, ranks=2, lr=0.125)
    t.feed(0)
    if clips:
        t.optimizer.clip_grad_norm_(1e9)
    masters = whole.masters[-len(plain(t.params)) :]
    for param, master, value in zip(plain(t.params), masters, given(plain(t.params)), strict=True):
        param.data.copy_(value)
        master.copy_(value)
    t.optimizer.step()
    assert_same_lists(t.masters(), whole.train(0), "masters")
    assert_cast_of(t.params, whole.masters)


@on_ranks("in_process", 3)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_write_on_one_rank_alone_is_refused_on_every_rank(
    comm: Communicator, rank: int, clips: bool
) -> None:
    """Whoever owns the element, and though the gradients were reduced before; written alike on all
    ranks it is taken.
    """
    t = Training(comm, NVFP4, SGD, lr=0.125)
    t.feed(0)
    if clips:
        t.optimizer.clip_grad_norm_(1e9)
    first = plain(t.params)[0]
    held = first.detach().clone()
    if comm.rank == rank:
        first.data[:1] = 7.0
    message = told_all(comm, RankMismatchError, t.optimizer.step)
    assert "layer.3 must hold the same value on every rank" in message
    first.data[:1] = 7.0
    held[:1] = 7.0
    assert_same_bytes(t.masters()[3].bfloat16(), held, "master")
    t.optimizer.step()


@on_gloo(2)
def test_what_one_rank_loads_and_broadcasts_is_trained_on_all(comm: Communicator) -> None:
    """``load_state_dict`` on rank 0 alone, then ``dist.broadcast(param.data, 0)``: a step of rate 0
    leaves what was loaded, on rank 0, too, which wrote it in another way than the others.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))
    zerocast.nn.convert(model, "mxfp8", weights="quantized")
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, comm, lr=0.0)
    if comm.rank == 0:
        model.load_state_dict({k: torch.full(v.shape, 2.0) for k, v in model.state_dict().items()})
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    for name, param in model.named_parameters():
        assert_same_bytes(optimizer.gather_master(param), torch.full(param.shape, 2.0), name)
        assert_same_bytes(param.detach().float(), torch.full(param.shape, 2.0), name)


def test_a_write_of_the_same_bytes_is_none() -> None:
    """Masters keep the bits that a BF16 weight rounds away."""
    param = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([param], SGD, lr=1e-4)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.gather_master(param)
    param.data.copy_(param.data.clone())
    assert_same_bytes(optimizer.gather_master(param), before, "master")
    assert before[0, 0] != before[0, 0].bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_count_and_not_values(dtype: torch.dtype) -> None:
    """-0.0 written over 0.0 is in the master and in the next weight; so is a NaN, as some NaN."""
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = ZeroOptimizer([param], SGD, lr=0.0)
    for written in (torch.tensor([-0.0, 1.0, 0.0]), torch.tensor([torch.nan, 0.0, -0.0])):
        param.data.copy_(written)
        for _ in range(2):
            torch.testing.assert_close(
                optimizer.gather_master(param), written, rtol=0, atol=0, equal_nan=True
            )
            signs = optimizer.gather_master(param).signbit() & ~written.isnan()
            assert signs.tolist() == (written.signbit() & ~written.isnan()).tolist()
            optimizer.step()


def test_masters_that_were_written_stay_beside_weights_that_were_written() -> None:
    """Of two weights in one buffer one has its master written, and the other itself."""
    params = [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ZeroOptimizer(params, SGD, lr=0.0)
    optimizer.local_master(params[0])[0].fill_(3.0)
    params[1].data.fill_(5.0)
    optimizer.step()
    assert [p.tolist() for p in params] == [[3.0] * 8, [5.0] * 8]


def test_averages_that_are_in_the_weights_are_not_written_silently() -> None:
    """Leaving the context says so, and the weights are the masters' again."""
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([param], SGD, lr=0.5)
    average = optimizer.ema(0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()

    def write() -> None:
        with average.in_weights():
            param.data.fill_(5.0)

    assert "weights were written while averages" in message_of(InputError, write)
    assert param.tolist() == [0.5] * 8
    with average.in_weights():
        assert param.tolist() == [0.75] * 8
    assert optimizer.gather_master(param).tolist() == [0.5] * 8
