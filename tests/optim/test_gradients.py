"""What happens between ``.grad`` and the inner optimizer: reduction, absence, clipping."""

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD

from tests.optim.training import (
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    assert_same_lists,
    draw_gradients,
    make_params,
    set_gradients,
)
from tests.support.claims import assert_same_tensors, message_of, one_message
from tests.support.ranks import on_ranks
from zerocast.cast.amax_buffers import STEP_WORDS
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.errors import InputError, NonFiniteError
from zerocast.optim import ZeroOptimizer
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import collect_weights


@on_ranks("in_process", 2)
def test_a_step_is_one_all_to_all_one_all_reduce_and_one_all_gather_a_storage_kind(
    comm: Communicator,
) -> None:
    """Gradients travel by one all-to-all, in their own dtypes: the one all-reduce holds the amaxes,
    4 bytes a cut block and a weight, and 8 of the step. The weights are 4-bit codes, BF16 and
    FP32: three all-gathers, and one of scales.
    """
    spy = RecordingCommunicator(comm)
    t = Training(spy)
    spy.reset()
    t.train(0)
    seen = {kind: (t.calls, t.payload_bytes) for (_, kind), t in spy.traffic.items()}
    cut = 4  # blocks: element 64 of the 20x80 weight is the first of rank 1, in row 0
    row = 2 * 1664 + 2 * 32 + 4 * 16  # 3200 + 38 + 15 elements, halved and rounded up to 64 bytes
    row += 5 * 8 + 6 + 2  # notes, a flag for each weight, and to whole 8 bytes
    assert seen["all_to_all"] == (1, 2 * row)
    assert seen["all_reduce"] == (1, 4 * (cut + 3 + STEP_WORDS))  # and an amax for each weight
    assert seen["all_gather"][0] == 3 + 1
    assert seen.keys() == {"all_to_all", "all_reduce", "all_gather"}


@pytest.mark.parametrize("buffer_bytes", [1, 400, 2801, 20000])
@on_ranks("in_process", 3)
def test_rounds_of_a_bounded_buffer_give_the_same_gradients(
    comm: Communicator, buffer_bytes: int
) -> None:
    """However few columns a round has, the reduced gradients are those of one round, and so is what
    is known of absent ones.
    """
    params = make_params(NVFP4)
    weights = collect_weights([{"params": params}])
    set_gradients(params, draw_gradients(params, 0, comm.rank))
    params[2].grad = None  # on no rank
    if comm.rank:
        params[4].grad = None  # on rank 0 only
    found = []
    for size in (1 << 24, buffer_bytes):
        reducer = GradientReducer(ShardedWeights(comm, weights), buffer_bytes=size)
        for _ in range(2):  # a second time, over what the first one left in the buffer
            reducer.reduce_mean()
        gradients = enumerate(reducer.gradients())
        found.append({str(i): g.clone() for i, g in gradients if g is not None})
    assert found[0].keys() == set("01345")
    assert_same_tensors(found[1], found[0], "in rounds")


@on_ranks("in_process", 2)
def test_flags_come_from_the_host_when_they_change(comm: Communicator) -> None:
    """Without notes, which no step on a GPU sends: there each copy from the host waits for the
    device, and a CUDA graph cannot hold it.
    """
    params = make_params(NVFP4)
    set_gradients(params, draw_gradients(params, 0, comm.rank))
    reducer = GradientReducer(ShardedWeights(comm, collect_weights([{"params": params}])))
    sent = []
    for present in (True, True, False):
        params[4].grad = params[4].grad if present else None
        reducer.reduce_mean()
        sent.append(reducer._sent_tail)
    assert sent[0] is sent[1]
    assert sent[1] is not sent[2]


@on_ranks("in_process", 3)
def test_a_weight_without_a_gradient_anywhere_is_left_out_of_the_step(comm: Communicator) -> None:
    """As in torch: no weight decay, no momentum, no step count for it; one that only some ranks
    have a gradient for is stepped with the mean over all.
    """
    missing, partly, options = 0, 4, {"lr": 1e-2, "weight_decay": 0.5}
    t, whole = Training(comm, **options), Whole(ranks=3, **options)
    for step in range(4):
        t.feed(step)
        whole.feed(step)
        if step % 2:
            t.params[missing].grad = whole.masters[missing].grad = None
            whole.masters[partly].grad = draw_gradients(whole.masters, step, 1)[partly] / 3
            if comm.rank != 1:
                t.params[partly].grad = None
        t.optimizer.step()
        whole.optimizer.step()
    assert_cast_of(t.params, whole.masters)


@on_ranks("in_process", 2)
def test_sparse_and_transposed_gradients_count_like_dense_ones(comm: Communicator) -> None:
    """An embedding's sparse gradient and those of any strides, a column of a matrix and one number
    for all elements too, are flattened like any other.
    """
    embedding = torch.nn.Embedding(10, 3, sparse=True, _weight=torch.zeros(10, 3))
    values = torch.arange(128.0).view(32, 4)
    gradients = [values.t(), values[:, 1], values[:, 1:2], torch.ones(()).expand(32)]
    params = [torch.nn.Parameter(torch.zeros(gradient.shape)) for gradient in gradients]
    optimizer = ZeroOptimizer([embedding.weight, *params], SGD, group=comm, lr=1.0)
    embedding(torch.tensor([2, 2, 7])).sum().backward()
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()
    expected = torch.zeros(10, 3)
    expected[2], expected[7] = -2.0, -1.0
    assert torch.equal(embedding.weight, expected)
    for param, gradient in zip(params, gradients, strict=True):
        assert torch.equal(param, -gradient)


