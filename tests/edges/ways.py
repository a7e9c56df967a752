"""Ways in which foreign code touches masters, weights or the optimizer: rows of docs/edges.md."""

import copy
import ctypes
import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

import zerocast
from tests.support.claims import assert_same_tensors
from tests.support.models import InRegion
from tests.support.ranks import shared_folder
from tests.support.same_bytes import assert_same_bytes
from tests.support.subjects import Fsdp2, K, Plan, Subject, Tensor, Zero, batch, local, plain_model
from tests.support.weights import through_a_file
from zerocast.sharded.all_gather import gather_of

Way = Callable[[Subject], None]
WAYS: dict[str, Way] = {}


def _way(row: str) -> Callable[[Way], Way]:
    def register(way: Way) -> Way:
        WAYS[row] = way
        return way

    return register


# --- masters are written ---


def _step(subject: Subject, step: Callable[[], object]) -> None:
    """A step that ``step`` makes, and must make."""
    before = [local(m).detach().clone() for m in subject.masters()]
    subject.backward()
    step()
    subject.optimizer.zero_grad()
    subject.publish()
    for old, master in zip(before, subject.masters(), strict=True):
        assert not torch.equal(old, local(master).detach()) or not old.numel()


@_way("an optimizer's eager step")
def eager_step(subject: Subject) -> None:
    """torch's foreach implementation."""
    _step(subject, subject.optimizer.step)


@_way("`torch.compile(optimizer.step)`")
def compiled_step(subject: Subject) -> None:
    """Inductor writes memory that torch's version counters do not count."""
    if isinstance(subject, Zero):
        whole = subject.optimizer.step
        subject.optimizer.inner.step = torch.compile(subject.optimizer.inner.step)
        _step(subject, whole)
        subject.check()
        subject.make()
    step = torch.compile(subject.optimizer.step)
    for _ in range(2):
        _step(subject, step)
        subject.check()


@_way("a pointer: Triton, CuPy, ctypes")
def pointer(subject: Subject) -> None:
    """The memory behind ``data_ptr()``, by nobody whom torch sees."""
    for master in subject.masters():
        rows = local(master)
        values = torch.linspace(-3, 3, max(rows.numel(), 1))
        ctypes.memmove(rows.data_ptr(), values.data_ptr(), 4 * rows.numel())
    subject.publish()


@_way("`torch.from_dlpack(master)`")
def dlpack(subject: Subject) -> None:
    """A tensor of the same memory with a version of its own."""
    for master in subject.masters():
        torch.from_dlpack(local(master).detach()).mul_(-1.5)
    subject.publish()


@_way("an index or a piece: `master[0] = 0`")
def piece(subject: Subject) -> None:
    """Views of some elements."""
    with torch.no_grad():
        for master in subject.masters():
            rows = local(master)
            if len(rows):
                rows[0] = 0
                rows.unbind()[-1].mul_(2)
                rows.view(-1)[1:3].fill_(5)
    subject.publish()


@_way("`master.copy_`, `lerp_`, `torch._foreach_*`")
def in_place(subject: Subject) -> None:
    """Operations on masters as they are, DTensors included."""
    masters = subject.masters()
    with torch.no_grad():
        for master in masters:
            master.lerp_(torch.zeros_like(master), 0.25)
        torch._foreach_mul_(masters, -1.25)
    subject.publish()


@_way("an entry of `model.state_dict()`")
def entry_of_a_state_dict(subject: Subject) -> None:
    """A plain DTensor of the same memory, written between a cast ahead and the next gather."""
    zerocast.sharded.precompute_scales_for_fsdp(subject.model)
    for entry in subject.model.state_dict().values():
        entry.mul_(-1.5)
    subject.publish()


@_way("`master.data = other`")
def data(subject: Subject) -> None:
    """Other memory of the same size under the same tensor."""
    for master in subject.masters():
        other = master.detach() * -1.5
        master.data = other
        assert torch.equal(master.detach(), other)
    subject.publish()


