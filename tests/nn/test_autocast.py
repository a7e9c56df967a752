"""autocast: who quantizes where, and when amaxes are reduced; model_init: how layers are made."""

import inspect
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch

import zerocast
from tests.oracles.scalar_delayed import AMAXES, Delayed
from tests.support.claims import assert_same_tensors
from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import (
    Communicator,
    PeerFailedError,
    RecordingCommunicator,
    SingleRank,
    run_in_process,
)
from zerocast.errors import InputError
from zerocast.nn import regions
from zerocast.nn.autocast import ModelInit, current_model_init
from zerocast.nn.recipe_state import RecipeState
from zerocast.recipes import DelayedScaling, Float8CurrentScaling
from zerocast.tensors import QuantizedTensor

HISTORY = 4
DELAYED = DelayedScaling(amax_history_len=HISTORY)


def with_amax(amax: float) -> torch.Tensor:
    """[2, 2] FP32 values of which the largest magnitude is ``amax``, exactly."""
    return torch.tensor([[0.0, amax / 2], [-amax, -0.0]])


def region(group: Communicator | None = None) -> zerocast.autocast:
    """Of delayed scaling, reducing over ``group``."""
    return zerocast.autocast(recipe=DELAYED, amax_reduction_group=group)


def in_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(30)
    return found[0]


class Layer:
    """What a layer does with a region, and nothing else: some quantizers forward, some backward."""

    def __init__(self, recipe: DelayedScaling = DELAYED, tensors: int = 1) -> None:
        self.states = [RecipeState.create(recipe, m, tensors) for m in ("forward", "backward")]
        self.inputs, self.grads = (state.make_quantizers() for state in self.states)

    def forward(self, amax: float, place: int = 0) -> QuantizedTensor | None:
        """Quantize, or calibrate, as what is active here says; nothing outside of a region."""
        here, quantizer = regions.current(), self.inputs[place]
        if not (here.enabled or here.calibrating):
            return None
        here.register(*self.states)
        return (quantizer.quantize if here.enabled else quantizer.calibrate)(with_amax(amax))

    def backward(self, amax: float, place: int = 0) -> QuantizedTensor:
        """Quantize a gradient, in or out of a region."""
        return self.grads[place].quantize(with_amax(amax))

    @property
    def seen(self) -> tuple[list[float], list[float]]:
        """The nonzero entries of the first tensors' histories, newest first."""
        forward, backward = ([a for a in s.amax_history[0].tolist() if a] for s in self.states)
        return forward, backward


# --- the rule, over ranks ---


RECIPES = [
    DelayedScaling(amax_history_len=HISTORY, amax_compute_algo=algorithm, margin=margin)
    for algorithm, margin in (("max", 0), ("max", 3), ("most_recent", -2))
]


def test_fifty_steps_are_those_of_the_plain_rule_on_every_rank(ranks):
    """Histories, scales and the scale_inv of every cast, of layers of different recipes, forward
    and backward, with zero, tiny, infinite and NaN amaxes among them, tensors that are cast twice,
    that some ranks skip, and that all skip: they are the restated rule's, the same on all ranks.
    Where there are no ranks, on the reference; on several ranks twenty steps, five times a history.
    """

    def rank(comm):
        rng = random.Random(ranks.size)  # all ranks draw the same plan, and each follows its part
        layers = [Layer(recipe, tensors=2) for recipe in RECIPES]
        plain = [
            [
                [Delayed(fmt, HISTORY, recipe.margin, recipe.amax_compute_algo) for _ in range(2)]
                for fmt in ("e4m3", "e5m2")
            ]
            for recipe in RECIPES
        ]

        def cast(direction):
            """What every tensor's rule then has to take in: the amaxes of all ranks."""
            seen = []
            for layer, rules in zip(layers, plain, strict=True):
                for place, rule in enumerate(rules[direction]):
                    by_rank = [rng.choices(AMAXES, k=rng.randint(0, 2)) for _ in range(comm.size)]
                    for amax in by_rank[comm.rank]:
                        made = (layer.forward, layer.backward)[direction](amax, place)
                        scale_inv = torch.tensor([float(rule.scale_inv(amax))])
                        assert_same_bytes(made.rowwise_scale_inv, scale_inv, f"amax {amax}")
                    seen.append((rule, [*chain(*by_rank)]))
            return seen

        with region(comm):
            for layer in layers:
                layer.forward(0.0)  # which joins, in the same order everywhere, and moves nothing
        waiting = []
        for step in range(50 if ranks.size == 1 else 20):
            with region(comm):
                seen = cast(0)
            for rule, amaxes in seen + waiting:
                rule.reduce(amaxes)
            for layer, rules in zip(layers, plain, strict=True):
                for state, of_state in zip(layer.states, rules, strict=True):
                    what = f"rank {comm.rank}, step {step}, {state.mode}"
                    scales = torch.tensor([float(rule.scale) for rule in of_state])
                    histories = torch.stack([torch.from_numpy(r.history) for r in of_state])
                    assert_same_bytes(state.scale, scales, what)
                    assert_same_bytes(state.amax_history, histories, what)
                    assert not state.amaxes.any(), what
            waiting = cast(1)

    alone = ranks.kind == "single_rank"
    with zerocast.use_backend("reference") if alone else nullcontext():
        ranks.run(rank)


