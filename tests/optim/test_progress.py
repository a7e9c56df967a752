"""A step is whole, or it is known not to be; a refused optimizer has changed nothing."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.optim.training import (
    NVFP4,
    Given,
    Training,
    assert_same_lists,
    draw_gradients,
    named,
)
from tests.support.ranks import on_ranks
from zerocast.comm import Communicator, as_communicator, run_in_process
from zerocast.errors import (
    InputError,
    PeerFailedError,
    RankMismatchError,
    UnfinishedStepError,
    ZerocastError,
)
from zerocast.optim import ZeroOptimizer


class Stop(Exception):
    """Ends a step."""


def stop_at(phase: str) -> Any:
    """An ``on_phase`` that fails when ``phase`` begins."""

    def on_phase(name: str) -> Any:
        if name == phase:
            raise Stop
        return nullcontext()

    return on_phase


@pytest.mark.parametrize("phase", ["reduce_amax", "partial_cast", "all_gather"])
@on_ranks("in_process", 3)
def test_a_step_that_fails_behind_the_optimizer_is_left_by_loading_only(
    comm: Communicator, phase: str
) -> None:
    """Saving, reading masters and stepping say so on every rank, though one rank came to the step's
    end; a loaded state ends it, and training goes on as if the step had not been.
    """
    t = Training(comm)
    t.train(0, alike=True)
    saved, optimizer = t.saved(), t.optimizer
    optimizer.on_phase = stop_at(phase)
    with pytest.raises(Stop):
        t.train(0, alike=True)
    optimizer.on_phase = nullcontext
    with pytest.raises(UnfinishedStepError, match="step 2 failed after it had begun"):
        optimizer.state_dict()
    if comm.rank == 0:
        optimizer._progress.end_step()  # as if it had failed on the others only
    for call in (optimizer.step, t.masters):
        with pytest.raises(UnfinishedStepError, match="on rank.* 1.*load the last checkpoint"):
            call()
    optimizer.load_state_dict(saved)
    assert_same_lists(t.train(0, alike=True), Training().train(0, 0), "after loading")


def fail(comm: Communicator, folder: Path) -> Training:
    """Train two steps, of which one rank does not end the second; save after the first."""
    t = Training(comm)
    t.train(0, alike=True)
    zerocast.checkpoint.save(folder, t.optimizer)
    if comm.rank == 1:
        t.optimizer.on_phase = stop_at("all_gather")
    with pytest.raises((Stop, PeerFailedError)):
        t.train(1, alike=True)
    return t


def go_on(comm: Communicator, folder: Path, t: Training) -> None:
    """Make the second step again, in another group."""
    with pytest.raises(UnfinishedStepError, match=r"from layer\.0: this weight holds parts of two"):
        ZeroOptimizer(named(t.params), group=comm)
    for param in t.params:
        param.data.zero_()
    t.optimizer = ZeroOptimizer(named(t.params), group=comm)
    zerocast.checkpoint.load(folder, t.optimizer)
    assert_same_lists(t.train(1, alike=True), Training().train(0, 1), "after loading")


def test_new_ranks_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Where one fails in a gather, a new optimizer of the same weights is refused on all ranks
    until they are written; with the checkpoint the steps are those of a run that never failed.
    """
    trainings = run_in_process(3, lambda comm: fail(comm, tmp_path))
    run_in_process(3, lambda comm: go_on(comm, tmp_path, trainings[comm.rank]))


@on_ranks("torch_distributed", 3)
def test_a_new_process_group_goes_on_from_the_checkpoint(
    comm: Communicator, tmp_path: Path
) -> None:
    """The same over gloo, in processes that live on."""
    folder = Path(comm.all_gather_object(str(tmp_path))[0])
    first, second = (as_communicator(torch.distributed.new_group()) for _ in range(2))
    go_on(second, folder, fail(first, folder))


def test_a_step_that_fails_before_the_optimizer_can_be_made_again() -> None:
    """Nothing has changed by then."""
    t = Training()
    t.optimizer.on_phase = stop_at("reduce_scatter")
    with pytest.raises(Stop):
        t.train(0)
    t.optimizer.on_phase = nullcontext
    t.train(0)
    assert t.optimizer.state_dict()["zero"]["steps"] == 1


