"""A cast or an all-gather that fails leaves weights that nobody can read by mistake."""

import copy
import time

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from zerocast.comm import run_in_process
from zerocast.errors import InputError, PeerFailedError, UnfinishedStepError
from zerocast.optim import ZeroOptimizer

READS = {
    "dequantize": lambda weight: weight.dequantize(),
    "copy": copy.deepcopy,
    "columnwise": lambda weight: weight.columnwise_data,
    "post": lambda weight: zerocast.post_all_gather_processing([weight]),
}


def planned(comm, exchange="full"):
    """A plan of one NVFP4 weight [16, 32] of which rank r owns an equal part, and that weight."""
    weight = zerocast.empty((16, 32), "nvfp4")
    values = torch.randn(512, generator=torch.Generator().manual_seed(3))
    part = 512 // comm.size
    master = values[comm.rank * part : (comm.rank + 1) * part].clone()
    plan = zerocast.CastPlan([weight], [master], [comm.rank * part], comm, exchange=exchange)
    return plan, weight, values.view(16, 32)


def failing(step):
    """``step``, and then an exception that is none of ours."""

    def fail():
        step()
        raise OSError("planted")

    return fail


@pytest.mark.parametrize("exchange", ["full", "boundary"])
@pytest.mark.parametrize("where", ["compute_scale", "partial_cast", "gather"])
def test_what_fails_in_the_middle_is_refused_to_readers(where, exchange, monkeypatch):
    """Whatever reads the weight raises, and says why; a cast and a gather make it whole again."""
    plan, weight, values = planned(zerocast.comm.SingleRank(), exchange)
    plan.cast()
    plan.all_gather()
    before = weight.dequantize()
    with monkeypatch.context() as patch:
        if where == "gather":
            start = plan._prepared.start_scales
            patch.setattr(plan._prepared, "start_scales", failing(start))
            plan.cast()
        else:
            step = failing(dict(plan.pipeline)[where])
            patch.setattr(plan, "pipeline", plan.pipeline.having(**{where: step}))
        with pytest.raises(OSError, match="planted"):
            plan.all_gather() if where == "gather" else plan.cast()
    if where == "partial_cast":  # its work was done when the caller's own code failed
        plan.all_gather()
    else:
        for read in READS.values():
            said = message_of(UnfinishedStepError, read, weight)
            assert said.startswith("this weight holds parts of two casts, because its ")
            assert ("all-gather" if where == "gather" else "cast") in said
    plan.cast()
    plan.all_gather()
    assert torch.equal(weight.dequantize(), before)
    whole = zerocast.quantize(values, "nvfp4", dtype=weight.dtype)
    assert torch.equal(weight.columnwise_data, whole.columnwise_data)


def test_another_write_makes_it_whole():
    """What copies into the weight, or another plan's cast, has written all of it."""
    plan, weight, values = planned(zerocast.comm.SingleRank())
    plan._version.tick()
    assert message_of(UnfinishedStepError, weight.dequantize)
    weight.copy_(values)
    expected = weight.dequantize()
    plan._version.tick()
    del plan  # what it left unfinished stays so
    assert message_of(UnfinishedStepError, weight.dequantize)
    other = zerocast.CastPlan([weight], [values], [0], zerocast.comm.SingleRank())
    other.cast()
    other.all_gather()
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("phase", ["store_plain", "all_gather"])
def test_a_step_that_fails_leaves_no_weight_that_can_be_read(phase, overlap):
    """One of three ranks raises in a phase after the cast: the others are told what and which, and
    none can read its weights, or step.
    """

    def body(comm):
        weight = zerocast.quantize(torch.randn(48, 32), "current")
        param = torch.nn.Parameter(weight)
        optimizer = ZeroOptimizer(
            [("w", param)], torch.optim.SGD, comm, lr=0.1, overlap_all_gather=overlap
        )
        param.grad = torch.ones_like(param.dequantize())

        class Phase:
            def __init__(self, name):
                if name == phase and comm.rank == 1:
                    raise OSError("planted")

            def __enter__(self):
                pass

            def __exit__(self, *_):
                pass

        optimizer.on_phase = Phase
        error = None
        try:
            optimizer.step()
        except Exception as e:
            error = e
        told = message_of(UnfinishedStepError, param.dequantize)
        assert "all-gather has started and not completed" in told
        assert message_of(UnfinishedStepError, optimizer.state_dict)
        if comm.rank == 1:
            raise error
        assert type(error) is PeerFailedError
        assert "rank 1 raised OSError: planted" in str(error)

    with pytest.raises(OSError, match="planted"):
        run_in_process(3, body, timeout=20)


