"""Plans where they are made and used in unusual places: other modes, backends, functions, names."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_storage
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import InputError

SHAPE = (32, 64)
NUMEL = 32 * 64
NVFP4 = zerocast.NVFP4BlockScaling()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("call", ["plan", "functional"])
def test_a_plan_made_in_inference_mode_works_outside(call: str, backend: str) -> None:
    """What it allocates there is written outside of it, and the other way round."""
    x = torch.randn(NUMEL)
    numerics = zerocast.quantize(x.view(SHAPE), NVFP4, dtype=torch.bfloat16)
    weight = zerocast.empty(SHAPE, NVFP4)
    args = ([weight], [x], [0], SingleRank())
    with zerocast.use_backend(backend):
        if call == "plan":
            with torch.inference_mode():
                cast = zerocast.CastPlan(*args).cast
        else:
            cast = lambda: zerocast.quantize_master_weights(*args)  # noqa: E731
            with torch.inference_mode():
                cast()
        cast()
        with torch.inference_mode():
            cast()
        zerocast.post_all_gather_processing([weight])
    assert_same_storage(weight, numerics, call)


def test_a_functional_call_keeps_to_use_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered plan is another one under another backend."""
    made = []
    plan = zerocast.CastPlan

    def counted(*args: Any, **kwargs: Any) -> zerocast.CastPlan:
        made.append(plan(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("zerocast.cast.functional.CastPlan", counted)
    args = ([zerocast.empty(SHAPE, NVFP4)], [torch.ones(NUMEL)], [0], SingleRank())
    for backend in ("cpu", "reference", "cpu", "reference"):
        with zerocast.use_backend(backend):
            zerocast.quantize_master_weights(*args)
    assert [each._backend.name for each in made] == ["cpu", "reference"]


def no_tensor(history: torch.Tensor) -> Any:
    """A number where a tensor is asked for."""
    return float(history.max())


def whole_history(history: torch.Tensor) -> torch.Tensor:
    """More than one element."""
    return history


def broken(history: torch.Tensor) -> torch.Tensor:
    """An exception."""
    raise KeyError("amax")


@pytest.mark.parametrize("function", [no_tensor, whole_history, broken])
def test_a_function_that_gives_no_amax_is_refused_when_planning(
    function: Callable[[torch.Tensor], Any],
) -> None:
    """On every rank, though it is found by calling it on each."""

    def on_rank(comm: Communicator) -> str:
        recipe = zerocast.DelayedScaling(amax_compute_algo=function)
        weight = zerocast.empty(SHAPE, recipe)
        start = comm.rank * NUMEL // 2
        with pytest.raises(InputError) as refused:
            zerocast.CastPlan([weight], [torch.ones(NUMEL // 2)], [start], comm)
        return str(refused.value)

    first, second = run_in_process(2, on_rank)
    assert first == second


def test_a_function_that_fails_later_on_one_rank_is_an_error_of_all() -> None:
    """Nobody waits for a rank whose function raised in the middle of a cast."""
    fails: list[str] = []

    def algorithm(history: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name in fails:
            raise LookupError("lost")
        return history.max()

    def on_rank(comm: Communicator) -> str:
        weight = zerocast.empty(SHAPE, zerocast.DelayedScaling(amax_compute_algo=algorithm))
        start = comm.rank * NUMEL // 2
        plan = zerocast.CastPlan([weight], [torch.ones(NUMEL // 2)], [start], comm)
        comm.barrier()
        if comm.rank == 1:
            fails.append(threading.current_thread().name)
        with pytest.raises(InputError) as raised:
            plan.cast()
        return str(raised.value)

    assert run_in_process(2, on_rank) == ["on rank 1: LookupError: lost"] * 2


@pytest.mark.parametrize("name", ["", "yrgnbplsv;z6"])
def test_every_name_is_a_name(name: str) -> None:
    """A name whose hash is 0 is one: the first name stays."""
    recipe = zerocast.NVFP4BlockScaling(
        fp4_quant_fwd_weight=zerocast.QParams(stochastic_rounding=True, fp4_2d_quantization=True)
    )
    weight = zerocast.empty(SHAPE, recipe, name=name)
    zerocast.CastPlan([weight], [torch.ones(NUMEL)], [0], SingleRank(), names=["another"])
    assert int(weight.quantized_storage.buffers["rounding_counter"][0]) == 1


def test_plans_that_are_gone_leave_one_clock() -> None:
    """A weight that is never post-processed does not grow with the number of its plans."""
    weight = zerocast.empty(SHAPE, NVFP4)
    storage = weight.quantized_storage
    versions = []
    for _ in range(20):
        zerocast.CastPlan([weight], [torch.ones(NUMEL)], [0], SingleRank()).cast()
        versions.append(storage.version)
        assert storage.is_stale
    assert len(storage._seen) <= 3
    assert versions == list(range(versions[0], versions[0] + 20))
    zerocast.post_all_gather_processing(weight)
    assert not storage.is_stale
    assert storage.version == versions[-1]


def test_a_cast_that_fails_before_the_reduction_draws_nothing() -> None:
    """Stochastic rounding: an exception on one rank is raised on all and counts for none, so that
    the cast that is tried again draws what it would have drawn.
    """
    recipe = zerocast.NVFP4BlockScaling(
        fp4_quant_fwd_weight=zerocast.QParams(stochastic_rounding=True, fp4_2d_quantization=True)
    )
    x = torch.randn(NUMEL)
    numerics = zerocast.quantize(x.view(SHAPE), recipe, dtype=torch.bfloat16, name="w")

    def on_rank(comm: Communicator) -> None:
        weight = zerocast.empty(SHAPE, recipe, name="w")
        start = comm.rank * NUMEL // 2
        mine = x[start : start + NUMEL // 2].clone()
        plan = zerocast.CastPlan([weight], [mine], [start], comm)
        run = plan._cast_steps.run

        def out_of_memory(step: str) -> None:
            raise MemoryError(step)

        if comm.rank == 1:
            plan._cast_steps.run = out_of_memory  # type: ignore[method-assign]
        with pytest.raises(zerocast.ZerocastError, match="on rank 1: MemoryError"):
            plan.cast()
        plan._cast_steps.run = run  # type: ignore[method-assign]
        plan.cast()
        plan.all_gather()
        assert_same_storage(weight, numerics, "tried again")

    run_in_process(2, on_rank)


def test_a_plan_that_one_rank_cannot_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails behind the exchange, such as memory for the buffers, is an error of all ranks."""

    def on_rank(comm: Communicator) -> str:
        weight = zerocast.empty(SHAPE, NVFP4)
        start = comm.rank * NUMEL // 2
        with pytest.raises(zerocast.ZerocastError) as raised:
            zerocast.CastPlan([weight], [torch.ones(NUMEL // 2)], [start], comm)
        return str(raised.value)

    def out_of_memory(*args: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("buffers")
        return made(*args)

    made = zerocast.cast.plan.Exchange
    monkeypatch.setattr(zerocast.cast.plan, "Exchange", out_of_memory)
    assert run_in_process(2, on_rank) == ["on rank 1: MemoryError: buffers"] * 2


def test_a_recipe_that_cannot_be_described_on_one_rank() -> None:
    """What a function closes over may refuse to be printed: every rank hears of it."""

    class Secret:
        def __repr__(self) -> str:
            if threading.current_thread().name == "rank 1":
                raise OSError("no text")
            return "secret"

    secret = Secret()

    def algorithm(history: torch.Tensor) -> torch.Tensor:
        return history.max() if secret else history

    def on_rank(comm: Communicator) -> str:
        weight = zerocast.empty(SHAPE, zerocast.DelayedScaling(amax_compute_algo=algorithm))
        start = comm.rank * NUMEL // 2
        with pytest.raises(zerocast.ZerocastError) as raised:
            zerocast.CastPlan([weight], [torch.ones(NUMEL // 2)], [start], comm)
        return str(raised.value)

    assert run_in_process(2, on_rank) == ["on rank 1: OSError: no text"] * 2


@pytest.mark.parametrize("write", ["plan", "functional"])
def test_torch_counts_writes_of_codes(write):
    """A backward of torch's own operations on a weight is an error where codes were cast since."""
    master, recipe = torch.randn(32, 64), zerocast.Float8CurrentScaling()
    weight = torch.nn.Parameter(zerocast.quantize(master, recipe))
    plan = zerocast.CastPlan([weight], [master], [0])
    for mode in (False, True):
        codes = weight.rowwise_data._version
        output = torch.nn.functional.linear(torch.randn(2, 64, requires_grad=True), weight)
        with torch.inference_mode(mode):
            if write == "plan":
                plan.cast()
            else:
                zerocast.quantize_master_weights([weight], [master], [0])
        assert weight.rowwise_data._version > codes
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.usefixtures("backend")
def test_functional_calls_in_several_threads():
    """Casts of one weight wait for each other: its bytes are always those of one of the masters."""
    masters = [torch.full((64, 64), float(value)) for value in (1, 2, 3)]
    recipe = zerocast.NVFP4BlockScaling()
    weight = zerocast.empty((64, 64), recipe, columnwise=False)
    failed = []

    def cast(master: torch.Tensor) -> None:
        try:
            for _ in range(50):
                zerocast.quantize_master_weights([weight], [master], [0])
        except BaseException as error:  # what a thread raises nobody else hears
            failed.append(error)

    threads = [threading.Thread(target=cast, args=(master,)) for master in masters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    held = weight.dequantize(torch.float32)
    assert any(torch.equal(held, master) for master in masters)
