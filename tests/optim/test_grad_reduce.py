"""Gradients in their own dtype, summed in rank order, sent at the step or during backward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.optim.overlapping import Model, backward, optimizer_of, whole_gradients
from tests.optim.training import NVFP4, Training, assert_same_lists, make_params, named
from tests.support.claims import assert_same_tensors, message_of, one_message, stored
from tests.support.late_gathers import ExchangesLate
from tests.support.ranks import on_ranks, run_ranks, split_ranks
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.errors import InputError, RankMismatchError
from zerocast.optim import ZeroOptimizer

PASSES = 2
NOWHERE, PARTLY = 2, 4
"""Weights that no rank uses, and that one rank uses in one pass."""


def is_used(weight: int, rank: int, step: int) -> bool:
    """Whether a backward pass reaches a weight."""
    return weight not in (NOWHERE, PARTLY) or (weight, rank, step) == (PARTLY, 1, 1)


def drawn(params: Sequence[torch.Tensor], rank: int, step: int) -> list[torch.Tensor]:
    """FP32 gradients of very different magnitudes, so that the order of a sum shows."""
    g = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(p.shape, generator=g) * 1000.0 ** (rank - 1) for p in params]


def run_backward(params: Sequence[torch.Tensor], rank: int, step: int) -> None:
    """A pass that has exactly the drawn gradients, in the weights' dtypes."""
    gradients = enumerate(zip(params, drawn(params, rank, step), strict=True))
    used = [(p, g) for i, (p, g) in gradients if is_used(i, rank, step)]
    sum((p * g.to(p.dtype)).sum() for p, g in used).backward()


def mean_in_rank_order(
    params: Sequence[torch.Tensor], index: int, size: int, dtype: torch.dtype | None, overlap: bool
) -> torch.Tensor | None:
    """The mean of one weight's gradients as it is promised; None where there are none."""
    terms, found = [], False
    for step in range(PASSES):
        for rank in range(size):
            gradient = drawn(params, rank, step)[index].to(params[index].dtype)
            used = is_used(index, rank, step)
            terms.append(gradient if used else torch.zeros_like(gradient))
            found |= used
    if not overlap:  # accumulated in .grad before they are sent
        terms = [terms[rank] + terms[size + rank] for rank in range(size)]
    total = torch.zeros(params[index].shape)
    for place, term in enumerate(terms):
        rounded = term.to(dtype or params[index].dtype).float()
        total = total + rounded if place else rounded
    return total / size if found else None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_sums_have_the_same_bits_on_every_transport(
    comm_kind: str, overlap: bool, dtype: torch.dtype | None
) -> None:
    """From other gradients on each rank, several passes, weights that not all ranks use or none:
    SGD moves every master by the sum in FP32 in the order of passes and ranks, over their number.
    """
    size = 3

    def train(comm: Communicator) -> list[list[torch.Tensor]]:
        params = make_params(NVFP4)
        optimizer = ZeroOptimizer(
            named(params), SGD, comm, lr=1.0,
            gradient_dtype=dtype, overlap_grad_reduce=overlap, bucket_size=1000,
        )  # fmt: skip
        before = [optimizer.gather_master(p) for p in params]
        for step in range(PASSES):
            run_backward(params, comm.rank, step)
            assert not whole_gradients(params) or not overlap
        optimizer.step()
        return [before, [optimizer.gather_master(p) for p in params]]

    for before, after in run_ranks(comm_kind, size, train):
        params = make_params(NVFP4)
        means = [mean_in_rank_order(params, i, size, dtype, overlap) for i in range(len(params))]
        expected = [b if m is None else b - m for b, m in zip(before, means, strict=True)]
        assert_same_lists(after, expected, "masters")


def trained(comm: Communicator, recipe: str, **options: Any) -> dict[str, torch.Tensor]:
    """Three steps of one pass each, alike on all ranks, of a model two of whose layers share a
    weight; with clipping before the last one.
    """
    model = Model(recipe)
    optimizer = optimizer_of(model, comm, **options)
    for step in range(3):
        backward(model, step)
        if step == 2:
            optimizer.clip_grad_norm_(1e9)  # the order of squares follows the partition
        optimizer.step()
        optimizer.zero_grad()
    return stored(model)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed"])
