"""Weights that others write between steps: their masters start anew from what was written."""

from typing import Any

import pytest
import torch

import zerocast
from tests.optim.training import (
    FP8,
    NVFP4,
    assert_cast_of,
    draw_gradients,
    make_params,
    mean_gradients,
    set_gradients,
    through_a_file,
)
from tests.support.ranks import run_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe


def values(seed: int, params: list[Any]) -> list[torch.Tensor]:
    """FP32 values for every parameter."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g) for p in params]


def one_step(params: list[Any], optimizer: ZeroOptimizer, step: int, rank: int) -> None:
    """With gradients of :func:`draw_gradients`."""
    set_gradients(params, draw_gradients([p.shape for p in params], step, rank))
    optimizer.step()


@torch.no_grad()
def write(params: list[Any], given: list[torch.Tensor]) -> None:
    """As ``load_state_dict`` of a model does."""
    for param, value in zip(params, given, strict=True):
        param.copy_(value)


@pytest.mark.parametrize("recipe", [NVFP4, FP8], ids=["nvfp4", "fp8"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_the_next_step_starts_from_values_that_were_loaded(
    recipe: Recipe, size: int, clip: bool
) -> None:
    """Step, load FP32 values, step: the masters are those of the optimizer stepped once more from
    the loaded values, quantized weights' unrounded, and the weights are their cast.
    """

    def train(comm: Communicator) -> Any:
        params = make_params(recipe)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=0.125)
        one_step(params, optimizer, 0, comm.rank)
        write(params, values(7, params))
        set_gradients(params, draw_gradients([p.shape for p in params], 1, comm.rank))
        if clip:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        one_step(params, optimizer, 2, comm.rank)
        return params, [optimizer.gather_master(p) for p in params]

    fresh = make_params(recipe)
    whole = [
        v if isinstance(p, zerocast.QuantizedTensor) else v.to(p.dtype).float()
        for p, v in zip(fresh, values(7, fresh), strict=True)
    ]
    for step in (1, 2):
        for master, g in zip(
            whole, mean_gradients([p.shape for p in fresh], step, size), strict=True
        ):
            master.add_(g, alpha=-0.125)
    for params, masters in run_in_process(size, train):
        for mine, expected in zip(masters, whole, strict=True):
            assert_same_bytes(mine, expected, "master")
        assert_cast_of(params, whole)


def test_masters_that_are_read_or_saved_are_the_loaded_values() -> None:
    """gather_master and state_dict directly after a load show it, and saving loses nothing."""

    def load(comm: Communicator) -> Any:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, group=comm)
        given = values(7, params)
        write(params, given)
        saved = through_a_file(optimizer.state_dict())
        assert_same_bytes(optimizer.gather_master(params[0]), given[0], "master")
        return saved, given[0]

    results = run_in_process(2, load)
    params = make_params(NVFP4)
    optimizer = ZeroOptimizer(params)
    optimizer.load_state_dict([saved for saved, _ in results])
    assert_same_bytes(optimizer.gather_master(params[0]), results[0][1], "master")


def test_a_state_that_is_loaded_later_wins() -> None:
    """Masters come from the optimizer's state, not from weights that were written before it."""
    params = make_params(NVFP4)
    optimizer = ZeroOptimizer(params, lr=1e-2)
    one_step(params, optimizer, 0, 0)
    saved = through_a_file(optimizer.state_dict())
    masters = [optimizer.gather_master(p) for p in params]
    write(params, values(7, params))
    optimizer.load_state_dict(saved)
    for param, master in zip(params, masters, strict=True):
        assert_same_bytes(optimizer.gather_master(param), master, "master")
    assert_cast_of(params, masters)


def test_elements_that_nobody_changed_keep_their_masters() -> None:
    """A plain weight of which one row was written, or that got its own value, loses no bit of the
    other masters.
    """
    param = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    optimizer = ZeroOptimizer([param], torch.optim.SGD, lr=1e-4)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.gather_master(param)
    with torch.no_grad():
        param.copy_(param.clone())
        param[1] = 3.0
    after = optimizer.gather_master(param)
    expected = before.clone()
    expected[1] = 3.0
    assert_same_bytes(after, expected, "master")
    assert before[0, 0] != before[0, 0].bfloat16()