@_way("one rank alone writes")
def one_rank(subject: Subject) -> None:
    """The others have the masters that they had."""
    if subject.comm.rank == 0:
        with torch.no_grad():
            for master in subject.masters():
                local(master).mul_(-2)
    subject.publish()


# --- optimizers ---


class OwnSGD(torch.optim.Optimizer):
    """A plain step, by whatever a subclass does with the parameters that have gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """One step."""
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group["lr"])


class NormalizedSGD(OwnSGD):
    """Divides all gradients by their norm over all parameters: no update of single elements."""

    def update(self, params, lr):
        """By one norm."""
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for p in params:
            p.sub_(p.grad / norm, alpha=lr)


class RebindingSGD(OwnSGD):
    """Gives a parameter new memory in each step."""

    def update(self, params, lr):
        """By other tensors."""
        for p in params:
            p.data = p.data - lr * p.grad


def _with_optimizer(subject: Subject, make: Callable[..., torch.optim.Optimizer]) -> None:
    if isinstance(subject, Zero):
        named = list(subject.model.named_parameters())
        subject.optimizer = zerocast.optim.ZeroOptimizer(named, make, subject.comm, lr=0.1)
    else:
        subject.optimizer = make(subject.masters(), lr=0.1)
    _step(subject, subject.optimizer.step)


@_way("an optimizer that looks at more than one element")
def mixing_optimizer(subject: Subject) -> None:
    """Where the optimizer sees pieces, they are all that it can look at."""
    _with_optimizer(subject, NormalizedSGD)


@_way("an optimizer that assigns `p.data`")
def rebinding_optimizer(subject: Subject) -> None:
    """Its parameters are other memory after each step."""
    _with_optimizer(subject, RebindingSGD)


# --- masters of another kind ---


def _new_plan(subject: Subject, masters: list[torch.Tensor]) -> None:
    """The subject goes on with these, of the same partition."""
    assert isinstance(subject, Plan)
    weights = list(subject.model.parameters())
    subject.plan = zerocast.CastPlan(weights, masters, subject.starts, subject.comm)
    subject.shards = masters
    subject.publish()


@_way("masters in BF16 or FP16")
def low_precision(subject: Subject) -> None:
    """Exact inputs, read as they are."""
    for dtype in (torch.bfloat16, torch.float16):
        _new_plan(subject, [shard.to(dtype) for shard in subject.shards])
        subject.check()


@_way("a DTensor as a master")
def distributed_master(subject: Subject) -> None:
    """A forgotten ``to_local()``."""
    mesh = init_device_mesh("cpu", (subject.comm.size,))
    _new_plan(subject, [DTensor.from_local(s, mesh, [Shard(0)]) for s in subject.shards])


# --- weights are written, and read ---


@_way("`model.load_state_dict`")
def load_model(subject: Subject) -> None:
    """Loaded masters are cast by the next gather. Where weights hold codes, another run's."""
    before = [m.clone() for m in subject.whole_masters()]
    other = plain_model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-2)
    if isinstance(subject, (Plan, Zero)):
        subject.model.load_state_dict(other.state_dict())
        subject.train()
    else:
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(subject.model, other.state_dict(), options=options)
    if not isinstance(subject, Plan):  # whose masters are the caller's own
        for old, master in zip(before, subject.whole_masters(), strict=True):
            assert not torch.equal(old, master)


@_way("`weight.mul_`, `add_`, ...")
def in_place_on_weights(subject: Subject) -> None:
    """Arithmetic on a value that was rounded."""
    with torch.no_grad():
        next(iter(subject.model.parameters())).mul_(1.5)


@_way("`weight.copy_`, `torch.nn.init.zeros_`")
def copied_into(subject: Subject) -> None:
    """Under FSDP2 the gathered weight, which the next gather makes from its master."""
    with torch.no_grad():
        for weight in subject.weights():
            torch.nn.init.zeros_(weight)
            weight.copy_(torch.ones(weight.shape))
    subject.train()