@pytest.mark.parametrize("bucket_size", [1, 3000, None])
def test_overlap_changes_no_byte(recipe: str, bucket_size: int | None) -> None:
    """With exchanges that do nothing until they are waited for, on 1, 2 and 5 ranks, in buckets of
    one weight, of some, and of all.
    """
    (expected,) = run_in_process(1, lambda comm: trained(comm, recipe))
    for size in (1, 2, 5):
        for found in run_in_process(
            size,
            lambda comm: trained(
                ExchangesLate(comm), recipe, overlap_grad_reduce=True, bucket_size=bucket_size
            ),
        ):
            assert_same_tensors(found, expected, f"on {size} ranks")


@on_ranks("in_process", 3)
def test_a_bucket_is_sent_when_it_is_full(comm: Communicator) -> None:
    """The last layer's bucket leaves first, when backward comes to the layer before; a pass sends
    every bucket once, and the step only the notes.
    """
    spy, seen = RecordingCommunicator(comm), list[int]()
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(4)]
    optimizer = ZeroOptimizer(params, SGD, spy, lr=0.5, overlap_grad_reduce=True, bucket_size=64)
    spy.reset()
    x = torch.ones(64, requires_grad=True)
    for param in params:
        x = x * param
        x.register_hook(lambda grad: seen.append(spy.total(kind="all_to_all").calls))
    x.sum().backward()
    assert seen == [0, 0, 1, 2]
    assert spy.total(kind="all_to_all").calls == 4
    optimizer.step()
    assert spy.total(kind="all_to_all").calls == 5


@pytest.mark.parametrize("bucket_size", [1, 3000, None])
@pytest.mark.parametrize("passes", [(2, 1, 1), (1, 2, 2), (0, 1, 1)])
def test_ranks_that_make_other_numbers_of_passes_are_told_so(
    comm_kind: str, passes: tuple[int, ...], bucket_size: int | None
) -> None:
    """With its own, on every rank, and not in terms of collectives alone; no weight moves."""

    def attempt(everyone: Communicator) -> str:
        model, comm = Model("nvfp4"), split_ranks(everyone, 0)  # which is lost
        optimizer = optimizer_of(model, comm, overlap_grad_reduce=True, bucket_size=bucket_size)
        before = stored(model)

        def train() -> None:
            for seed in range(passes[comm.rank]):
                backward(model, seed)
            optimizer.step()

        said = message_of(RankMismatchError, train)
        assert_same_tensors(stored(model), before, "weights")
        return said

    for made, said in zip(passes, run_ranks(comm_kind, 3, attempt), strict=True):
        assert "equally many backward passes between two steps" in said
        seen = range(min(passes), made + 1)  # whole ones, when it hears of the others
        assert any(f"this rank {n} so far" in said for n in seen), said


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks("in_process", 3)
def test_gradients_that_no_backward_made_count_too(comm: Communicator, overlap: bool) -> None:
    """Assigned on one rank only, beside a backward pass or without one."""
    params = [torch.nn.Parameter(torch.zeros(70)) for _ in range(2)]
    optimizer = ZeroOptimizer(params, SGD, comm, lr=1.0, overlap_grad_reduce=overlap)
    for passes in (1, 0):
        for _ in range(passes):
            params[0].sum().backward()
        if comm.rank == 1:
            params[1].grad = torch.full((70,), 3.0)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(params[0], torch.full((70,), -1.0))
    assert torch.equal(params[1], torch.full((70,), -2.0))


@on_ranks("in_process", 2)
def test_a_backward_pass_that_fails_half_way_is_forgotten(comm: Communicator) -> None:
    """``zero_grad`` brings the ranks together again, and the next step has its own gradients
    only.
    """
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(3)]
    optimizer = ZeroOptimizer(params, SGD, comm, lr=1.0, overlap_grad_reduce=True, bucket_size=64)

    def fail(grad: torch.Tensor) -> None:
        raise OSError("no memory")

    x = params[0] * 5
    x.register_hook(fail)
    with pytest.raises(OSError):
        (x * params[1] * params[2]).sum().backward()
    optimizer.zero_grad()
    (params[0] + params[2]).sum().backward()
    optimizer.step()
    assert [p[0].item() for p in params] == [0.0, 1.0, 0.0]
    assert optimizer.clip_grad_norm_(1.0) == 0.0  # of no gradients


@on_ranks("in_process", 2)
def test_passes_inside_a_pass_are_summed_right(comm: Communicator) -> None:
    """Under reentrant checkpointing, where one weight is used in two segments."""
    from torch.utils.checkpoint import checkpoint

    params = [torch.nn.Parameter(torch.full((64,), 2.0)) for _ in range(2)]
    optimizer = ZeroOptimizer(params, SGD, comm, lr=0.125, overlap_grad_reduce=True)
    x = torch.ones(64, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: x * params[0], x, use_reentrant=True)
    (x * params[1]).sum().backward()
    optimizer.step()
    assert [p[0].item() for p in params] == [2 - 8 / 8, 2 - 4 / 8]


