"""Ways in which foreign code uses gradients that a ``ZeroOptimizer`` takes during backward
(``overlap_grad_reduce=True``): rows of docs/edges.md.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed._composable import replicate
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zerocast
from tests.support.claims import message_of
from tests.support.same_bytes import assert_same_bytes
from tests.support.subjects import Subject, batch, plain_model
from zerocast import ZerocastError
from zerocast.optim import ZeroOptimizer

Forward = Callable[[torch.Tensor], torch.Tensor]
Way = Callable[[Subject], None]
WAYS: dict[str, Way] = {}


def _way(row: str) -> Callable[[Way], Way]:
    def register(way: Way) -> Way:
        WAYS[row] = way
        return way

    return register


def _nothing(optimizer: ZeroOptimizer) -> None:
    pass


def _keep(model: torch.nn.Module) -> Forward:
    return model


def _step(
    subject: Subject,
    *,
    overlap: bool = True,
    bucket_size: int | None = None,
    around: Callable[[torch.nn.Module], Forward] = _keep,
    between: Callable[[ZeroOptimizer], object] = _nothing,
    passes: int = 1,
) -> list[torch.Tensor]:
    """The masters after a step of SGD of a new model, each rank on a batch of its own.

    ``around`` is called with the model once its optimizer is made, ``between`` before the step.
    Where that raises an error, the masters must be what they were.
    """
    subject.model = plain_model()
    zerocast.nn.convert(subject.model, subject.recipe, weights="quantized")
    named = list(subject.model.named_parameters())
    subject.optimizer = ZeroOptimizer(
        named, torch.optim.SGD, subject.comm, lr=0.5,
        overlap_grad_reduce=overlap, bucket_size=bucket_size,
    )  # fmt: skip
    before = subject.whole_masters()
    try:
        forward = around(subject.model)
        for _ in range(passes):
            (forward(batch(subject.comm.rank)) - 1).square().mean().backward()
        between(subject.optimizer)
        subject.optimizer.step()
    except ZerocastError:
        for master, old in zip(subject.whole_masters(), before, strict=True):
            assert_same_bytes(master, old, "master")
        raise
    after = subject.whole_masters()
    assert not any(map(torch.equal, before, after))
    return after


def _assert_equal_masters(
    subject: Subject, actual: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A step with the options ``actual`` gives those of one with ``expected``, to the bit, whatever
    the size of buckets.
    """
    masters = _step(subject, **expected)
    for bucket_size in (1, None):
        found = _step(subject, bucket_size=bucket_size, **actual)
        for master, other in zip(found, masters, strict=True):
            assert_same_bytes(master, other, f"master, buckets of {bucket_size}")


def _refused(subject: Subject, *uses: Callable[..., Any], **options: Any) -> None:
    """Each of ``uses`` between backward and step is refused, and the error of the last goes on."""
    for use in uses[:-1]:
        assert "overlap_grad_reduce" in message_of(ZerocastError, _refused, subject, use, **options)
    _step(subject, **{"between": uses[-1]} | options)


def _params(optimizer: ZeroOptimizer) -> Sequence[torch.Tensor]:
    return list(optimizer.named_weights.values())


# --- torch's DDP ---


@_way("torch's DDP around the model, `replicate(model)`")
def ddp(subject: Subject) -> None:
    """Its buckets of any kind; a graph that is static, or looked through for unused weights."""
    ways: list[Callable[[torch.nn.Module], Forward]] = [
        partial(DDP, static_graph=True),
        partial(DDP, find_unused_parameters=True),
        partial(DDP, static_graph=True, gradient_as_bucket_view=True),
        partial(DDP, bucket_cap_mb=0.01),
        replicate,
    ]
    for bucket_size in (1, None):
        for around in ways:
            message = message_of(
                ZerocastError, _refused, subject, _nothing, around=around, bucket_size=bucket_size
            )
            assert "torch's DDP" in message
    _refused(subject, _nothing, around=DDP)


def _not_synchronized(model: torch.nn.Module, but_for: int = 0, **options: Any) -> Forward:
    """But for this pass, counted from 1."""
    wrapped, passes = DDP(model, **options), 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        with nullcontext() if passes == but_for else wrapped.no_sync():
            return wrapped(x)

    return forward


@_way("DDP with `gradient_as_bucket_view=True`")
def bucket_views(subject: Subject) -> None:
    """Gradients lie in DDP's memory, where it takes their mean; over several passes, too, of which
    all are synchronized or the last.
    """
    arounds = [DDP, partial(_not_synchronized, but_for=2)]
    for around, passes in ((arounds[0], 1), (arounds[0], 2), (arounds[1], 2)):
        same: dict[str, Any] = {
            "around": partial(around, gradient_as_bucket_view=True), "passes": passes,
        }  # fmt: skip
        _assert_equal_masters(subject, same, same | {"overlap": False})


