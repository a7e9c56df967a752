"""Plans where they are made and used in unusual places: other modes, backends, functions, names."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from tests.support.planned import NUMEL, SHAPE, Planned, unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import BackendError, InputError, PeerFailedError, ZerocastError

NVFP4, DRAWN = RECIPES["nvfp4"], RECIPES["nvfp4-drawn"]


@on_ranks("in_process", 2)
def test_what_keeps_a_rank_from_making_scales_is_told(comm: Communicator) -> None:
    """The others, which have no collective before the gather, raise there with its reason."""
    ours = Planned(comm, RECIPES["nvfp4"])

    def broken(name: str) -> None:
        raise BackendError(f"no memory for {name}")

    compute_scale = dict(ours.plan.pipeline)["compute_scale"]
    if comm.rank == 1:
        ours.plan._prepared.steps.run = broken  # type: ignore[method-assign]
        with pytest.raises(BackendError, match="no memory for compute_scale"):
            compute_scale()
    else:
        compute_scale()
        with pytest.raises(PeerFailedError, match="no memory for compute_scale"):
            ours.plan.all_gather()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("call", ["plan", "functional"])
def test_a_plan_made_in_inference_mode_works_outside(call: str, backend: str) -> None:
    """What it allocates there is written outside of it, and the other way round."""
    x = torch.randn(NUMEL)
    weight = zerocast.empty(SHAPE, NVFP4)
    args = ([weight], [x], [0], SingleRank())
    with zerocast.use_backend(backend):
        with torch.inference_mode():
            plan = zerocast.CastPlan(*args)
            zerocast.quantize_master_weights(*args)
        cast = plan.cast if call == "plan" else lambda: zerocast.quantize_master_weights(*args)
        cast()
        with torch.inference_mode():
            cast()
        zerocast.post_all_gather_processing([weight])
    assert_same_storage(weight, unsharded(x, NVFP4), call)


def test_a_functional_call_keeps_to_use_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered plan is another one under another backend."""
    made = []
    plan = zerocast.CastPlan

    def counted(*args: Any, **kwargs: Any) -> zerocast.CastPlan:
        made.append(plan(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("zerocast.cast.calls.CastPlan", counted)
    args = ([zerocast.empty(SHAPE, NVFP4)], [torch.ones(NUMEL)], [0], SingleRank())
    for backend in ("cpu", "reference", "cpu", "reference"):
        with zerocast.use_backend(backend):
            zerocast.quantize_master_weights(*args)
    assert [each._prepared._backend.name for each in made] == ["cpu", "reference"]


def test_a_function_that_fails_later_on_one_rank_is_an_error_of_all() -> None:
    """Nobody waits for a rank whose function raised in the middle of a cast."""
    fails: list[str] = []

    def algorithm(history: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name in fails:
            raise LookupError("lost")
        return history.max()

    def on_rank(comm: Communicator) -> str:
        planned = Planned(comm, zerocast.DelayedScaling(amax_compute_algo=algorithm))
        comm.barrier()
        if comm.rank == 1:
            fails.append(threading.current_thread().name)
        return message_of(InputError, planned.cast)

    assert run_in_process(2, on_rank) == ["on rank 1: LookupError: lost"] * 2


@pytest.mark.parametrize("name", ["", "yrgnbplsv;z6"])
def test_every_name_is_a_name(name: str) -> None:
    """A name whose hash is 0 is one: the first name stays."""
    planned = Planned(SingleRank(), DRAWN, empty={"name": name}, names=["another"])
    assert int(planned.weight.quantized_storage.buffers["rounding_counter"][0]) == 1


def test_plans_that_are_gone_leave_one_clock() -> None:
    """A weight that is never post-processed does not grow with the number of its plans."""
    weight = zerocast.empty(SHAPE, NVFP4)
    storage = weight.quantized_storage
    versions = []
    for _ in range(20):
        zerocast.CastPlan([weight], [torch.ones(NUMEL)], [0], SingleRank()).cast()
        versions.append(storage.version)
        assert storage.is_stale
    assert len(storage.writes._watched) <= 3
    assert versions == list(range(versions[0], versions[0] + 20))
    zerocast.post_all_gather_processing(weight)
    assert not storage.is_stale
    assert storage.version == versions[-1]


@on_ranks("in_process", 2)
def test_a_cast_that_fails_before_the_reduction_draws_nothing(comm: Communicator) -> None:
    """Stochastic rounding: an exception on one rank is raised on all and counts for none, so that
    the cast that is tried again draws what it would have drawn.
    """
    x = draw_values("normal", NUMEL, 1)
    expected = unsharded(x, DRAWN, name="w")
    planned = Planned(comm, DRAWN, x, empty={"name": "w"})
    steps = planned.plan._prepared.steps
    run = steps.run

    def out_of_memory(step: str) -> None:
        raise MemoryError(step)

    if comm.rank == 1:
        steps.run = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(ZerocastError, match="on rank 1: MemoryError"):
        planned.cast()
    steps.run = run  # type: ignore[method-assign]
    assert_same_storage(planned.cast(), expected, "tried again")


def test_a_plan_that_one_rank_cannot_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails behind the exchange, such as memory for the buffers, is an error of all ranks."""

    def out_of_memory(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("buffers")
        return made(*args, **options)

    made = zerocast.cast.cast_collectives.Exchange
    monkeypatch.setattr(zerocast.cast.cast_collectives, "Exchange", out_of_memory)
    messages = run_in_process(2, lambda comm: message_of(ZerocastError, Planned, comm, NVFP4))
    assert messages == ["on rank 1: MemoryError: buffers"] * 2


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

    recipe = zerocast.DelayedScaling(amax_compute_algo=algorithm)
    messages = run_in_process(2, lambda comm: message_of(ZerocastError, Planned, comm, recipe))
    assert messages == ["on rank 1: OSError: no text"] * 2


@pytest.mark.parametrize("write", ["plan", "functional"])
def test_torch_counts_writes_of_codes(write):
    """A backward of torch's own operations on a weight is an error where codes were cast since."""
    master, recipe = torch.randn(32, 64), zerocast.Float8CurrentScaling()
    weight = torch.nn.Parameter(zerocast.quantize(master, recipe))
    args = [weight], [master], [0]
    plan = zerocast.CastPlan(*args)
    cast = plan.cast if write == "plan" else lambda: zerocast.quantize_master_weights(*args)
    for mode in (False, True):
        codes = weight.rowwise_data._version
        output = torch.nn.functional.linear(torch.randn(2, 64, requires_grad=True), weight)
        with torch.inference_mode(mode):
            cast()
        assert weight.rowwise_data._version > codes
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.usefixtures("backend")
def test_functional_calls_in_several_threads():
    """Casts of one weight wait for each other: its bytes are always those of one of the masters."""
    masters = [torch.full((64, 64), float(value)) for value in (1, 2, 3)]
    recipe = zerocast.NVFP4BlockScaling()
    weight = zerocast.empty((64, 64), recipe, columnwise=False)

    def cast(master: torch.Tensor) -> None:
        for _ in range(50):
            zerocast.quantize_master_weights([weight], [master], [0])

    with ThreadPoolExecutor(len(masters)) as threads:
        list(threads.map(cast, masters))  # and raise what one of them raised
    held = weight.dequantize(torch.float32)
    assert any(torch.equal(held, master) for master in masters)
