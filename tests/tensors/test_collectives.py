"""What torch.distributed's collectives do with quantized weights: each in each role, on gloo."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import EVERY_RECIPE, NVFP4
from zerocast.errors import RankMismatchError, UnsupportedError
from zerocast.recipes import NVFP4BlockScaling, Recipe
from zerocast.tensors import QuantizedTensor, quantize

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]

RANKS = 2
on_two_ranks = on_ranks("torch_distributed", RANKS)


def weight(seed: int, recipe: Recipe = NVFP4) -> QuantizedTensor:
    """A weight [32, 64] whose codes, scales and state depend on ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    made = quantize(torch.randn(32, 64, generator=generator).bfloat16(), recipe, name=f"w{seed}")
    made.copy_(torch.randn(32, 64, generator=generator) * (seed + 1))
    return made


def check(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    """All buffers are the same, derived copies among them."""
    assert_same_storage(actual, expected, f"of {expected.recipe}")


def wait(work: dist.Work | None) -> None:
    """Until a collective is done; torch gives None where it is."""
    if work is not None:
        work.wait()


# --- those that move weights ---


@on_two_ranks
def test_broadcast_moves_all_bytes(comm):
    """After a broadcast every rank has rank 0's codes, scales, state and derived copies."""
    for recipe, async_op in product(EVERY_RECIPE.values(), (False, True)):
        mine = torch.nn.Parameter(weight(comm.rank, recipe))
        version = mine.quantized_storage.version
        wait(dist.broadcast(mine.data, 0, async_op=async_op))
        check(mine, weight(0, recipe))
        assert (mine.quantized_storage.version != version) == (comm.rank != 0)


@on_two_ranks
def test_an_unawaited_weight_waits_when_it_is_read(comm):
    """Who reads a weight before waiting for the broadcast sees what was sent."""
    mine = weight(comm.rank)
    work = dist.broadcast(mine, 0, async_op=True)
    check(mine, weight(0))
    work.wait()
    assert work.is_completed()
    mine = weight(comm.rank)
    future = dist.broadcast(mine, 1, async_op=True).get_future()
    assert future.wait()[0] is mine
    check(mine, weight(1))


@on_two_ranks
def test_send_and_recv_move_all_bytes(comm):
    """Point to point, blocking or not, from a named rank or any, one by one or in a batch."""
    for recipe in EVERY_RECIPE.values():
        other = 1 - comm.rank
        mine, theirs = weight(comm.rank, recipe), weight(2, recipe)
        if comm.rank:
            dist.send(mine, 0)
            dist.recv(theirs)
        else:
            assert dist.recv(theirs, 1) == 1
            dist.send(mine, 1)
        check(theirs, weight(other, recipe))
        theirs = weight(2, recipe)
        works = [dist.irecv(theirs, other), dist.isend(mine, other)]
        for work in works:
            wait(work)
        check(theirs, weight(other, recipe))
        theirs = weight(2, recipe)
        ops = [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, mine, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        check(theirs, weight(other, recipe))
        check(mine, weight(comm.rank, recipe))


@on_two_ranks
def test_lists_of_weights_move_all_bytes(comm):
    """all_gather, all_to_all, gather and scatter between lists of weights and a weight."""
    for recipe in EVERY_RECIPE.values():
        mine = weight(comm.rank, recipe)
        everyone = [weight(7, recipe) for _ in range(RANKS)]
        wait(dist.all_gather(everyone, mine, async_op=True))
        for rank, each in enumerate(everyone):
            check(each, weight(rank, recipe))

        received = [weight(7, recipe) for _ in range(RANKS)]
        dist.all_to_all(received, [weight(10 * comm.rank + r, recipe) for r in range(RANKS)])
        for rank, each in enumerate(received):
            check(each, weight(10 * rank + comm.rank, recipe))

        gathered = [weight(7, recipe) for _ in range(RANKS)]
        dist.gather(mine, gathered if comm.rank == 1 else None, dst=1)
        for rank, each in enumerate(gathered):
            check(each, weight(rank if comm.rank == 1 else 7, recipe))

        into = weight(7, recipe)
        dist.scatter(into, [weight(3 + r, recipe) for r in range(RANKS)] if comm.rank else None, 1)
        check(into, weight(3 + comm.rank, recipe))


@on_two_ranks
def test_objects_are_pickled_whole(comm):
    """Object collectives give weights of the same bytes."""
    objects = [weight(4) if comm.rank == 0 else None]
    dist.broadcast_object_list(objects, 0)
    check(objects[0], weight(4))
    everyone: list[object] = [None] * RANKS
    dist.all_gather_object(everyone, weight(comm.rank))
    for rank, each in enumerate(everyone):
        check(each, weight(rank))


@on_two_ranks
def test_equal_bytes_write_nothing(comm):
    """A broadcast of what every rank has leaves version and initial value."""
    mine = weight(0)
    initial = torch.randn(32, 64)
    mine.quantized_storage.high_precision_init_val = initial
    version = mine.quantized_storage.version
    dist.broadcast(mine, 0)
    assert mine.quantized_storage.version == version
    assert mine.get_high_precision_init_val() is initial


@on_two_ranks
def test_a_weight_of_another_kind_is_refused(comm):
    """Bytes that mean something else, a value among them, are not taken for the weight's."""
    mine = weight(1, NVFP4BlockScaling(seed=comm.rank))
    if comm.rank == 0:
        dist.broadcast(mine, 0)
        dist.send(torch.ones(32, 64, dtype=torch.bfloat16), 1)
    else:
        version = mine.quantized_storage.version
        with pytest.raises(RankMismatchError, match="of the same shape, recipe and buffers"):
            dist.broadcast(mine, 0)
        with pytest.raises(RankMismatchError, match="give the same kind of weight"):
            dist.recv(mine, 0)
        assert mine.quantized_storage.version == version
        check(mine, weight(1, NVFP4BlockScaling(seed=1)))


@on_two_ranks
def test_wrapping_by_ddp_leaves_weights_as_they_are(comm):
    """It copies rank 0's values over every rank's; where they are equal, codes, state, version and
    initial value stay.
    """
    for recipe in EVERY_RECIPE.values():
        layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(weight(0, recipe))
        storage, initial = layer.weight.quantized_storage, torch.randn(32, 64)
        storage.high_precision_init_val, version = initial, storage.version
        wrapped = torch.nn.parallel.DistributedDataParallel(layer)
        check(wrapped.module.weight, weight(0, recipe))
        assert storage.version == version
        assert wrapped.module.weight.get_high_precision_init_val() is initial
        wrapped(torch.randn(3, 64).bfloat16()).sum().backward()
        check(wrapped.module.weight, weight(0, recipe))


# --- those that read a weight's value ---


@on_two_ranks
def test_plain_outputs_receive_values(comm):
    """Where what is written is plain, the value of a weight, or of a view of it, is read."""
    mine = weight(comm.rank)
    values = [weight(r).dequantize() for r in range(RANKS)]

    def plain(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    for source in (mine, mine.view(2048).view(32, 64)):
        everyone = [plain(32, 64) for _ in range(RANKS)]
        dist.all_gather(everyone, source)
        assert_same_bytes(torch.stack(everyone), torch.stack(values), "all_gather")
        whole = plain(RANKS * 32, 64)
        dist.all_gather_into_tensor(whole, source)
        assert_same_bytes(whole, torch.cat(values), "all_gather_into_tensor")
        everyone = [plain(32, 64) for _ in range(RANKS)]
        dist.gather(source, everyone if comm.rank == 0 else None, dst=0)
        if comm.rank == 0:
            assert_same_bytes(torch.stack(everyone), torch.stack(values), "gather")
        rows = plain(32, 64)
        dist.all_to_all_single(rows, source)
        expected = torch.cat([value.chunk(RANKS)[comm.rank] for value in values])
        assert_same_bytes(rows, expected, "all_to_all_single")
        half = plain(16, 64)
        dist.reduce_scatter_tensor(half, source)
        expected = (values[0] + values[1]).chunk(RANKS)[comm.rank]
        assert_same_bytes(half, expected, "reduce_scatter_tensor")
    assert_same_bytes(
        torch.distributed._functional_collectives.broadcast(mine, 1, dist.group.WORLD).wait(),
        values[1],
        "functional broadcast",
    )
    check(mine, weight(comm.rank))


# --- those that would write otherwise ---

COMPUTING = (
    lambda w, plain: dist.all_reduce(w),
    lambda w, plain: dist.all_reduce_coalesced([w]),
    lambda w, plain: dist.reduce(w, 0),
    lambda w, plain: dist.reduce_scatter(w, [plain] * RANKS),
    lambda w, plain: dist.reduce_scatter_tensor(w, plain.repeat(RANKS, 1)),
    lambda w, plain: dist.all_gather_into_tensor(w, plain[:16]),
    lambda w, plain: dist.all_to_all_single(w, plain),
)


@on_two_ranks
def test_computing_collectives_are_refused(comm):
    """One that computes or puts pieces together in a weight says so, and writes nothing."""
    mine = weight(comm.rank)
    plain = torch.ones(32, 64, dtype=torch.bfloat16)
    several = mine, torch.nn.Parameter(mine).data, mine[:], mine.view(64, 32).view(32, 64)
    for collective, given in product(COMPUTING, several):
        with pytest.raises(UnsupportedError, match="Reduce gradients or FP32 masters"):
            collective(given, plain)
    check(mine, weight(comm.rank))


@on_two_ranks
def test_views_of_values_are_not_received_into(comm):
    """A broadcast or receive into ``weight.data.view(torch.uint8)`` names the weight to give."""
    mine = weight(comm.rank)
    for view in (mine.data.view(torch.uint8), mine.view(-1), mine.t(), mine[3]):
        with pytest.raises(UnsupportedError, match="Give it the weight itself"):
            dist.broadcast(view, 0)
        with pytest.raises(UnsupportedError, match="Give it the weight itself"):
            dist.recv(view, 1 - comm.rank)
    other = torch.ones(32, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="give quantized weights on both sides"):
        dist.all_gather([mine, other], mine)
    check(mine, weight(comm.rank))