@_way("DDP inside `no_sync()`")
def no_sync(subject: Subject) -> None:
    """In every pass; DDP then leaves gradients alone."""
    for passes in (1, 2):
        same = {"passes": passes}
        _assert_equal_masters(subject, same | {"around": _not_synchronized}, same)


# --- hooks ---


def _hooked(model: torch.nn.Module) -> Forward:
    """Clamps gradients by hooks of each kind, one after the other."""
    nodes = []
    for param in model.parameters():
        node = torch.autograd.graph.get_gradient_edge(param).node

        def scale(p: torch.Tensor) -> None:
            p.grad = p.grad * 4

        def clamp(*_: object, p: torch.Tensor = param) -> None:
            p.grad.clamp_(-0.01, 0.01)

        param.register_hook(lambda grad: grad * 0.5)
        param.register_post_accumulate_grad_hook(scale)
        node.register_hook(clamp)
        nodes.append(node)  # it lives as long as something holds it

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert nodes
        return model(x)

    return forward


@_way("hooks of weights and of their AccumulateGrad nodes")
def hooks(subject: Subject) -> None:
    """Registered after the optimizer was made: they change gradients as without the option."""
    same = {"around": _hooked}
    _assert_equal_masters(subject, same, same | {"overlap": False})


@_way("`optimizer.inner.register_step_pre_hook`")
def inner_step_hook(subject: Subject) -> None:
    """It sees the masters' mean gradients."""

    def halve(inner: torch.optim.Optimizer, *_: object) -> None:
        for group in inner.param_groups:
            for master in group["params"]:
                master.grad.mul_(0.5)

    def between(optimizer: ZeroOptimizer) -> None:
        optimizer.inner.register_step_pre_hook(halve)

    same = {"between": between}
    _assert_equal_masters(subject, same, same | {"overlap": False})


@_way("`optimizer.register_step_pre_hook`, which uses `.grad`")
def step_hook(subject: Subject) -> None:
    """It comes between backward and step."""

    def scale(optimizer: Any, *_: object) -> None:
        for param in _params(optimizer):
            param.grad.mul_(0.5)

    _refused(subject, lambda optimizer: optimizer.register_step_pre_hook(scale))


# --- between backward and step ---


def _each(use: Callable[[torch.Tensor], object]) -> Callable[[ZeroOptimizer], None]:
    """``use`` of every weight that has a gradient, as such loops are written."""

    def between(optimizer: ZeroOptimizer) -> None:
        for param in _params(optimizer):
            if param.grad is not None:
                use(param)

    return between


def _divide(param: torch.Tensor) -> None:
    param.grad /= 7


@_way("`p.grad /= tokens` between backward and step")
def divided(subject: Subject) -> None:
    """In place, by another tensor, by a foreach function, through ``.data``; a log of norms."""

    def foreach(optimizer: ZeroOptimizer) -> None:
        torch._foreach_div_([param.grad for param in _params(optimizer)], 7.0)

    _refused(
        subject,
        _each(lambda param: param.grad.norm()),
        _each(lambda param: param.grad.data.mul_(2)),
        _each(lambda param: setattr(param.grad, "data", torch.ones(param.shape))),
        _each(lambda param: setattr(param, "grad", param.grad / 7)),
        foreach,
        _each(_divide),
    )


@_way("torch's `clip_grad_norm_`, `clip_grad_value_`")
def clipped(subject: Subject) -> None:
    """They would see gradients of this rank only, and here none."""
    _refused(
        subject,
        lambda optimizer: clip_grad_value_(_params(optimizer), 0.1),
        lambda optimizer: clip_grad_norm_(_params(optimizer), 0.1, foreach=True),
        lambda optimizer: clip_grad_norm_(_params(optimizer), 0.1),
    )


@_way("`p.grad = other`, `p.grad = None`, `model.zero_grad()`")
def replaced(subject: Subject) -> None:
    """Also on one rank alone, after the clipping, and by ``zero_grad(set_to_none=False)``."""

    def clip_first(optimizer: ZeroOptimizer) -> None:
        optimizer.clip_grad_norm_(1.0)
        subject.model.zero_grad()

    def on_one_rank(optimizer: ZeroOptimizer) -> None:
        if subject.comm.rank == 1:
            _params(optimizer)[0].grad = None

    _refused(
        subject,
        _each(lambda param: setattr(param, "grad", torch.ones(param.shape))),
        lambda _: subject.model.zero_grad(set_to_none=False),
        clip_first,
        lambda _: subject.model.zero_grad(),
        on_one_rank,
    )


@_way("`scale_grads` of torch's pipeline stages")
def pipeline(subject: Subject) -> None:
    """By default a schedule divides gradients by the number of microbatches."""

    def scale(optimizer: ZeroOptimizer) -> None:
        stage = PipelineStage(subject.model, subject.comm.rank, 2, torch.device("cpu"))
        stage.scale_grads(4)

    _refused(subject, scale)