# --- clipping ---


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@on_ranks("in_process", 3)
def test_clipping_equals_torchs_on_the_whole(
    comm: Communicator, max_norm: float, norm_type: float
) -> None:
    """The norm and the clipped step are those of ``torch.nn.utils.clip_grad_norm_`` on the whole
    mean gradients; the norm has the same bits on every rank, and ``.grad`` is not touched.
    """
    t, whole = Training(comm, NVFP4, SGD, lr=1.0), Whole(NVFP4, SGD, ranks=3, lr=1.0)
    t.feed(0)
    before = [p.grad.clone() for p in t.params]
    norm = t.optimizer.clip_grad_norm_(max_norm, norm_type)
    assert_same_lists([p.grad for p in t.params], before, "gradients")
    assert len(set(comm.all_gather_object(norm.item()))) == 1
    whole.feed(0)
    torch.testing.assert_close(
        norm, torch.nn.utils.clip_grad_norm_(whole.masters, max_norm, norm_type)
    )
    t.optimizer.step()
    whole.optimizer.step()
    for a, b in zip(t.masters(), whole.masters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_ranks("in_process", 2)
def test_clipping_reduces_once_and_the_step_uses_it(comm: Communicator) -> None:
    """One exchange for clipping and step together, and a fresh one in the next step."""
    spy = RecordingCommunicator(comm)
    t = Training(spy, NVFP4, SGD, lr=1.0)
    for forget, calls in ((False, 1), (False, 1), (True, 2)):
        t.feed(0)
        spy.reset()
        t.optimizer.clip_grad_norm_(1.0)
        if forget:
            t.optimizer.zero_grad()
        t.optimizer.step()
        assert spy.total(kind="all_to_all").calls == calls


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all(value: float) -> None:
    """``error_if_nonfinite`` raises the same error everywhere, for either kind of norm."""

    def clip(comm: Communicator, norm_type: float) -> str:
        t = Training(comm)
        t.feed(0)
        if comm.rank == 1:
            t.params[3].grad[5] = value
        call = t.optimizer.clip_grad_norm_
        return message_of(NonFiniteError, call, 1.0, norm_type, error_if_nonfinite=True)

    for norm_type in (2.0, math.inf):
        message = one_message(run_in_process(3, partial(clip, norm_type=norm_type)))
        assert "find the loss that caused it" in message


def test_a_norm_type_must_be_positive() -> None:
    """Norms of order 0 and below are refused before anything is reduced."""
    optimizer = ZeroOptimizer(make_params(NVFP4))
    with pytest.raises(InputError, match="must be a positive number or math"):
        optimizer.clip_grad_norm_(1.0, 0)


@on_ranks("in_process", 2)
def test_a_closure_recomputes_gradients_before_the_step(comm: Communicator) -> None:
    """``step(closure)`` calls it with gradients enabled, steps from its gradients, and returns its
    loss.
    """
    t = Training(comm, NVFP4, SGD, lr=1.0)

    def closure() -> float:
        assert torch.is_grad_enabled()
        t.feed(0)
        return 1.25

    assert t.optimizer.step(closure) == 1.25
    assert_cast_of(t.params, Whole(NVFP4, SGD, ranks=2, lr=1.0).train(0))


@pytest.mark.parametrize("change", ["more", "scaled", "anew"])
@on_ranks("in_process", 2)
def test_gradients_that_change_after_clipping_are_not_lost_silently(
    comm: Communicator, change: str
) -> None:
    """Another backward pass, a loop that scales them, a batch after a step that was left out: the
    step is refused on every rank, also where one alone sees it, and clipping again is a way on.
    """
    t = Training(comm, NVFP4, SGD, lr=1.0)
    params, optimizer = t.params, t.optimizer
    t.feed(0)
    optimizer.clip_grad_norm_(1.0)
    before = optimizer.gather_master(params[3])
    if change == "more":
        params[3].sum().backward()
    elif change == "scaled" and comm.rank == 1:
        params[3].grad.mul_(2)
    elif change == "anew":
        params[3].grad = torch.ones_like(params[3])
    with pytest.raises(InputError, match="has changed since; call optimizer.clip_grad_norm_"):
        optimizer.step()
    assert torch.equal(optimizer.gather_master(params[3]), before)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert not torch.equal(optimizer.gather_master(params[3]), before)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_torchs_clipping_takes_the_optimizers_param_groups(norm_type, foreach) -> None:
    """On one rank it is right, and the parameter without elements adds nothing to the norm."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = ZeroOptimizer([weight])
    weight.grad = torch.full((4,), -3.0)
    given = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(given, 0.5, norm_type, foreach=foreach)
    assert norm.item() == (6.0 if norm_type == 2 else 3.0)