def with_plain_weights(subject: Subject) -> Subject:
    """A model with a bias and a norm, of codes under a ZeroOptimizer; any other as it is."""
    if isinstance(subject, Zero):
        subject.model.append(torch.nn.Linear(K, 8)).append(torch.nn.LayerNorm(8))
        subject.optimizer = zerocast.optim.ZeroOptimizer(
            subject.model.named_parameters(), torch.optim.SGD, subject.comm, lr=0.0
        )
    return subject


def _written_values(subject: Subject, value: float, touch: Way) -> None:
    """What ``touch`` writes into all parameters is what the next step trains."""
    plain = {name: torch.full(p.shape, value) for name, p in subject.model.named_parameters()}
    touch(subject)
    if not isinstance(subject, Plan):  # whose masters are the caller's own
        subject.publish()
        for master in subject.whole_masters():
            assert_same_bytes(master, torch.full(master.shape, value), "master")
    for name, weight in subject.model.named_parameters():
        if not isinstance(weight, (zerocast.QuantizedTensor, DTensor)):
            assert_same_bytes(weight.detach(), plain[name], name)
    if isinstance(subject, Zero):
        del subject.model[2:]


@_way("`param.data.copy_`, of biases and norms, too")
def data_of_parameters(subject: Subject) -> None:
    """As loaders of adapters do."""

    def touch(subject: Subject) -> None:
        for param in subject.model.parameters():
            param.data.copy_(torch.full_like(param.data, 2.0))

    _written_values(with_plain_weights(subject), 2.0, touch)
    if isinstance(subject, Plan):
        subject.train()


@_way("one rank loads, then `dist.broadcast(param.data)` of all")
def loaded_and_broadcast(subject: Subject) -> None:
    """The others learn of it by memory that was written."""

    def touch(subject: Subject) -> None:
        state = {name: torch.full(p.shape, 2.0) for name, p in subject.model.named_parameters()}
        if subject.comm.rank == 0:
            subject.model.load_state_dict(state)
        for param in subject.model.parameters():
            dist.broadcast(param.data, 0)

    _written_values(with_plain_weights(subject), 2.0, touch)
    if isinstance(subject, Plan):
        subject.train()


@_way("`param.data`, by one rank alone")
def data_of_one_rank(subject: Subject) -> None:
    """Masters of other ranks cannot follow; where parameters are masters, each rank has its own."""
    if not isinstance(subject, Zero):
        if subject.comm.rank == 0:
            for param in subject.model.parameters():
                local(param).data.fill_(2.0)
        return
    norm = with_plain_weights(subject).model[3].weight
    held = norm.detach().clone()
    if subject.comm.rank == 0:
        norm.data[-1:] = 3.0
    try:
        subject.optimizer.step()
    finally:
        norm.data.copy_(held)
        subject.optimizer.step()
        del subject.model[2:]


@_way("`dist.broadcast(weight)`")
def broadcast(subject: Subject) -> None:
    """All of its bytes move."""
    for weight in subject.model.parameters():
        dist.broadcast(weight.data, 0)


@_way("`dist.all_reduce(weight)`")
def all_reduce(subject: Subject) -> None:
    """Codes do not add up."""
    dist.all_reduce(next(iter(subject.model.parameters())).data)


@_way("torch's DDP around the model")
def ddp(subject: Subject) -> None:
    """It broadcasts the parameters when it is made."""
    before = [w.dequantize() for w in subject.weights()]
    torch.nn.parallel.DistributedDataParallel(subject.model)
    for old, weight in zip(before, subject.weights(), strict=True):
        assert_same_bytes(weight.dequantize(), old, "weight")


@_way("`AveragedModel(model)`")
def averaged(subject: Subject) -> None:
    """It would round its averages at each copy."""
    AveragedModel(subject.model, avg_fn=get_ema_avg_fn(0.9))


@_way("`fully_shard` on weights that hold codes")
def shard_codes(subject: Subject) -> None:
    """They would become plain tensors of rounded values."""
    fully_shard(subject.model)


@_way("`model.to(dtype)`, `model.half()`")
def change_dtype(subject: Subject) -> None:
    """The nominal dtype of weights that hold codes; parameters keep attributes and hooks."""
    for weight in subject.model.parameters():
        weight.tensor_model_parallel = True
    subject.model.float()
    for weight in subject.model.parameters():
        assert weight.tensor_model_parallel
    subject.train()


