"""Weights that others write between steps, quantized and plain (biases, norms, embeddings), also
where torch does not count it: their masters start again from what was written, on every rank, or
all ranks are told.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.optim.training import (
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    assert_same_lists,
    make_params,
)
from tests.support.claims import message_of, one_message, told_all
from tests.support.ranks import on_ranks
from tests.support.recipes import each
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe


def values(seed: int, params: list[Any]) -> list[torch.Tensor]:
    """FP32 values for every parameter."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g) for p in params]


@torch.no_grad()
def write(params: list[Any], given: list[torch.Tensor]) -> None:
    """As ``load_state_dict`` of a model does."""
    for param, value in zip(params, given, strict=True):
        param.copy_(value)


@each("nvfp4", "current")
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_the_next_step_starts_from_values_that_were_loaded(
    recipe: Recipe, size: int, clip: bool
) -> None:
    """Step, load FP32 values, step: the masters are those of the optimizer stepped once more from
    the loaded values, quantized weights' unrounded, and the weights are their cast.
    """

    def train(comm: Communicator) -> None:
        t, whole = Training(comm, recipe, SGD, lr=0.125), Whole(recipe, SGD, ranks=size, lr=0.125)
        write(t.train(0), values(7, t.params))
        for param, master, value in zip(t.params, whole.masters, values(7, t.params), strict=True):
            quantized = isinstance(param, zerocast.QuantizedTensor)
            master.copy_(value if quantized else value.to(param.dtype))
        t.feed(1)
        if clip:
            t.optimizer.clip_grad_norm_(1e9)
        t.optimizer.step()
        t.train(2)
        assert_same_lists(t.masters(), whole.train(1, 2), "masters")
        assert_cast_of(t.params, whole.masters)

    run_in_process(size, train)


def test_masters_that_are_read_or_saved_are_the_loaded_values() -> None:
    """gather_master and state_dict directly after a load show it, and saving loses nothing."""
    given = values(7, make_params(NVFP4))

    def load(comm: Communicator) -> Any:
        t = Training(comm)
        write(t.params, given)
        saved = t.saved()
        assert_same_bytes(t.masters()[0], given[0], "master")
        return saved

    t = Training()
    t.optimizer.load_state_dict(run_in_process(2, load))
    assert_same_bytes(t.masters()[0], given[0], "master")


def test_a_state_that_is_loaded_later_wins() -> None:
    """Masters come from the optimizer's state, not from weights that were written before it."""
    t = Training(lr=1e-2)
    t.train(0)
    saved, masters = t.saved(), t.masters()
    write(t.params, values(7, t.params))
    t.optimizer.load_state_dict(saved)
    assert_same_lists(t.masters(), masters, "masters")
    assert_cast_of(t.params, masters)


def test_elements_that_nobody_changed_keep_their_masters() -> None:
    """A plain weight of which one row was written, or that got its own value, loses no bit of the
    other masters.
    """
    param = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([param], SGD, lr=1e-4)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.gather_master(param)
    with torch.no_grad():
        param.copy_(param.clone())
        param.data.copy_(param.data.clone())
        param[1] = 3.0
    after = optimizer.gather_master(param)
    expected = before.clone()
    expected[1] = 3.0
    assert_same_bytes(after, expected, "master")
    assert before[0, 0] != before[0, 0].bfloat16()


def test_a_weight_written_otherwise_on_one_rank_is_refused_on_every_rank() -> None:
    """Its masters would be a patchwork. Writing all ranks alike puts it right."""

    def train(comm: Communicator) -> str:
        t = Training(comm, NVFP4, SGD, lr=0.125)
        masters, other = t.masters(), values(7, t.params[:1])
        if comm.rank == 1:
            write(t.params[:1], other)
        message = message_of(RankMismatchError, t.train, 0)
        write(t.params[:1], other)
        assert_same_lists(t.masters(), other + masters[1:], "one of them written")
        t.train(0)
        return message

    assert "must hold the same value on every" in one_message(run_in_process(3, train))


@on_ranks("in_process", 3)
def test_a_broadcast_of_what_the_weights_are_changes_no_master(comm: Communicator) -> None:
    """Rank 0 gives others what they hold: bytes that were copied, and masters that stay."""
    t = Training(comm, NVFP4, SGD, lr=0.01)
    params = t.train(0)
    before = t.masters()
    if comm.rank:
        with torch.no_grad():
            for param in params:
                if isinstance(param, zerocast.QuantizedTensor):
                    param.quantized_storage.mark_written()
                else:
                    param.copy_(param.clone())
    assert_same_lists(t.masters(), before, "masters")


def test_writes_to_a_buffer_of_codes_are_named_by_mark_written() -> None:
    """A buffer that was taken out of a weight counts nothing; marked, the write is taken."""
    param = torch.nn.Parameter(zerocast.quantize(torch.ones(4, 16), NVFP4))
    optimizer = ZeroOptimizer([param], SGD, lr=0.5)
    param.rowwise_data.zero_()
    optimizer.mark_written([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.gather_master(param).tolist() == [[-0.5] * 16] * 4
    with pytest.raises(InputError, match="mark_written needs one of this optimizer's"):
        optimizer.mark_written([torch.ones(3)])


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.mpi
@on_ranks("torch_distributed", 2)
def test_ddp_around_the_model_trains_the_same_weights(
    comm: Communicator, optimizer_first: bool
) -> None:
    """DistributedDataParallel averages gradients first, and their mean is themselves; that it
    broadcasts the weights when it is made moves no master.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        )
        zerocast.nn.convert(model, NVFP4, weights="quantized")
        named = list(model.named_parameters())
        if wrap and not optimizer_first:
            model = ddp(model)
        optimizer = ZeroOptimizer(named, SGD, comm, lr=0.125)
        if wrap and optimizer_first:
            model = ddp(model)
        for step in range(3):
            torch.manual_seed(10 * step + comm.rank)
            optimizer.zero_grad()
            model(torch.randint(-4, 5, (8, 32)).float()).sum().backward()
            optimizer.step()
        found.append([optimizer.gather_master(p) for _, p in named])
    for alone, wrapped in zip(*found, strict=True):
        torch.testing.assert_close(alone, wrapped, rtol=1e-5, atol=1e-6)


# --- plain weights ---


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


def ramps(params: list[Any]) -> list[torch.Tensor]:
    """Other values, in the weights' dtypes."""
    return [torch.linspace(-3, 5, p.numel()).view(p.shape).to(p.dtype) for p in params]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_all_gather": True, "bucket_size": 20},
    {"overlap_cast": True, "overlap_grad_reduce": True},
    {"shard": "matrix"},
]


@pytest.mark.parametrize(
    ("write", "options", "size"),
    [
        pytest.param(write, options, size, id=f"{name}-{options}-{size}")
        for i, (name, write) in enumerate(WRITES.items())
        for options, size in (
            (OPTIONS[i % 4], 3),
            (OPTIONS[(i + 1) % 4], 1),
            (OPTIONS[(i + 2) % 4], 3),
        )
    ],
)
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
        for param, master, value in zip(plain(params), masters, ramps(plain(params)), strict=True):
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
    for param, master, value in zip(plain(t.params), masters, ramps(plain(t.params)), strict=True):
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
