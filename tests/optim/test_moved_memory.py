"""Memory of a ZeroOptimizer's weights, masters and gradients that other code moves: the next step
gives the casts of the masters, or says on every rank what to do instead. It looks at a few tensors.
"""

import copy
import io
from collections.abc import Callable

import pytest
import torch

import zerocast
from tests.cast.test_scopes import (
    NAMES,
    given,
    instructions,
    lost_and_found,
    moved,
    set_to,
    shared,
    swapped,
)
from tests.kernels.test_graphs_and_threads import Idle
from tests.support.claims import told_all
from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, SingleRank
from zerocast.errors import InputError

OBJECTS = [given, set_to, swapped]
STORAGES = [moved, shared, lost_and_found]


class Trained:
    """A model of torch's own layers whose weights and one bias a ZeroOptimizer steps."""

    def __init__(self, comm: Communicator, **options: object) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=i == 0) for i in range(3)))
        generator = torch.Generator().manual_seed(0)
        for layer in self.model:
            value = torch.randn(32, 32, generator=generator)
            layer.weight = torch.nn.Parameter(zerocast.quantize(value, "nvfp4"))
        torch.nn.init.ones_(self.model[0].bias)
        self.optimizer = zerocast.optim.ZeroOptimizer(
            self.model.named_parameters(), torch.optim.SGD, comm, lr=0.5, **options
        )

    def masters(self) -> list[torch.Tensor]:
        """The inner optimizer's."""
        return [p for group in self.optimizer.inner.param_groups for p in group["params"]]

    def step(self) -> None:
        """With the same gradients on every rank."""
        generator = torch.Generator().manual_seed(1)
        for param in self.model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        self.optimizer.step()
        self.optimizer.wait_for_all_gather()

    def check(self) -> None:
        """Weights are the casts of the masters."""
        for name, param in self.model.named_parameters():
            master = self.optimizer.gather_master(param)
            if isinstance(param, zerocast.QuantizedTensor):
                wanted = zerocast.quantize(master, "nvfp4", dtype=param.dtype)
                for each in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "amax"):
                    assert_same_bytes(getattr(param, each), getattr(wanted, each), name)
            else:
                assert_same_bytes(param.detach(), master.to(param.dtype), name)


def steps_as_ever(comm: Communicator, touch: Callable[[Trained], object], **options) -> None:
    """Steps around ``touch`` give the casts of their masters, which are those without it."""
    trained, other = Trained(comm, **options), Trained(comm, **options)
    for round_ in range(3):
        trained.step()
        other.step()
        if round_ < 2:
            trained.check()
            touch(trained)
    trained.check()
    for ours, theirs in zip(trained.model.parameters(), other.model.parameters(), strict=True):
        mine, wanted = (t.optimizer.gather_master(p) for t, p in ((trained, ours), (other, theirs)))
        assert_same_bytes(mine, wanted, "master")


