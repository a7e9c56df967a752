"""Refit: the pieces of ranks make up the tensors of the checkpoint, each element once."""

import pytest
import torch

import zerocast
from tests.refit.planned import codes_each, cuts, expected, masters, plan
from tests.support.exports import plan_of_rows
from tests.support.live_memory import LiveMemory
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_bytes import assert_same_bytes
from tests.support.serving import LINEAR_ALONE
from zerocast.comm import RecordingCommunicator
from zerocast.export import DIALECTS, Export, exported_weights
from zerocast.export.shard_plan import ShardPlan
from zerocast.refit import Refit
from zerocast.tensors import TensorParallelShard


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, size) for i, name in enumerate(LINEAR_ALONE) for size in (1, (3, 7)[i % 2])],
)
def test_shards_make_up_every_tensor_once(name, world_size):
    """Codes and scales of drawn cuts, put where the pieces say: ``quantize`` of the whole."""
    dialect, values = DIALECTS[name], masters()

    def run(comm):
        source = plan(comm, values, cuts(world_size, world_size, codes_each(dialect)))
        refit = Refit(source, dialect, from_masters=True, dtype=torch.bfloat16, group=comm)
        return [
            (piece.name, piece.shape, piece.start, piece.values.clone()) for piece in refit.shards()
        ], dict(refit.named_tensors())

    kind = "in_process" if world_size > 1 else "single_rank"
    results = run_ranks(kind, world_size, run)
    for part, tensor in expected(dialect, values).items():
        found = torch.full((tensor.nbytes,), 0x5A, dtype=torch.uint8).view(tensor.dtype)
        times = torch.zeros(tensor.numel())
        for pieces, _ in results:
            for other, shape, start, piece in pieces:
                if other == part:
                    assert (shape, piece.dtype) == (tensor.shape, tensor.dtype)
                    found[start : start + len(piece)] = piece
                    times[start : start + len(piece)] += 1
        assert times.eq(1).all(), part
        assert_same_bytes(found.view(tensor.shape), tensor, part)
        for _, named in results:
            assert_same_bytes(named[part], tensor, part)
            assert list(named) == list(expected(dialect, values))


class Ordered(RecordingCommunicator):
    """Notes in which order collectives are begun, and gathers waited for."""

    def __init__(self, comm):
        super().__init__(comm)
        self.order = []

    def all_gather_(self, buffer, counts=None):
        self.order.append("message")
        super().all_gather_(buffer, counts)

    def all_reduce_max_(self, buffer):
        self.order.append("message")
        super().all_reduce_max_(buffer)

    def start_all_gather_(self, buffer, counts=None):
        self.order.append("begin")
        wait = super().start_all_gather_(buffer, counts)

        def end():
            self.order.append("end")
            wait()

        return end


class Noted(ShardPlan):
    """Notes when a bucket is measured and when its codes are written."""

    def measure(self):
        self._comms[0].order.append("measure")
        super().measure()

    def encode(self):
        self._comms[0].order.append("encode")
        super().encode()


@pytest.mark.parametrize(
    ("a_bucket", "since"),
    [
        (2, ["encode", "measure", "end", "message", "begin"]),
        (1, ["measure", "message", "encode", "begin", "end"]),
    ],
)
def test_a_stage_is_cast_while_one_is_gathered(monkeypatch, a_bucket, since):
    """And the one after it measured; no message waits behind a gather, because all that is
    exchanged for a stage comes before the gather of the one before it. The gather of the next is
    under way while one is used. But nothing is where there is no room for it: in buckets of a
    single weight.
    """
    monkeypatch.setattr(exported_weights, "ShardPlan", Noted)
    values = torch.randn(8, 64, 128)

    def run(comm):
        ordered, rows = Ordered(comm), slice(32 * comm.rank, 32 * comm.rank + 32)
        options = {"from_masters": True, "dtype": torch.bfloat16, "group": ordered}
        options["bucket_bytes"] = a_bucket * 64 * 64
        refit = Refit(plan_of_rows(ordered, values, rows), "modelopt/nvfp4", **options)
        used = []
        ordered.order.clear()
        for name, _ in refit.named_tensors():
            if name.endswith(".weight"):
                used.append(list(dict.fromkeys(ordered.order)))
                ordered.order.clear()
        return used

    for used in run_ranks("in_process", 2, run):
        assert len(used) == 8
        assert all(each == since for each in used[1:-2])