@_way("`copy.deepcopy`, `torch.save`")
def copies(subject: Subject) -> None:
    """Copies hold the same bytes, and are written by nobody else."""
    weights = [w.detach() for w in subject.weights()]
    others = copy.deepcopy(weights)
    for weight, *same in zip(weights, others, through_a_file(weights), strict=True):
        for each in same:
            assert_same_bytes(each.rowwise_data, weight.rowwise_data, "copy")
    before = [w.rowwise_data.clone() for w in others]
    subject.train()
    for other, old in zip(others, before, strict=True):
        assert_same_bytes(other.rowwise_data, old, "copy")


# --- forwards and backwards ---


def _gradients(subject: Subject, forward: Callable[[torch.Tensor], torch.Tensor]) -> list:
    x = batch().requires_grad_()
    forward(x).square().mean().backward()
    found = [x.grad, *(local(p.grad) for p in subject.model.parameters())]
    subject.model.zero_grad()
    return [f.clone() for f in found]


@_way("`torch.compile(model)`")
def compiled_model(subject: Subject) -> None:
    """By inductor; outputs and gradients within its own rounding, weights exactly."""
    eager = _gradients(subject, subject.model)
    torch.testing.assert_close(_gradients(subject, torch.compile(subject.model)), eager)
    subject.train()