def test_a_step_of_any_size_is_one_all_reduce():
    """However many layers and nested regions: one collective, on leaving the outermost, of four
    bytes a tensor.
    """

    def rank(comm):
        recording = RecordingCommunicator(comm)
        layers = [Layer() for _ in range(7)]
        for _ in range(3):
            recording.reset()
            with region(recording):
                for layer in layers:
                    with region(recording):
                        layer.forward(1.0)
                        layer.forward(2.0)
                assert recording.total().calls == 0
        assert {tuple(layer.seen[0]) for layer in layers} == {(2.0, 2.0, 2.0)}
        return recording.total().calls, recording.total().payload_bytes

    assert run_in_process(2, rank) == [(1, 4 * 2 * 7)] * 2


@on_ranks()
def test_gradients_ride_with_the_next_region_or_with_reduce_amaxes(comm):
    """A backward after its region waits; the next leaving takes it along, before the next backward
    could use it. reduce_amaxes takes it at once, and leaves nothing for later.
    """
    layer = Layer()
    for step in (1.0, 2.0):
        with region(comm):
            layer.forward(step)
        layer.backward(10 * step + comm.rank)
    top = comm.size - 1
    assert layer.seen == ([2.0, 1.0], [10.0 + top])
    zerocast.reduce_amaxes(comm)
    zerocast.reduce_amaxes(comm)
    assert layer.seen == ([2.0, 1.0], [20.0 + top, 10.0 + top])
    with region(comm):
        layer.backward(5.0)  # inside the region: reduced with it
    assert layer.seen == ([2.0, 1.0], [5.0, 20.0 + top, 10.0 + top])


def test_each_group_reduces_its_own_layers(ranks):
    """Two groups in turn: a region reduces over its own, and gradients of the other group's layers
    wait for theirs.
    """
    if ranks.size < 2:
        pytest.skip("takes two groups")

    def rank(comm):
        half = ranks.split(comm, comm.rank % 2)
        in_all, in_half = Layer(), Layer()
        for layer, group in ((in_all, comm), (in_half, half)):
            with region(group):
                layer.forward(1.0 + comm.rank)
            layer.backward(1.0 + comm.rank)
        highest = max(r for r in range(ranks.size) if r % 2 == comm.rank % 2)
        assert in_all.seen == ([float(ranks.size)], [])
        assert in_half.seen == ([1.0 + highest], [])
        with (
            region(comm),
            region(half),
        ):
            pass
        assert in_all.seen == ([float(ranks.size)], [float(ranks.size)])
        assert in_half.seen == ([1.0 + highest], [1.0 + highest])

    ranks.run(rank)


# --- regions ---