MEASURED = ["deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"]


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize(
    ("ranks", "a_bucket", "is_cut"),
    [(4, 2, True), (4, 1, True), (2, 1, True), (2, 1, False), (2, 8, False)],
)
def test_a_rank_holds_two_buckets_and_no_more(name, ranks, a_bucket, is_cut):
    """Of many weights, beside its shards: rows of each, or all that there is, in buckets of one,
    two or eight. Of shards, what it cast of two and the amaxes of one; of deltas, beside what was
    sent last. It does not depend on when which thread runs.
    """
    count, shape = 24 if ranks == 2 else 12, (512, 512)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, *shape, generator=generator)
    recipe = DIALECTS[name].recipe
    (plane,) = recipe.planes(shape, columnwise=False)
    codes = a_bucket * values[0].numel() * recipe.numerics.fmt.bits // 8

    def run(comm):
        start, end = (
            min(at * (512 // comm.size if is_cut else 512), 512)
            for at in (comm.rank, comm.rank + 1)
        )
        source = plan_of_rows(comm, values, slice(start, end))
        options = {"from_masters": True, "dtype": torch.bfloat16, "group": comm}
        refit = Refit(source, name, bucket_bytes=codes, **options)
        return _peaks(refit, refit.named_tensors, refit.shards, refit.deltas, changes(refit))

    amaxes = a_bucket * 4 * plane.grid.num_blocks / ranks
    owners = 6 * 8 * count * ranks  # numbers for each shard
    for rank, (size, whole, shards, full, deltas) in enumerate(run_ranks("in_process", ranks, run)):
        bucket, share = size * a_bucket / count, 1 / ranks if is_cut else rank == 0
        assert whole <= 2 * bucket
        assert full <= 2 * bucket + size * share + owners
        assert deltas <= 2 * bucket
        assert not share or shards <= 2 * bucket * share + amaxes + owners


@pytest.mark.parametrize("name", MEASURED)
def test_a_rank_holds_two_buckets_of_weights_that_it_has_a_part_of(name):
    """Rows or columns of 24 weights, in buckets of eight, each over two ranks that share their
    parts with two others; refits, and exports of whole buckets.
    """
    count, shape = 24, (512, 512)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, *shape, generator=generator)
    recipe = DIALECTS[name].recipe

    def run(comm):
        across, group = comm.split(comm.rank // 2), comm.split(2 + comm.rank % 2)
        parts = [TensorParallelShard.chunk(shape, i % 2, across) for i in range(count)]
        own = [each.slice_of(value).flatten() for each, value in zip(parts, values, strict=True)]
        size = len(own[0]) // 2
        source = zerocast.CastPlan(
            [
                zerocast.empty(
                    each.shape, recipe, dtype=torch.bfloat16, columnwise=False, tp_shard=each
                )
                for each in parts
            ],
            [value[size * group.rank :][:size] for value in own],
            [size * group.rank] * count,
            group,
            names=[f"{i}.weight" for i in range(count)],
        )
        options = {"from_masters": True, "dtype": torch.bfloat16, "group": comm}
        options["bucket_bytes"] = 8 * values[0].numel() * recipe.numerics.fmt.bits // 8
        refit = Refit(source, name, **options)
        buckets = Export(source, name, **options).buckets
        return _peaks(refit, refit.named_tensors, buckets, refit.deltas, changes(refit))

    for size, *peaks, full, deltas in run_ranks("in_process", 4, run):
        assert max(*peaks, deltas) <= 2 * size / 3
        assert full <= 2 * size / 3 + size / 4


def changes(refit):
    """Its deltas since the latest version, asked for when they are iterated over."""
    return lambda: refit.deltas(refit.version)


def _peaks(refit, *ways):
    """The bytes of the whole, and what a rank holds at most in each of ``ways``."""
    peaks = [sum(map(_nbytes, refit.named_tensors()))]
    for way in ways:
        with LiveMemory() as memory:
            for _ in way():
                del _
        peaks.append(memory.peak)
    return peaks


def _nbytes(named):
    """Of a tensor that is not held any longer than it takes to ask."""
    return named[1].nbytes


@on_ranks("in_process", 3)
def test_shards_that_cut_a_byte_are_refused(comm):
    """On every rank; whole tensors are served."""
    dialect = DIALECTS["modelopt/nvfp4"]
    values = masters()
    source = plan(comm, values, cuts(3, 1, step=1))
    refit = Refit(source, dialect, from_masters=True, dtype=torch.bfloat16, group=comm)
    with pytest.raises(zerocast.InputError, match="between stored numbers, 2 codes each"):
        list(refit.shards())
    for part, tensor in dict(refit.named_tensors()).items():
        assert_same_bytes(tensor, expected(dialect, values)[part], part)


@pytest.mark.parametrize(
    ("name", "most"),
    [("deepseek/fp8", 1.001), ("modelopt/mxfp8", 1.032), ("modelopt/nvfp4", 0.563)],
)
def test_what_a_refit_moves(name, most):
    """Codes and a scale a block, and no more than 0.05 % beside them: bytes an element that the
    ranks of a ring receive. Shards move nothing but that 0.05 %.
    """
    shape, world_size = (2048, 2048), 4

    def run(comm):
        recording = RecordingCommunicator(comm)
        start, rows = comm.rank * shape[0] // world_size, shape[0] // world_size
        source = zerocast.CastPlan(
            [zerocast.empty(shape, "block", dtype=torch.bfloat16)],
            [torch.full((rows, shape[1]), 0.5).bfloat16()], [start * shape[1]], recording,
            names=["a.weight"],
        )  # fmt: skip
        refit = Refit(source, name, from_masters=True, dtype=torch.bfloat16, group=recording)
        sent = []
        for tensors in (refit.named_tensors, refit.shards):
            recording.reset()
            for _ in tensors():
                pass
            kinds = ("all_gather", "all_reduce")
            sent.append(sum(recording.total(kind=kind).sent_bytes for kind in kinds))
        return sent

    for whole, shards in run_ranks("in_process", world_size, run):
        received = shape[0] * shape[1] * (world_size - 1) / world_size
        assert whole <= most * received
        assert shards <= 5e-4 * received