def _same_gradients(subject: Subject, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Under ``autocast``, with ``forward`` in the place of the model's own, to the bit."""
    plain, other = (
        _gradients(subject, InRegion(model, subject.recipe)) for model in (subject.model, forward)
    )
    assert_same_tensors(dict(enumerate(other)), dict(enumerate(plain)), "gradient")


@_way("`torch.compile(model)` under `autocast`")
def compiled_products(subject: Subject) -> None:
    """The gradients are those of the uncompiled model, to the bit."""
    _same_gradients(subject, torch.compile(subject.model, backend="aot_eager"))


@_way("activation checkpointing under `autocast`")
def checkpointing(subject: Subject) -> None:
    """Either kind of torch's, with its own switches: the gradients are those without it."""
    for reentrant in (False, True):
        _same_gradients(subject, partial(checkpoint, subject.model, use_reentrant=reentrant))


@_way("gradients accumulated over microbatches")
def accumulation(subject: Subject) -> None:
    """Between backward passes the codes are those of one cast."""
    weights = [] if isinstance(subject, Tensor) else subject.weights()
    codes = [weight.rowwise_data.clone() for weight in weights]
    for _ in range(2):
        subject.backward()
    if codes:
        for old, weight in zip(codes, subject.weights(), strict=True):
            assert_same_bytes(weight.rowwise_data, old, "codes")
    subject.optimizer.step()
    subject.optimizer.zero_grad()
    subject.publish()


# --- what was forgotten ---


@_way("the all-gather forgotten, and `zerocast.verify`")
def forgotten(subject: Subject) -> None:
    """:func:`zerocast.verify` says so on every rank."""
    if isinstance(subject, Plan):
        with torch.no_grad():
            for shard in subject.shards:
                shard.mul_(-2)
        subject.plan.cast()
        with suppress(zerocast.StaleCopyError):
            zerocast.post_all_gather_processing(list(subject.model.parameters()))
        try:
            zerocast.verify(list(subject.model.parameters()), subject.comm)
        finally:
            subject.plan.all_gather()
    else:
        zerocast.verify(subject.weights(), subject.comm)


# --- the optimizer is used ---


@_way("`torch.optim.lr_scheduler`")
def scheduler(subject: Subject) -> None:
    """One that sets the rate to 0: nothing is stepped any more."""
    optimizers = [subject.optimizer]
    if isinstance(subject, Zero):
        optimizers.append(subject.optimizer.inner)
    for optimizer in optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
        before = subject.whole_masters()
        subject.train()
        for old, master in zip(before, subject.whole_masters(), strict=True):
            assert_same_bytes(master, old, "master")
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        subject.train()


@_way("gradients that change after `optimizer.clip_grad_norm_`")
def change_after_clipping(subject: Subject) -> None:
    """Noise, another microbatch."""
    subject.backward()
    subject.optimizer.clip_grad_norm_(1.0)
    subject.backward()
    subject.optimizer.step()


@_way("a `GradScaler` that unscales after the clipping")
def unscale_after_clipping(subject: Subject) -> None:
    """The norm would be that of scaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((subject.model(batch()) - 1).square().mean()).backward()
    subject.optimizer.clip_grad_norm_(1.0)
    scaler.step(subject.optimizer)


@_way("an option that one rank alone changes")
def options_of_one_rank(subject: Subject) -> None:
    """A scheduler that looks at the loss of the rank's own batch."""
    for step in range(5):  # equal digests of different options are seen one step later
        subject.optimizer.param_groups[0]["lr"] = 0.5 + step * subject.comm.rank
        subject.train()


@_way("`copy.deepcopy(optimizer)`, `torch.save(optimizer)`")
def copy_optimizer(subject: Subject) -> None:
    """It would have no ranks."""
    torch.save(subject.optimizer, io.BytesIO())


@_way("`zerocast.checkpoint.save`, then `load`")
def saved_training(subject: Subject) -> None:
    """Masters and optimizer are what they were, whatever was trained in between."""
    folder = shared_folder(subject.comm)
    zerocast.checkpoint.save(folder, subject.optimizer, subject.model)
    before = subject.whole_masters()
    subject.train()
    zerocast.checkpoint.load(folder, subject.optimizer, subject.model)
    for old, master in zip(before, subject.whole_masters(), strict=True):
        assert_same_bytes(master, old, "master")


@_way("a step between `load` and the first forward, under delayed scaling")
def stepped_after_load(subject: Subject) -> None:
    """A run of the same subject that never stopped has the same recipe state afterwards."""
    found, folder = [], shared_folder(subject.comm)
    for is_loaded in (False, True):
        run = type(subject)(subject.comm, zerocast.DelayedScaling(amax_history_len=4))
        if not is_loaded:
            run.train()
            run.backward()
            run.model.zero_grad()
            run.masters()  # under FSDP2 sharded again
            zerocast.checkpoint.save(folder, run.optimizer, run.model)
        else:
            zerocast.checkpoint.load(folder, run.optimizer, run.model)
        for param in run.model.parameters():
            param.grad = torch.ones_like(param)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward()
        found.append({str(i): w for i, w in enumerate(run.whole_masters())})
        for i, param in enumerate(run.model.parameters()):
            held = param if isinstance(param, zerocast.QuantizedTensor) else gather_of(param)
            state = held.quantized_storage.buffers if held is param else held.state
            found[-1] |= {f"{i} {k}": state[k].clone() for k in ("scale", "amax_history")}
    assert_same_tensors(found[1], found[0], "loaded")


@_way("an optimizer made after the first forward, and `zerocast.checkpoint.save`")
def made_after_a_forward(subject: Subject) -> None:
    """FSDP2 leaves the parameters of its root gathered, here all of them."""
    if isinstance(subject, Fsdp2):
        subject.model = plain_model()
        zerocast.nn.convert(subject.model, subject.recipe, weights="master")
        fully_shard(subject.model, mesh=init_device_mesh("cpu", (subject.comm.size,)))
    with torch.no_grad():
        subject.model(batch())
    if isinstance(subject, Zero):
        named = subject.model.named_parameters()
        subject.optimizer = zerocast.optim.ZeroOptimizer(named, group=subject.comm, lr=0.05)
    else:
        subject.optimizer = torch.optim.AdamW(subject.model.parameters(), lr=0.05)
    zerocast.checkpoint.save(shared_folder(subject.comm), subject.optimizer, subject.model)
    subject.train()


@_way("`get_optimizer_state_dict(model, optimizer)`")
def state_for_checkpoints(subject: Subject) -> None:
    """Whole tensors, or DTensors."""
    state = get_optimizer_state_dict(subject.model, subject.optimizer)["state"]
    assert len(state) == len(subject.whole_masters())
