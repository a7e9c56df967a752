"""Stages of a bucket: what of it is cast and gathered at once."""

import random

import pytest
import torch

from tests.support.exports import plan_of_rows
from zerocast.backends import backend_for
from zerocast.backends.cpu import CpuBackend
from zerocast.comm import run_in_process
from zerocast.export import DIALECTS, Export
from zerocast.export.entries import Entry
from zerocast.export.stages import in_buckets, in_stages


def drawn(seed: int) -> list[Entry]:
    """Entries of up to 200 bytes, of which some share a tensor amax, next to each other or not."""
    rng = random.Random(seed)
    return [
        Entry(
            str(i),
            torch.empty(rng.randrange(100), device="meta", dtype=torch.bfloat16),
            torch.bfloat16,
            DIALECTS["deepseek/fp8"],
            amax_group=rng.choice([None, None, "a", "b"]),
        )
        for i in range(rng.randrange(1, 20))
    ]


@pytest.mark.parametrize("keeps_bucket", [True, False])
@pytest.mark.parametrize("seed", range(50))
def test_stages_keep_the_order_and_what_shares_an_amax(seed, keeps_bucket):
    """And none could take what the next one begins with: that would be more than a bucket, or two
    with what is used.
    """
    for bucket in in_buckets(drawn(seed), 500):
        shares = dict.fromkeys((entry.name for entry in bucket), 0.0)
        stages = in_stages(bucket, 500, shares, keeps_bucket=keeps_bucket)
        stages = [stage.entries for stage in stages]
        assert [entry for stage in stages for entry in stage] == bucket
        groups = [{each.amax_group for each in stage} - {None} for stage in stages]
        assert sum(map(len, groups)) == len(set().union(*groups))
        room = max(500, sum(each.num_bytes for each in bucket))
        assert len(stages) == 1 or sum(e.num_bytes for e in stages[0]) <= room


@pytest.mark.parametrize(("share", "used", "streamed"), [(0.0, 1, 1), (0.25, 2, 2), (1.0, 4, 2)])
def test_stages_are_few_where_ranks_cast_little(share, used, streamed):
    """Of eight matrices of 128x128 blocks, whose amaxes and scales are few, a bucket; twice what a
    rank casts is on the way.
    """
    dialect = DIALECTS["deepseek/fp8"]
    meta = torch.empty(512, 512, device="meta", dtype=torch.bfloat16)
    bucket = [Entry(str(i), meta, torch.bfloat16, dialect, dialect.recipe) for i in range(8)]
    num_bytes, shares = int(8.1 * 512 * 512), {str(i): share for i in range(8)}
    for keeps_bucket, count in ((True, used), (False, streamed)):
        assert len(in_stages(bucket, num_bytes, shares, keeps_bucket=keeps_bucket)) == count


@pytest.mark.parametrize("dialect", ["deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"])
def test_scales_of_all_weights_of_a_stage_are_stored_by_one_launch(monkeypatch, dialect):
    """On each of two ranks, of five weights that both have rows of."""
    if not isinstance(backend_for(torch.device("cpu")), CpuBackend):
        pytest.skip("the native backend was not built")
    counts, expand = [], CpuBackend.expand_scales

    def counted(self, numerics, operands):
        counts.append(len(operands))
        return expand(self, numerics, operands)

    monkeypatch.setattr(CpuBackend, "expand_scales", counted)
    values = torch.randn(5, 256, 128)

    def run(comm):
        rows = slice(comm.rank * 100, comm.rank * 156 + 100)
        plan = plan_of_rows(comm, values, rows)
        counts.clear()
        comm.barrier()
        (tensors,) = Export(plan, dialect, from_masters=True, group=comm).stages()
        return len(tensors)

    assert run_in_process(2, run)[0] >= 10
    assert counts == [5, 5]