def test_the_innermost_region_counts():
    """Its recipe, its enabled; what was active before is active again afterwards."""
    assert (regions.current().enabled, regions.current().calibrating) == (False, False)
    other = Float8CurrentScaling()
    with region() as active:
        assert regions.current() is active
        assert (active.enabled, active.recipe, active.group) == (True, DELAYED, SingleRank())
        with zerocast.autocast(recipe=other):
            assert regions.current().recipe is other
            with zerocast.autocast(enabled=False):
                assert not regions.current().enabled
            assert regions.current().enabled
        assert regions.current() is active
    assert not regions.current().enabled


def test_a_region_may_be_kept_entered_again_and_decorate():
    """One object, entered twice in a row, inside itself, in two threads, around a function."""
    kept = region()
    with kept, kept:
        assert regions.current().recipe is DELAYED
    assert not regions.current().enabled

    @kept
    def enabled():
        return regions.current().enabled

    with kept:
        assert in_thread(lambda: (regions.current().enabled, enabled())) == (False, True)
    assert (enabled(), regions.current().enabled) == (True, False)


def test_an_exception_leaves_the_region_and_reduces_nothing():
    """What was active before is active; the forward's amaxes are dropped, gradients that wait do
    not mind, no collective runs, and the next step is an ordinary one.
    """
    layer, recording = Layer(), RecordingCommunicator(SingleRank())

    with region(recording):
        layer.forward(1.0)
    layer.backward(7.0)
    recording.reset()

    def fails():
        with region(recording), region(recording):
            layer.forward(64.0)
            raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        fails()
    assert not regions.current().enabled
    assert recording.total().calls == 0
    assert layer.seen == ([1.0], [])
    with region(recording):
        layer.forward(2.0)
    assert layer.seen == ([2.0, 1.0], [7.0])


def test_an_exception_inside_that_is_caught_inside_is_no_failure():
    """The outermost region was left in order, so it reduces what its layers have seen."""
    layer = Layer()

    def fails():
        with region():
            raise ValueError("inner")

    with region():
        layer.forward(1.0)
        with pytest.raises(ValueError, match="inner"):
            fails()
    assert layer.seen[0] == [1.0]


def test_ranks_that_wait_for_a_failed_one_are_told():
    """One rank leaves its region by an error: it raises that error, and the others do not hang."""
    told: list[type[BaseException]] = []

    def rank(comm):
        layer = Layer()
        try:
            with region(comm):
                layer.forward(1.0)
                if comm.rank == 1:
                    raise OSError("disk")
        except BaseException as error:
            told.append(type(error))
            raise

    with pytest.raises(OSError, match="disk"):
        run_in_process(3, rank)
    assert sorted(kind.__name__ for kind in told) == ["OSError", *["PeerFailedError"] * 2]
    assert PeerFailedError in told


def test_threads_have_regions_and_amaxes_of_their_own():
    """Eight threads in their regions at the same time, of which some leave while the others are
    still inside: none sees another's recipe, and none reduces another's layers.
    """
    together, left = threading.Barrier(8), threading.Barrier(8)
    wrong = []

    def work(comm):
        layer, i = Layer(), comm.rank
        recipe = DelayedScaling(margin=i)
        for step in range(5):
            before = layer.seen
            together.wait(30)
            with zerocast.autocast(recipe=recipe):
                layer.forward(1.0 + i + step)
                together.wait(30)
                if regions.current().recipe is not recipe:
                    wrong.append(regions.current())
                if i % 2:
                    left.wait(30)
                    if layer.seen != before:
                        wrong.append(layer.seen)
            if i % 2 == 0:
                left.wait(30)
            if layer.seen[0][0] != 1.0 + i + step:
                wrong.append(layer.seen)
            if regions.current().enabled:
                wrong.append("left")

    run_in_process(8, work)
    assert not wrong


def test_ranks_inside_a_region_of_their_parent_reduce_on_their_own():
    """Threads that inherit a region see what is active in it; their own regions are outermost."""

    def rank(comm):
        assert regions.current().recipe is DELAYED
        layer = Layer()
        with region(comm):
            layer.forward(1.0 + comm.rank)
        return layer.seen[0]

    with region():
        assert run_in_process(3, rank) == [[3.0]] * 3


# --- calibrating, and not training ---


