"""Training with gathers that overlap the next forward, or the casts of other buckets: the same
bytes, waited for when used.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import pytest
import torch

import zerocast
from tests.conftest import in_turn, stamp
from tests.optim.overlapping import (
    ALL_TOGETHER,
    EACH_ITS_OWN,
    SOME_TOGETHER,
    Model,
    assert_same_as_alone,
    backward,
    optimizer_of,
    pending,
    train,
    trained,
    trained_alone,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.late_gathers import GathersLate, GathersShuffled, GathersSlowly
from tests.support.ranks import on_ranks, run_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import RecordingCommunicator, SingleRank, run_in_process
from zerocast.tensors.cast_steps import CastSteps


def assert_overlap_changes_nothing(body):
    """``body(comm, overlap)`` leaves the same on each of 3 ranks with and without."""
    late, plain = (run_in_process(3, partial(body, overlap=o)) for o in (True, False))
    for found, expected in zip(late, plain, strict=True):
        assert_same_tensors(found, expected)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    in_turn({name: (name,) for name in RECIPES}, [stamp("in_process", 3)]),
    indirect=["ranks"],
)
def test_overlapped_training_gives_the_same_bytes(ranks, recipe):
    """After three steps every byte of every weight is that of a training without overlap on one
    rank, on ranks of every communicator, in buckets of some weights.
    """
    expected = trained_alone(recipe)
    for found in ranks.run(lambda comm: trained(comm, recipe, bucket_size=SOME_TOGETHER)):
        assert_same_tensors(found, expected)


SIZES = (EACH_ITS_OWN, SOME_TOGETHER, ALL_TOGETHER)
CASES = {
    # With a weight that two layers share, and small weights in one large bucket.
    **{f"{name} late": (name, ranks, GathersLate, {"bucket_size": size})
       for name, ranks, size in zip(RECIPES, cycle((2, 5, 7)), cycle(SIZES))},
    # Cast bucket by bucket, each gathered while the next are cast.
    **{f"{name} by buckets": (name, ranks, GathersLate, {
        "bucket_size": size, "overlap_all_gather": overlap, "overlap_cast": True})
       for name, ranks, size, overlap in zip(
           RECIPES, cycle((3, 2, 5)), cycle(SIZES[:2]), cycle((True, False)))},
    **{f"other order {seed}": ("nvfp4", 3, partial(GathersShuffled, seed=seed), {
        "bucket_size": EACH_ITS_OWN, "overlap_all_gather": False, "overlap_cast": True})
       for seed in range(3)},
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "gathers", "options"), CASES.values(), ids=CASES)
def test_nothing_is_used_before_it_has_arrived(recipe, size, gathers, options):
    """Gathers that do nothing until they are waited for, with bytes spoilt until then, or that
    arrive in another order than they were begun in, give the training of one rank that casts all
    at once.
    """
    expected = trained_alone(recipe)
    for found in run_in_process(size, lambda comm: trained(gathers(comm), recipe, **options)):
        assert_same_tensors(found, expected)


@pytest.mark.parametrize("size", [1, 3, 4, 6])
@pytest.mark.parametrize("bucket_size", [EACH_ITS_OWN, SOME_TOGETHER, ALL_TOGETHER])
def test_any_number_of_ranks_and_any_size_of_buckets(size, bucket_size):
    """The same of late gathers, for NVFP4 and MXFP8 weights in one model."""

    def body(comm, overlap=True):
        model = Model("nvfp4")
        model.layers[1][1] = Model("mxfp8").layers[1][1]
        optimizer = optimizer_of(
            model, GathersLate(comm), overlap_all_gather=overlap, bucket_size=bucket_size
        )
        train(model, optimizer, range(2))
        return stored(model)

    assert_same_as_alone(run_in_process(size, body), body)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_quantized_products_wait_too(recipe):
    """Under autocast, where forward and backward read codes and columnwise copies as they are, the
    bytes are those of a training without overlap.
    """

    def body(comm, overlap):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))
        zerocast.nn.convert(model, RECIPES[recipe])
        optimizer = optimizer_of(model, GathersLate(comm), overlap_all_gather=overlap)
        inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
        for _ in range(3):
            with zerocast.autocast(recipe=RECIPES[recipe]):
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return stored(model)

    assert_overlap_changes_nothing(body)


@pytest.mark.parametrize(
    ("bucket_size", "expected"),
    [
        (EACH_ITS_OWN, ["xxxx", ".xxx", "..xx", "...x", "...x", "...."]),
        (SOME_TOGETHER, ["xx", ".x", ".x", "..", "..", ".."]),
        (ALL_TOGETHER, ["x", ".", ".", ".", ".", "."]),
    ],
)
@on_ranks("in_process", 3)
def test_a_layer_waits_for_its_own_bucket_only(comm, bucket_size, expected):
    """After a step all codes are on their way, and they arrive with the forwards of their layers:
    those of later layers are still on their way then.
    """
    model = Model("nvfp4")
    optimizer = optimizer_of(model, comm, bucket_size=bucket_size)
    train(model, optimizer, range(1))
    seen = [pending(optimizer)]
    for module in (model.first, *model.layers, model.last):
        module.register_forward_hook(lambda *_: seen.append(pending(optimizer)))
    model(torch.ones(1, 32).bfloat16())
    assert seen == expected


def test_ranks_use_weights_in_orders_of_their_own(comm_kind):
    """Each rank runs the layers from another one on, one of them runs none, and then all train on:
    the bytes are those of a training without overlap.
    """

    def body(comm, overlap=True):
        model = Model("nvfp4")
        optimizer = optimizer_of(model, comm, overlap_all_gather=overlap)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            for i in range(3 if comm.rank else 0):
                model.layers[(comm.rank + i) % 3](torch.ones(1, 64).bfloat16())
        return stored(model)

    assert_same_as_alone(run_ranks(comm_kind, 3, body), body)


@on_ranks("in_process", 3)
def test_a_step_sends_each_weight_once(comm):
    """Two buckets of BF16 weights, four of codes and one of scales are seven gathers a step, beside
    one all-reduce and one all-to-all; nothing is sent by a forward.
    """
    recording = RecordingCommunicator(comm)
    model = Model("nvfp4")
    optimizer = optimizer_of(model, recording, bucket_size=300)
    kinds = [bucket.kind.is_codes for bucket in optimizer._shards.buckets]
    assert kinds == [False] * 2 + [True] * 4
    recording.reset()
    train(model, optimizer, range(2))
    model(torch.ones(1, 32).bfloat16())
    calls = {kind: traffic.calls for (_, kind), traffic in recording.traffic.items()}
    assert calls == {"all_to_all": 2, "all_reduce": 2, "all_gather": 2 * 7}


def test_steps_without_a_forward_between_them():
    """A step first waits for what the one before has sent; a checkpoint is loaded into weights that
    are on their way.
    """

    def body(comm, overlap):
        model = Model("mxfp8")
        optimizer = optimizer_of(model, GathersLate(comm), overlap_all_gather=overlap)
        train(model, optimizer, range(1))
        states = comm.all_gather_object(optimizer.state_dict())
        for weight in model.parameters():
            weight.grad = torch.full(weight.shape, 0.25, dtype=torch.bfloat16)
        optimizer.step()
        optimizer.step()
        after_steps = {f"{name} after steps": tensor for name, tensor in stored(model).items()}
        optimizer.step()
        optimizer.load_state_dict(states)
        return after_steps | stored(model)

    assert_overlap_changes_nothing(body)


def test_unused_and_frozen_layers():
    """A layer that no forward calls arrives before the next step casts; a frozen one is never sent;
    the others train as without overlap.
    """

    def body(comm, overlap=True):
        model = Model("nvfp4")
        model.first.requires_grad_(False)
        unused = model.layers[1]
        del model.layers[1]
        model.unused = unused
        optimizer = optimizer_of(model, GathersLate(comm), overlap_all_gather=overlap)
        train(model, optimizer, range(3))
        return stored(model)

    assert_same_as_alone(run_in_process(3, body), body)


@on_ranks("in_process", 3)
def test_an_error_between_two_layers_is_survived(comm):
    """A forward that raises half way leaves the later weights on their way, where the next forward
    finds them.
    """
    model = Model("nvfp4")
    optimizer = optimizer_of(model, GathersLate(comm))
    train(model, optimizer, range(1))
    inputs = torch.ones(1, 32).bfloat16()

    def fail(*_: object) -> None:
        raise ValueError("half way")

    with model.layers[1].register_forward_pre_hook(fail), pytest.raises(ValueError):
        model(inputs)
    assert pending(optimizer) == "..xx"
    early = model(inputs)
    optimizer.wait_for_all_gather()
    assert_same_bytes(model(inputs), early, "output")


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks("in_process", 3)
def test_a_checkpoint_is_resumed_the_other_way(comm, overlap):
    """What was saved with overlap continues without, and the other way round, bit for bit, from all
    ranks' state dicts.
    """
    model, resumed = Model("delayed"), Model("delayed")
    optimizer = optimizer_of(model, comm, overlap_all_gather=overlap)
    train(model, optimizer, range(2))
    states = comm.all_gather_object(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    other = optimizer_of(resumed, comm, overlap_all_gather=not overlap, bucket_size=ALL_TOGETHER)
    other.load_state_dict(states)
    train(resumed, other, range(2, 4))
    assert_same_tensors(stored(resumed), stored(model))


@pytest.mark.parametrize(
    ("option", "values"), [("overlap_all_gather", (False, True)), ("bucket_size", (None, 5))]
)
@on_ranks("in_process", 2)
def test_ranks_that_gather_differently_are_refused(comm, option, values):
    """Both sides are named, on all ranks: their collectives or buckets would not fit together."""
    model = Model("nvfp4")
    with pytest.raises(
        zerocast.RankMismatchError,
        match=rf"rank 0 has 'AdamW with .*{option}={values[0]}.* has '.*{option}={values[1]}",
    ):
        optimizer_of(model, comm, **{option: values[comm.rank]})


# --- steps that cast bucket by bucket ---


def traffic(overlap_cast: bool) -> dict[tuple[str, str], int]:
    """The collectives of one step, by phase and kind."""
    spy = RecordingCommunicator(SingleRank())
    model = Model("nvfp4")
    optimizer = optimizer_of(model, spy, overlap_all_gather=False, overlap_cast=overlap_cast)
    backward(model, 0)
    spy.traffic.clear()
    optimizer.step()
    return {kind: counted.calls for (_, kind), counted in spy.traffic.items()}


def test_the_collectives_are_the_same():
    """One exchange of amaxes and one of scales for all weights, and a gather for each bucket."""
    assert traffic(overlap_cast=True) == traffic(overlap_cast=False)


def test_most_of_what_can_be_hidden_is(monkeypatch):
    """Where casting a bucket takes as long as sending one, a step hides at least 70 % of its casts:
    the first while plain weights travel, and each other one while the bucket before it does.
    """
    seconds, real = 0.05, CastSteps.run_stage

    def slow(self: CastSteps, stage: int) -> None:
        time.sleep(seconds)
        real(self, stage)

    monkeypatch.setattr(CastSteps, "run_stage", slow)
    model, took = Model("nvfp4"), list[float]()
    optimizer = optimizer_of(
        model, GathersSlowly(SingleRank(), seconds), overlap_all_gather=False, overlap_cast=True
    )
    buckets = [bucket.kind.is_codes for bucket in optimizer._shards.buckets]

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if name == "cast_and_all_gather":
            took.append(time.perf_counter() - start)

    optimizer.on_phase = timed
    for step in range(4):
        backward(model, step)
        optimizer.step()
    apart = seconds * (sum(buckets) + len(buckets))  # casts, then gathers
    assert apart - min(took) >= 0.7 * seconds * sum(buckets)