@on_ranks("in_process", 2)
@pytest.mark.parametrize("move", OBJECTS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_attributes_of_weights(
    comm: Communicator, move: Callable[[torch.Tensor], None], overlaps: bool
) -> None:
    """Whatever other memory they are given, the weight keeps its own."""

    def touch(trained: Trained) -> None:
        for layer in trained.model:
            for name in NAMES:
                if name in layer.weight.quantized_storage.buffers:
                    move(getattr(layer.weight, name))

    steps_as_ever(comm, touch, overlap_all_gather=overlaps, overlap_cast=overlaps)


@on_ranks("in_process", 2)
@pytest.mark.parametrize("move", STORAGES)
@pytest.mark.parametrize("name", ["rowwise_scale_inv", "columnwise_data", "amax"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_storages_of_weights(
    comm: Communicator, move: Callable[[torch.Tensor], None], name: str, overlaps: bool
) -> None:
    """What a cast writes is written where it lies now, though one rank alone has moved it."""

    def touch(trained: Trained) -> None:
        if comm.rank == 0:
            move(getattr(trained.model[1].weight, name))

    steps_as_ever(comm, touch, overlap_all_gather=overlaps)


@on_ranks("in_process", 2)
def test_storages_of_masters(comm: Communicator) -> None:
    """Masters are read where they lie now."""

    def regrown(master: torch.Tensor) -> None:
        numel = master.numel()
        master.resize_(64 * numel)
        master.resize_(numel)

    for move in (moved, shared, regrown):
        trained = Trained(comm)
        for _ in range(2):
            trained.step()
            move(trained.masters()[-1].detach())
        trained.step()
        trained.check()


@on_ranks("in_process", 2)
@pytest.mark.parametrize("move", OBJECTS[:2])
def test_masters_that_are_other_memory(
    comm: Communicator, move: Callable[[torch.Tensor], None]
) -> None:
    """The next step takes the values that the inner optimizer's parameters have now."""
    trained = Trained(comm)
    trained.step()
    for master in trained.masters():
        with torch.no_grad():
            move(master)
    trained.step()
    trained.check()
    generator = torch.Generator().manual_seed(1)
    for param in trained.model.parameters():
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype).float()
        assert_same_bytes(trained.optimizer.gather_master(param), -0.5 * gradient, "from zeros")


@on_ranks("in_process", 2)
@pytest.mark.parametrize("move", [*OBJECTS[:2], moved, shared])
def test_gradients_that_are_other_memory(
    comm: Communicator, move: Callable[[torch.Tensor], None]
) -> None:
    """A step takes what they hold then."""
    trained, other = Trained(comm), Trained(comm)
    for each in (trained, other):
        each.step()
        for param in each.model.parameters():
            value = torch.full_like(param.grad, 0.25)
            if each is trained:
                move(param.grad)
            param.grad.copy_(value)
        each.optimizer.step()
        each.check()
    for ours, theirs in zip(trained.model.parameters(), other.model.parameters(), strict=True):
        wanted = other.optimizer.gather_master(theirs)
        assert_same_bytes(trained.optimizer.gather_master(ours), wanted, "master")


def halved(trained: Trained) -> None:
    """torch swaps the parameters' contents with those of others."""
    trained.model.half()


def exchanged(trained: Trained) -> None:
    """Two weights are each other."""
    trained.optimizer.zero_grad()
    torch.utils.swap_tensors(trained.model[0].weight, trained.model[1].weight)


def codes_given_back(trained: Trained) -> None:
    """The memory of all codes."""
    trained.model[2].weight.rowwise_data.untyped_storage().resize_(0)


def codes_shared(trained: Trained) -> None:
    """Other memory for all codes, as it holds the same."""
    trained.model[2].weight.rowwise_data.share_memory_()


def codes_replaced(trained: Trained) -> None:
    """Out of their bucket."""
    zerocast.replace_raw_data(trained.model[2].weight, torch.zeros(512, dtype=torch.uint8))


def bias_given(trained: Trained) -> None:
    """Of a plain weight, other memory."""
    trained.model[0].bias.data = torch.zeros(32)


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    "move", [halved, exchanged, codes_given_back, codes_shared, codes_replaced, bias_given]
)
def test_a_weight_that_is_elsewhere_is_refused(
    comm: Communicator, move: Callable[[Trained], None]
) -> None:
    """On every rank, by a step and by what makes the weights anew, though one rank moved it."""
    trained = Trained(comm)
    trained.step()
    state = trained.optimizer.state_dict()
    if comm.rank == 1:
        move(trained)
    for param in trained.model.parameters():
        param.grad = None
    assert "must stay in the buffer" in told_all(comm, InputError, trained.optimizer.step)
    load = trained.optimizer.load_state_dict
    assert "must stay in the buffer" in told_all(comm, InputError, lambda: load(state))


@on_ranks("in_process", 2)
def test_copies_and_files_are_others(comm: Communicator) -> None:
    """``deepcopy``, ``torch.save`` and ``load_state_dict(assign=True)`` of another model move no
    weight; a saved weight takes no more bytes than its own.
    """

    def touch(trained: Trained) -> None:
        other = copy.deepcopy(trained.model)
        file = io.BytesIO()
        torch.save(trained.model[0].weight, file)
        assert file.tell() < 10_000
        other.load_state_dict(trained.model.state_dict(), assign=True)
        for layer in other:
            layer.weight = torch.nn.Parameter(zerocast.quantize(torch.ones(32, 32), "nvfp4"))

    steps_as_ever(comm, touch)


def test_a_backward_through_written_weights_is_an_error() -> None:
    """torch counts the write of a step of every weight, and of its codes."""
    trained = Trained(SingleRank())
    trained.step()
    before = [layer.weight.rowwise_data._version for layer in trained.model]
    loss = trained.model(torch.ones(1, 32, requires_grad=True)).sum()
    trained.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    after = [layer.weight.rowwise_data._version for layer in trained.model]
    assert all(now > then for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_all_gather": True}, {"overlap_cast": True}],
    ids=["plain", "overlap_all_gather", "overlap_cast"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, zerocast.optim.FusedAdamW])
def test_a_step_looks_at_few_tensors(
    options: dict[str, object], optimizer: type[torch.optim.Optimizer]
) -> None:
    """What makes weights from masters takes as many instructions of Python for 12 weights as for 2;
    and so does what a step does before that, but for gradients and one look at each weight.
    """

    @zerocast.use_backend(CudaBackend(Idle()))
    def of(count: int) -> int:
        params = [torch.nn.Parameter(zerocast.empty((32, 32), "nvfp4")) for _ in range(count)]
        named = [(f"{i}", param) for i, param in enumerate(params)]
        made = zerocast.optim.ZeroOptimizer(named, optimizer, SingleRank(), lr=0.1, **options)
        for param in params:
            param.grad = torch.zeros(32, 32, dtype=torch.bfloat16)
        for _ in range(2):
            made.step()
            made.wait_for_all_gather()
        made.phases.before("partial_amax").run()
        phases = made.phases.since("partial_amax")

        def publish() -> None:
            phases.run()
            made.wait_for_all_gather()

        return instructions(publish)

    assert of(12) == of(2)
