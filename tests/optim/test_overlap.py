"""Gathers that overlap the next forward: the same bytes, waited for layer by layer."""

import gc
import weakref
from typing import Any

import pytest
import torch

import zerocast
from tests.support.late_gathers import GathersLate
from tests.support.ranks import run_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.optim import ZeroOptimizer

RECIPES = {
    **zerocast.recipes.RECIPES,
    "4over6": lambda: zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"),
}


class Model(torch.nn.Module):
    """Three layers with codes and BF16 weights, two of which share one; and weights around them."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 64, bias=False)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in range(3)
        )
        self.layers[2][1].weight = self.layers[0][1].weight
        self.last = torch.nn.Linear(64, 1)
        generator = torch.Generator().manual_seed(3)  # ranks are threads, torch's own is shared
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.2, generator=generator)
        zerocast.nn.convert(self, RECIPES[recipe]())
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 32] -> [batch, 1]."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of every stored tensor of every weight, by name."""
    tensors = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, zerocast.QuantizedTensor):
            tensors |= {f"{name}.{key}": b.clone() for key, b in weight.storage.buffers.items()}
        else:
            tensors[name] = weight.detach().clone()
    return tensors


def optimizer_of(model: Model, comm: Communicator, *, overlap: bool) -> ZeroOptimizer:
    """AdamW; where ``overlap`` the layers wait."""
    late: dict[str, Any] = {"overlap_all_gather": model.layers} if overlap else {}
    return ZeroOptimizer(model.named_parameters(), group=comm, lr=0.01, **late)


def train(model: Model, optimizer: ZeroOptimizer, steps: range) -> None:
    """The same data on every rank, so that sums of gradients are exact."""
    for step in steps:
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(comm: Communicator, recipe: str, *, overlap: bool) -> dict[str, torch.Tensor]:
    """What five steps leave."""
    model = Model(recipe)
    optimizer = optimizer_of(model, comm, overlap=overlap)
    train(model, optimizer, range(5))
    optimizer.wait_for_all_gather()
    return stored(model)


def trained_alone(recipe: str) -> dict[str, torch.Tensor]:
    """By one rank without overlap: in a thread, too, because ranks multiply on one core each, and
    more would round otherwise.
    """
    return run_in_process(1, lambda comm: trained(comm, recipe, overlap=False))[0]