@pytest.mark.parametrize("begun", range(3))
def test_late_gathers_that_are_interrupted_leave_no_weight_that_can_be_read(begun):
    """One of two ranks is interrupted when it begins to gather a bucket of codes that uses of the
    weights wait for, with ``begun`` others under way: it can read no weight, and the other rank
    none that comes from there on.
    """

    def body(comm):
        params = [
            torch.nn.Parameter(zerocast.quantize(torch.randn(48, 32), "current")) for _ in range(3)
        ]
        optimizer = ZeroOptimizer(
            params, torch.optim.SGD, comm, lr=0.1, overlap_all_gather=True, bucket_size=1
        )
        gathers, starts = comm.start_all_gather_, []

        def start(*given):
            is_last = len(starts) == begun
            starts.append(given)
            if is_last and comm.rank == 1:
                raise KeyboardInterrupt
            return gathers(*given)

        comm.start_all_gather_ = start  # which scales are not gathered by
        for param in params:
            param.grad = torch.ones(param.shape)
        is_other = comm.rank == 0
        with pytest.raises(PeerFailedError if is_other else KeyboardInterrupt):
            optimizer.step()
        for param in params[begun * is_other :]:
            with pytest.raises(PeerFailedError if is_other else UnfinishedStepError):
                param.dequantize()

    run_in_process(2, body, timeout=20)


@pytest.mark.parametrize("where", ["all-gather", "store", "copies"])
def test_what_only_one_rank_can_know_ends_the_others(where, monkeypatch):
    """Codes that one rank does not have, or that it cannot store or transpose: it raises what is
    wrong there, and the others that it did, long before the timeout.
    """

    def on_rank(comm):
        weights = [zerocast.empty((16, 32), "nvfp4") for _ in range(2)]
        masters = [torch.ones(256) for _ in weights]
        plan = zerocast.CastPlan(weights, masters, [256 * comm.rank] * 2, comm)
        plan.cast()
        gather, prepared = plan._cast.gathers[0], plan._prepared
        if comm.rank == 0:
            with pytest.raises(PeerFailedError) as caught:  # there, or in what comes next
                gather_and_meet(plan, comm)
            return str(caught.value)
        if where == "all-gather":
            gather._codes[0], gather._addresses = None, []
            monkeypatch.setattr(gather, "look", lambda: None)
        elif where == "store":
            monkeypatch.setattr(gather, "_received", refuse)
        else:
            monkeypatch.setattr(prepared, "follow_moves", refuse)
        with pytest.raises(InputError) as caught:
            plan.all_gather()
        return str(caught.value)

    def gather_and_meet(plan, comm):
        plan.all_gather()
        comm.barrier()

    def refuse():
        raise InputError("planted")

    begin = time.monotonic()
    waiting, said = run_in_process(2, on_rank, timeout=300)
    assert time.monotonic() - begin < 200
    assert ("must hold rowwise_data" if where == "all-gather" else "planted") in said
    assert "rank 1 raised InputError" in waiting


@pytest.mark.parametrize("lacking", [[0, 1], [1]], ids=["all", "one"])
def test_weights_without_codes_are_refused_together(lacking):
    """Codes that every rank casts into buffers of its own, for two weights of which one cannot
    receive the others': all ranks raise it, also those that could, and go on.
    """

    def on_rank(comm):
        own, masters = torch.zeros(2, 128, dtype=torch.uint8), torch.ones(2, 256)
        weights = [zerocast.empty((16, 32), "nvfp4") for _ in range(2)]
        if comm.rank in lacking:
            del weights[1].quantized_storage.buffers["rowwise_data"]
        given = weights, list(masters), [256 * comm.rank] * 2, comm
        plan = zerocast.CastPlan(*given, fsdp_shard_model_weights=list(own))
        for _ in range(2):
            plan.cast()
            said = message_of(InputError, plan.all_gather)
            assert "must hold rowwise_data to receive the gathered codes" in said
            assert ("on every rank" if lacking == [0, 1] else "on rank 1") in said
        assert own.any()

    run_in_process(2, on_rank, timeout=20)