@on_ranks("in_process", 3)
def test_gradients_after_clipping_are_refused(comm: Communicator) -> None:
    """Another backward pass between clipping and the step, on every rank; ``zero_grad`` and the
    same again are a way on.
    """
    t = Training(comm, NVFP4, SGD, lr=1.0, overlap_grad_reduce=True)
    before = t.masters()
    for again in (True, False):
        run_backward(t.params, comm.rank, 0)
        t.optimizer.clip_grad_norm_(1.0)
        if again:
            run_backward(t.params, comm.rank, 1)
            with pytest.raises(InputError, match="gradients were added since; call optimizer.clip"):
                t.optimizer.step()
            assert_same_lists(t.masters(), before, "after the refusal")
            t.optimizer.zero_grad()
    t.optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_is_not_rounded_unasked(overlap: bool) -> None:
    """A BF16 weight with an FP32 gradient on one rank is refused on all, and goes with
    ``gradient_dtype=torch.float32``.
    """

    def step(comm: Communicator, dtype: torch.dtype | None) -> Any:
        param = torch.nn.Parameter(torch.zeros(70, dtype=torch.bfloat16))
        param.grad_dtype = None
        optimizer = ZeroOptimizer(
            [param], SGD, comm, lr=1.0, gradient_dtype=dtype, overlap_grad_reduce=overlap
        )
        grad = torch.full((70,), 1 + 2.0**-12)
        param.grad = grad if comm.rank else grad.bfloat16()
        if dtype is None:
            return message_of(InputError, optimizer.step)
        optimizer.step()
        return optimizer.gather_master(param)[0].item()

    message = one_message(run_in_process(2, lambda comm: step(comm, None)))
    assert "and its gradient is torch.float32; make the optimizer with" in message
    assert run_in_process(2, lambda comm: step(comm, torch.float32)) == [-1 - 2.0**-13] * 2


def test_a_new_optimizer_takes_the_gradients() -> None:
    """An earlier one of the same weights, still alive, frees none of them."""
    param = torch.nn.Parameter(torch.zeros(64))
    kept = [ZeroOptimizer([param], SGD, lr=1.0, overlap_grad_reduce=True) for _ in range(2)]
    param.sum().backward()
    kept[-1].step()
    assert torch.equal(param, -torch.ones(64))
    kept.append(ZeroOptimizer([param], SGD, lr=1.0))
    param.sum().backward()
    assert param.grad is not None
    kept[-1].step()
    assert torch.equal(param, torch.full((64,), -2.0))


@pytest.mark.parametrize(("world_size", "bucket_size"), [(2, 1 << 14), (4, 1 << 16)])
def test_gradient_memory_is_shards_two_buckets_and_a_layer(
    world_size: int, bucket_size: int
) -> None:
    """In the backward pass of 24 layers the gradients that exist whole, the sums and the buffers
    are at most 4 bytes an element of this rank's shards, two buckets, and the largest layer.
    """

    def measure(comm: Communicator) -> list[int]:
        layers = [
            torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 128),
                                torch.nn.GELU(), torch.nn.Linear(128, 64)) for _ in range(24)
        ]  # fmt: skip
        model = torch.nn.Sequential(*layers)
        zerocast.nn.convert(model, NVFP4)
        model.bfloat16()
        params, held, peak = list(model.parameters()), dict[int, int](), [0]

        def look(grad: torch.Tensor) -> None:
            whole = sum(each.nbytes for each in whole_gradients(params))
            peak[0] = max(peak[0], whole + grad.nbytes + sum(held.values()))

        for param in params:
            param.register_hook(look)  # before the optimizer's, which takes what came before
        optimizer = ZeroOptimizer(
            model.named_parameters(), group=comm, overlap_grad_reduce=True, bucket_size=bucket_size
        )
        reducer = optimizer._gradients
        tensors = [reducer.reduced, *(each.buffer for each in reducer._rounds)]
        held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for _ in range(2):
            model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
        layer = 2 * sum(p.numel() for p in layers[0].parameters())
        bucket = max(each.nbytes for each in reducer._rounds)
        return [peak[0], 4 * reducer.reduced.numel() + 2 * bucket + layer]

    for peak, limit in run_in_process(world_size, measure):
        assert peak <= limit, (peak, limit)