def assert_all_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor, byte for byte."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bytes(actual[name], tensor, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_overlapped_training_gives_the_same_bytes(comm_kind, recipe):
    """After five steps every byte of every weight is that of a training without overlap on one
    rank, on 3 ranks of every communicator and on 5 threads.
    """
    expected = trained_alone(recipe)
    for size in (1, 3, 5) if comm_kind == "in_process" else (3,):
        for result in run_ranks(comm_kind, size, lambda comm: trained(comm, recipe, overlap=True)):
            assert_all_same(result, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_read_before_it_has_arrived(recipe):
    """Gathers that do nothing until they are waited for, with bytes spoilt until then, give the
    same training, a weight that two layers share included.
    """
    expected = trained_alone(recipe)
    for result in run_in_process(3, lambda comm: trained(GathersLate(comm), recipe, overlap=True)):
        assert_all_same(result, expected)


def test_a_layer_waits_for_its_own_weights_only():
    """After a step the weights outside of layers have arrived, and a layer's arrive with its
    forward: those of later layers are still on their way.
    """

    def body(comm):
        model = Model("nvfp4")
        optimizer = optimizer_of(model, comm, overlap=True)
        pending = []

        def note(*_: object) -> None:
            buckets = optimizer._shards.buckets
            pending.append("".join("x" if bucket.arrivals else "." for bucket in buckets))

        train(model, optimizer, range(1))
        for module in (model.first, *model.layers, model.last):
            module.register_forward_pre_hook(note)
        model(torch.ones(1, 32).bfloat16())
        return pending

    # Codes and BF16 weights outside of layers; BF16 and codes of layers 0 and 1; BF16 of layer 2,
    # whose codes are those of layer 0.
    assert run_in_process(3, body) == [["..xxxxx", "....xxx", "......x", ".......", "......."]] * 3


def test_a_shared_weight_is_waited_for_by_every_layer_that_has_it():
    """Layer 2 run first waits for its BF16 weights and for the codes of layer 0, which are its own,
    and computes what it computes once all has arrived.
    """

    def body(comm):
        model = Model("nvfp4")
        optimizer = optimizer_of(model, GathersLate(comm), overlap=True)
        train(model, optimizer, range(1))
        early = model.layers[2](torch.ones(1, 64).bfloat16())
        pending = [bool(bucket.arrivals) for bucket in optimizer._shards.buckets]
        optimizer.wait_for_all_gather()
        assert_same_bytes(model.layers[2](torch.ones(1, 64).bfloat16()), early, "output")
        return pending

    for pending in run_in_process(3, body):
        # Outside of layers; BF16 and codes of layers 0 and 1; BF16 of layer 2.
        assert pending == [False, False, True, False, True, True, False]


def test_a_step_sends_each_weight_once():
    """Two kinds of weights outside, and in layers 2 + 2 + 1: seven gathers a step, of which two are
    over when it returns; one all-reduce, and none of it in the forward.
    """

    def body(comm):
        recording = RecordingCommunicator(comm)
        model = Model("nvfp4")
        optimizer = optimizer_of(model, recording, overlap=True)
        recording.reset()
        train(model, optimizer, range(2))
        model(torch.ones(1, 32).bfloat16())
        return {kind: traffic.calls for (_, kind), traffic in recording.traffic.items()}

    assert (
        run_in_process(3, body) == [{"reduce_scatter": 2, "all_reduce": 2, "all_gather": 2 * 7}] * 3
    )


def test_steps_without_a_forward_between_them():
    """A step first waits for what the one before has sent; a checkpoint is loaded into weights that
    are on their way.
    """

    def body(comm, overlap):
        model = Model("mxfp8")
        optimizer = optimizer_of(model, GathersLate(comm), overlap=overlap)
        train(model, optimizer, range(1))
        states = comm.all_gather_object(optimizer.state_dict())
        for weight in model.parameters():
            weight.grad = torch.full(weight.shape, 0.25, dtype=torch.bfloat16)
        optimizer.step()
        optimizer.step()
        optimizer.wait_for_all_gather()
        after_steps = stored(model)
        optimizer.step()
        optimizer.load_state_dict(states)
        return after_steps, stored(model)

    for late, plain in zip(
        run_in_process(3, lambda comm: body(comm, overlap=True)),
        run_in_process(3, lambda comm: body(comm, overlap=False)),
        strict=True,
    ):
        assert_all_same(late[0], plain[0])
        assert_all_same(late[1], plain[1])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_checkpoint_is_resumed_the_other_way(overlap):
    """What was saved with overlap continues without, and the other way round, bit for bit, from all
    ranks' state dicts.
    """

    def body(comm):
        model = Model("delayed")
        optimizer = optimizer_of(model, comm, overlap=overlap)
        train(model, optimizer, range(3))
        states = comm.all_gather_object(optimizer.state_dict())
        train(model, optimizer, range(3, 5))
        resumed = Model("delayed")
        other = optimizer_of(resumed, comm, overlap=not overlap)
        other.load_state_dict(states)
        train(resumed, other, range(3, 5))
        optimizer.wait_for_all_gather()
        other.wait_for_all_gather()
        return stored(model), stored(resumed)

    for uninterrupted, resumed in run_in_process(3, body):
        assert_all_same(resumed, uninterrupted)


def test_layers_do_not_keep_an_optimizer():
    """Their hooks outlive it, keep nothing of it, and do nothing then."""
    model = Model("current")
    optimizer = optimizer_of(model, zerocast.as_communicator(None), overlap=True)
    masters = weakref.ref(optimizer._shards)
    del optimizer
    gc.collect()
    assert masters() is None
    model(torch.ones(1, 32).bfloat16())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (True, r"takes the layers that wait for their weights, such as model\.layers, got True"),
        ([torch.zeros(1)], r"takes modules, got a Tensor among them"),
        ([torch.nn.GELU()], r"layer 0, a GELU, has none; leave it out"),
    ],
)
def test_what_is_no_layer_is_refused(layers, message):
    """On all ranks, before any weight is touched."""

    def body(comm):
        model = Model("nvfp4")
        before = stored(model)
        with pytest.raises(zerocast.InputError, match=message):
            ZeroOptimizer(model.parameters(), group=comm, lr=0.1, overlap_all_gather=layers)
        assert_all_same(stored(model), before)

    run_in_process(2, body)


def test_ranks_that_overlap_differently_are_refused():
    """Both sides are named, on all ranks: their buckets would not fit together."""

    def body(comm):
        model = Model("nvfp4")
        with pytest.raises(
            zerocast.RankMismatchError, match=r"rank 1 has '.*and layer 0 of overlap_all_gather'"
        ):
            optimizer_of(model, comm, overlap=comm.rank == 1)

    run_in_process(2, body)