def test_a_weight_written_otherwise_on_one_rank_is_refused_on_every_rank() -> None:
    """Its masters would be a patchwork. Writing all ranks alike puts it right."""

    def train(comm: Communicator) -> str:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=0.125)
        before = [optimizer.gather_master(p) for p in params]
        if comm.rank == 1:
            write(params[:1], values(7, params[:1]))
        with pytest.raises(RankMismatchError, match="must hold the same value on every") as caught:
            one_step(params, optimizer, 0, comm.rank)
        write(params[:1], values(7, params[:1]))
        assert_same_bytes(optimizer.gather_master(params[0]), values(7, params[:1])[0], "written")
        assert_same_bytes(optimizer.gather_master(params[1]), before[1], "not written")
        one_step(params, optimizer, 0, comm.rank)
        return str(caught.value)

    messages = run_in_process(3, train)
    assert messages == [messages[0]] * 3


def test_a_broadcast_of_what_the_weights_are_changes_no_master() -> None:
    """Rank 0 gives others what they hold: bytes that were copied, and masters that stay."""

    def train(comm: Communicator) -> None:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(params, torch.optim.SGD, comm, lr=0.01)
        one_step(params, optimizer, 0, comm.rank)
        before = [optimizer.gather_master(p) for p in params]
        if comm.rank:
            with torch.no_grad():
                for param in params:
                    if isinstance(param, zerocast.QuantizedTensor):
                        param.quantized_storage.mark_written()
                    else:
                        param.copy_(param.clone())
        for param, master in zip(params, before, strict=True):
            assert_same_bytes(optimizer.gather_master(param), master, "master")

    run_in_process(3, train)


def test_writes_that_torch_does_not_count_are_named_by_mark_written() -> None:
    """Through ``.data`` of a plain weight nothing is counted; marked, it is taken all the same."""
    param = torch.nn.Parameter(torch.ones(4, 8))
    optimizer = ZeroOptimizer([param], torch.optim.SGD, lr=0.5)
    param.data.fill_(3.0)
    optimizer.mark_written([param])
    param.grad = torch.ones(4, 8)
    optimizer.step()
    assert param.tolist() == [[2.5] * 8] * 4
    with pytest.raises(InputError, match="mark_written needs one of this optimizer's"):
        optimizer.mark_written([torch.ones(3)])


def test_a_weight_that_was_replaced_is_refused() -> None:
    """Swapped with other memory, it is not where its codes are gathered."""
    params = make_params(NVFP4)
    optimizer = ZeroOptimizer(params)
    params[3].data = torch.zeros_like(params[3])
    with pytest.raises(InputError, match="must stay in the buffer .* write weights in place"):
        one_step(params, optimizer, 0, 0)


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.mpi
def test_ddp_around_the_model_trains_the_same_weights(optimizer_first: bool) -> None:
    """DistributedDataParallel averages gradients first, and their mean is themselves; that it
    broadcasts the weights when it is made moves no master.
    """

    def train(comm: Communicator) -> Any:
        found = []
        for wrap in (False, True):
            torch.manual_seed(0)
            model: torch.nn.Module = torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
            )
            zerocast.nn.convert(model, NVFP4, weights="quantized")
            named = list(model.named_parameters())
            if wrap and not optimizer_first:
                model = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = ZeroOptimizer(named, torch.optim.SGD, comm, lr=0.125)
            if wrap and optimizer_first:
                model = torch.nn.parallel.DistributedDataParallel(model)
            for step in range(3):
                torch.manual_seed(10 * step + comm.rank)
                optimizer.zero_grad()
                model(torch.randint(-4, 5, (8, 32)).float()).sum().backward()
                optimizer.step()
            found.append([optimizer.gather_master(p) for _, p in named])
        return found

    for alone, wrapped in run_ranks("torch_distributed", 2, train):
        for a, b in zip(alone, wrapped, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