@pytest.mark.parametrize("gradients", [True, False])
def test_calibrating_records_without_quantizing(gradients):
    """A calibrating region quantizes nothing, and its amaxes become scales when it is left, also
    where gradients are disabled.
    """
    layer = Layer()
    with (
        torch.set_grad_enabled(gradients),
        zerocast.autocast(enabled=False, calibrating=True, recipe=DELAYED) as active,
    ):
        assert (active.enabled, active.calibrating) == (False, True)
        layer.forward(2.0)
        layer.forward(7.0)
    assert layer.seen[0] == [7.0]
    assert layer.states[0].scale.item() == 448 / 7


@on_ranks("in_process", 2)
def test_an_evaluation_leaves_the_state_alone(comm):
    """Without gradients nothing is recorded and nothing reduced, whether the region is inside
    no_grad or around it: so one rank may evaluate while the others do something else.
    """
    layer = Layer()
    with region(comm):
        layer.forward(1.0)
        with torch.no_grad():
            layer.forward(50.0)
    layer.backward(3.0)
    before = [state.state_dict() for state in layer.states]
    if comm.rank == 0:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), region(comm):
                layer.forward(50.0)
    for then, state in zip(before, layer.states, strict=True):
        assert_same_tensors(state.state_dict(), then, "after the evaluation")
    with region(comm):
        layer.forward(2.0)
    assert layer.seen == ([2.0, 1.0], [3.0])


# --- model_init ---


def test_model_init_says_how_layers_are_made():
    """Nested, left by exceptions, per thread; outside nothing is quantized."""
    assert not current_model_init().enabled
    recipe = Float8CurrentScaling()

    def fails():
        with zerocast.model_init(enabled=False):
            assert not current_model_init().enabled
            raise ValueError("x")

    with zerocast.model_init(recipe=recipe, preserve_high_precision_init_val=True):
        outer = current_model_init()
        assert outer == ModelInit(True, recipe, True)
        with pytest.raises(ValueError, match="x"):
            fails()
        assert current_model_init() is outer
        assert not in_thread(lambda: current_model_init().enabled)
    assert not current_model_init().enabled


# --- TransformerEngine's names ---


def test_names_and_orders_of_parameters():
    """TransformerEngine's, defaults included."""

    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in found if p.name != "self"}

    init = {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False}
    autocast = {
        "enabled": True, "calibrating": False, "recipe": None, "amax_reduction_group": None,
    }  # fmt: skip
    fp8 = {"enabled": True, "calibrating": False, "fp8_recipe": None, "fp8_group": None}
    for function, expected in (
        (zerocast.autocast, autocast),
        (zerocast.fp8_autocast, fp8),
        (zerocast.model_init, init),
        (zerocast.quantized_model_init, init),
        (zerocast.fp8_model_init, init),
    ):
        given = parameters(function)
        assert (list(given), given) == (list(expected), expected)


def test_the_earlier_names_open_the_same_regions():
    """Every parameter arrives where it belongs."""
    group, recipe = RecordingCommunicator(SingleRank()), Float8CurrentScaling()
    with zerocast.fp8_autocast(False, True, recipe, group) as active:
        given = (active.enabled, active.calibrating, active.recipe, active.group)
        assert given == (False, True, recipe, group)
    for init in (zerocast.fp8_model_init, zerocast.quantized_model_init):
        with init(True, recipe, True):
            assert current_model_init() == ModelInit(True, recipe, True)


def test_recipe_and_calibrating_may_change_places():
    """One is a bool and the other is none, so either order means one thing; two of a kind are
    refused.
    """
    recipe = Float8CurrentScaling()
    for given, meant in (
        ((True, True, recipe), True), ((True, recipe, True), True), ((True, "current", True), True),
        ((False, recipe), False), ((False, False, recipe), False),
    ):  # fmt: skip
        with zerocast.autocast(*given) as active:
            assert (active.enabled, active.calibrating, active.recipe) == (meant, meant, recipe)
    with pytest.raises(InputError, match="calibrating must be True or False"):
        zerocast.autocast(True, recipe, recipe)
    with pytest.raises(InputError, match="recipe must be"):
        zerocast.autocast(True, True, False)