class Failing(torch.optim.SGD):
    """Raises where asked to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """One more."""
        if self.fails:
            raise Stop("no memory left")
        return super().step(closure)


@pytest.mark.parametrize("given", [named, lambda params: params[3:]], ids=["codes", "plain"])
@on_ranks("in_process", 3)
def test_an_inner_optimizer_that_fails_on_one_rank(comm: Communicator, given: Given) -> None:
    """That rank raises what happened, the others say where; and the step was left half done."""
    t = Training(comm, NVFP4, Failing, given=given, lr=0.5)
    t.train(0, alike=True)
    t.optimizer.inner.fails = comm.rank == 1
    raised = Stop if comm.rank == 1 else ZerocastError
    with pytest.raises(raised, match="no memory left") as caught:
        t.train(0, alike=True)
    assert (str(caught.value) == "on rank 1: Stop: no memory left") == (comm.rank != 1)
    t.optimizer.inner.fails = False
    with pytest.raises(UnfinishedStepError, match="on every rank"):
        t.train(0, alike=True)


@on_ranks("in_process", 3)
def test_a_closure_that_fails_on_one_rank(comm: Communicator) -> None:
    """So it is there; but nothing has changed, and the step can be made again."""
    t = Training(comm)
    t.feed(0)
    optimizer = t.optimizer

    def closure() -> float:
        if comm.rank == 1:
            raise Stop("no data left")
        return 3.0

    with pytest.raises(Stop if comm.rank == 1 else ZerocastError, match="no data left"):
        optimizer.step(closure)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.state_dict()["zero"]["steps"] == 1


@on_ranks("in_process", 3)
def test_ranks_that_have_made_different_numbers_of_steps_are_refused(comm: Communicator) -> None:
    """An interrupt that reached one rank behind a step and another before it."""
    t = Training(comm)
    t.train(0)
    t.optimizer._progress.steps += comm.rank == 2
    with pytest.raises(RankMismatchError, match=r"\{0: 1, 1: 1, 2: 2\}; load the last"):
        t.train(0)


@pytest.mark.parametrize("clips", [False, True])
@on_ranks("in_process", 3)
def test_a_rank_that_leaves_out_a_step_is_noticed_by_its_number(
    comm: Communicator, clips: bool
) -> None:
    """Every rank says who is where, and nothing has changed: with one number on all ranks, or
    with none, training goes on. A number that one rank alone gives is noticed, and a wrong one.
    """
    t = Training(comm)

    def step(number: Any) -> None:
        draw_gradients(t.params, 3)
        if clips:
            t.optimizer.clip_grad_norm_(1.0)
        t.optimizer.step(number=number)

    step(0)
    before = t.masters()
    for given, told in ((1 + (comm.rank == 1), r"\{0: 1, 1: 2, 2: 1\} by rank: a rank has skipped"),
                        (None if comm.rank else 0, r"\{0: 0, 1: None, 2: None\}")):  # fmt: skip
        with pytest.raises(RankMismatchError, match=told):
            step(given)
        t.optimizer.zero_grad()
        assert_same_lists(t.masters(), before, "after the refusal")
    for wrong in (-1, 2**31, True, "1"):
        with pytest.raises(InputError, match="on rank 2: the number of a step must be an integer"):
            step(wrong if comm.rank == 2 else 1)
        t.optimizer.zero_grad()
    step(1)
    step(None)
    assert t.optimizer.state_dict()["zero"]["steps"] == 3


@on_ranks("in_process", 3)
def test_a_scheduler_that_one_rank_steps_otherwise_is_refused(comm: Communicator) -> None:
    """Every rank says whose learning rate differs, and nothing has changed: with the same on all
    ranks the step is made.
    """
    t = Training(comm, lr=0.5)
    t.train(0)
    before, (group,) = t.masters(), t.optimizer.param_groups
    group["lr"] = 0.25 if comm.rank == 1 else 0.5
    with pytest.raises(RankMismatchError, match="'lr': 0.5.*where rank 1 has.*'lr': 0.25"):
        t.train(0)
    assert_same_lists(t.masters(), before, "after the refusal")
    group["lr"] = 0.25
    t.train(0)


@on_ranks("in_process", 2)
def test_states_of_different_steps_are_refused(comm: Communicator) -> None:
    """A torn checkpoint: in a sequence, and where each rank loads its own."""
    t = Training(comm)
    optimizer, saved = t.optimizer, []
    for step in range(2):
        t.train(step)
        saved.append(t.saved())
    with pytest.raises(RankMismatchError, match="rank 0 has 'steps 1' where rank 1 has"):
        optimizer.load_state_dict(saved[comm.rank])
    everyone = [
        comm.all_gather_object(saved[comm.rank])[0],
        comm.all_gather_object(saved[1])[1],
    ]
    with pytest.raises(InputError, match=r"of the same step, got states of steps \[1, 2\]"):
        optimizer.load_state_dict(everyone)


@on_ranks("in_process", 2)
def test_weights_in_another_order_on_one_rank_are_refused_without_names(comm: Communicator) -> None:
    """Two of one shape cannot be told by their descriptions, but by their values."""
    values = [torch.linspace(-1, i, 16 * 32).view(16, 32) for i in (1, 2)]
    plain = [torch.nn.Parameter(value) for value in values]
    quantized = [torch.nn.Parameter(zerocast.quantize(value, NVFP4)) for value in values]
    for weights in (plain, quantized):
        with pytest.raises(RankMismatchError, match=r"rank 1 gave as .*; give model.named_par"):
            ZeroOptimizer(weights[:: -1 if comm.rank == 1 else 1], group=comm)


@on_ranks("in_process", 2)
def test_weights_that_start_from_other_values_on_each_rank_are_accepted(comm: Communicator) -> None:
    """Each rank gives its part, and afterwards all hold the same."""
    param = torch.nn.Parameter(torch.full((4, 8), float(comm.rank)))
    ZeroOptimizer([param], group=comm)
    assert param.tolist() == [[0.0] * 8] * 2 + [[1.0] * 8] * 2


@pytest.mark.parametrize("differ", ["dtype", "columnwise", "amax_group", "recipe", "optimizer"])
@on_ranks("in_process", 2)
def test_a_refused_optimizer_has_touched_no_weight(comm: Communicator, differ: str) -> None:
    """Weights lie where they lay, and keep the values that they were made from."""
    odd = comm.rank == 1
    recipe = zerocast.MXFP8BlockScaling()
    if odd and differ == "recipe":
        recipe = zerocast.MXFP8BlockScaling(fp8_format=zerocast.Format.E5M2)
    dtype = torch.float16 if odd and differ == "dtype" else torch.bfloat16
    columnwise = not (odd and differ == "columnwise")
    value = torch.linspace(-3, 3, 64 * 32).view(64, 32)
    weight = zerocast.quantize(value, recipe, dtype=dtype, columnwise=columnwise)
    weight.quantized_storage.high_precision_init_val = value
    if odd and differ == "amax_group":
        weight.quantized_storage.amax_group = "qkv"
    param = torch.nn.Parameter(weight)
    plain = torch.nn.Parameter(torch.ones(5))
    places = [b.data_ptr() for b in weight.quantized_storage.buffers.values()]
    places.append(plain.data_ptr())
    chosen = torch.optim.SGD if odd and differ == "optimizer" else torch.optim.AdamW
    with pytest.raises(ZerocastError):
        ZeroOptimizer([param, plain], chosen, comm)
    now = [b.data_ptr() for b in param.quantized_storage.buffers.values()]
    assert [*now, plain.data_ptr()] == places
    assert torch.equal(param.get_high_precision_init_val(), value)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[ZeroOptimizer, Callable[[], None]], None]:
    """Lets a fault come after each gather of an optimizer, until the end of the test."""

    def after_gathers(optimizer: ZeroOptimizer, fault: Callable[[], None]) -> None:
        gather = optimizer._publication._all_gather

        def faulty() -> None:
            gather()
            optimizer._shards.wait()
            fault()

        monkeypatch.setattr(optimizer._publication, "_all_gather", faulty)

    return after_gathers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["hash", "full"])
def test_a_fault_between_ranks_stops_training_and_loses_nothing(
    mode, overlap, tmp_path, monkeypatch, plant
):
    """Right steps pass, and so do averages. A flipped code raises on every rank, in its step or
    before the next one changes anything; masters are saved, and the next step writes right weights.
    """
    monkeypatch.chdir(tmp_path)

    def on_rank(comm):
        t = Training(comm, verify=mode, overlap_all_gather=overlap)
        optimizer, faults = t.optimizer, comm.rank == 1
        average = optimizer.ema(0.5)
        t.train(*range(3), alike=True)
        with average.in_weights():
            pass

        def flip():
            t.params[2].quantized_storage.buffers["rowwise_data"][0, 3] ^= 0x40 * faults

        plant(optimizer, flip)
        if overlap:
            t.train(3, alike=True)
        with pytest.raises(zerocast.VerificationError, match="rank 1 holds") as caught:
            t.train(4, alike=True)
        with pytest.raises(zerocast.VerificationError, match="rank 1 holds"):
            optimizer.wait_for_all_gather()  # it has been told, and is no less true
        faults = False
        optimizer.load_state_dict(optimizer.state_dict())
        zerocast.verify(t.params, comm)
        t.train(5, alike=True)
        return str(caught.value)

    first, second = run_in_process(2, on_rank)
    assert first == second


@pytest.mark.parametrize("recipe", [NVFP4, zerocast.MXFP8BlockScaling()])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stale_scale_of_large_codes_is_found(recipe, overlap, tmp_path, monkeypatch, plant):
    """Right weights pass, and one byte that differs on one rank is named."""
    monkeypatch.chdir(tmp_path)

    def on_rank(comm):
        model = torch.nn.Sequential(*(torch.nn.Linear(n, 512, bias=False) for n in (576, 512)))
        zerocast.nn.convert(model, recipe, weights="quantized")
        optimizer = ZeroOptimizer(
            model.named_parameters(), group=comm, verify="hash", overlap_all_gather=overlap
        )

        def stale():
            scales = model[1].weight.quantized_storage.buffers["rowwise_scale_inv"]
            scales.view(torch.uint8).view(-1)[0] ^= comm.rank

        def step():
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.1)
            optimizer.step()
            optimizer.wait_for_all_gather()

        step()
        plant(optimizer, stale)
        with pytest.raises(zerocast.VerificationError, match="rank 1 holds"):
            step()

    run_in_process(2, on_rank)
