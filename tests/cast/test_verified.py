"""verify="hash" and "full": what ranks hold after a gather is compared, planted faults are named,
and the file that is left repeats the cast.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, message_of, one_message
from tests.support.ranks import PROCESSES, on_ranks, run_ranks
from tests.support.recipes import RECIPES
from tests.support.values import draw_values
from tests.support.verified import Weights
from zerocast.backends.reference import ReferenceBackend
from zerocast.cast import CastPlan
from zerocast.cast.fault_file import read_fault, write_fault
from zerocast.cast.sharded_cast import ShardedCast
from zerocast.cast.verified import _MOST, _message, _vote
from zerocast.cast.whole_cast import Difference, HeldWeight
from zerocast.cli import main
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.errors import InputError, UnsupportedError, VerificationError


@pytest.mark.parametrize(("limit", "gathers"), [(3072, 3), (3073, 1)])
def test_large_weights_are_gathered_one_by_one(
    limit: int, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of so many elements or more, and the others together; all are right."""
    made = partial(ShardedCast, one_by_one_from=limit)
    monkeypatch.setattr("zerocast.cast.plan.ShardedCast", made)

    def on_rank(comm: Communicator) -> int:
        each = Weights(comm, verify="full")
        for _ in range(3):
            each.step()
        return len(each.plan._cast.gathers)

    assert run_ranks("in_process", 3, on_rank) == [gathers] * 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of faults are left."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fault_of(call: Callable[[], object]) -> str:
    """What the VerificationError says that the call raises; nothing where it raises none."""
    try:
        call()
    except VerificationError as error:
        return str(error)
    return ""


STACK = {"a.weight": (3, 32, 64), "b.weight": (3, 32, 64)}


@pytest.mark.parametrize("exchange", ["full", "boundary"])
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks("in_process", 3)
def test_right_weights_pass(comm: Communicator, recipe: str, exchange: str) -> None:
    """Every weight is judged once in as many steps: by all its buffers, and what its recipe
    remembers.
    """
    groups = [["a.*", "b.*"]] if recipe.startswith("nvfp4") else []
    weights = Weights(comm, RECIPES[recipe], exchange=exchange, verify="full", amax_groups=groups)
    for _ in range(4):
        weights.step()
    if recipe in ("mxfp8", "nvfp4"):
        stacks = Weights(
            comm, RECIPES[recipe], STACK, exchange=exchange, verify="full", amax_groups=groups
        )
        for _ in range(2):
            stacks.step()


@pytest.mark.parametrize("recipe", ["nvfp4", "current"])
@on_ranks("in_process", 2)
def test_a_group_is_cast_under_the_amax_of_any_member(comm: Communicator, recipe: str) -> None:
    """Of three, or two, whichever has the largest: the others' codes pass, too; so where it is one
    beside the group.
    """
    for largest, group in product(range(3), (["a.*", "b.*", "c.*"], ["a.*", "b.*"])):
        weights = Weights(comm, RECIPES[recipe], verify="full", amax_groups=[group])
        if weights.masters[largest] is not None:
            weights.masters[largest].mul_(64)
        for _ in range(3):
            weights.step()


@pytest.mark.parametrize(("dim", "at"), [(0, 3), (1, 0)])
def test_tensor_parallel_shards(dim: int, at: int, folder: Path) -> None:
    """They pass; a fault of one shard is told to the ranks of the others, in whatever step, and is
    repeated; ranks whose shards are at other steps are told so.
    """

    def on_rank(comm: Communicator) -> str:
        tp, dp = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        shards = [zerocast.TensorParallelShard.chunk(s, dim, tp) for s in ((64, 64), (96, 32))]
        masters = [draw_values("normal", s.shape.numel(), 7 * tp.rank + i)
                   for i, s in enumerate(shards)]  # fmt: skip
        weights = [zerocast.empty(s.shape, "nvfp4", tp_shard=s) for s in shards]
        half = [len(m) // 2 * dp.rank for m in masters]
        own = [m[h : h + len(m) // 2] for m, h in zip(masters, half, strict=True)]
        plan = CastPlan(weights, own, half, dp, names=["v", "w"], verify="full")
        for step in range(3):
            plan.cast()
            if step == 2:
                plan.step = at
                weights[1].quantized_storage.buffers["amax"] *= 1 + (comm.rank == 3)
                return message_of(VerificationError, plan.all_gather)
            plan.all_gather()
            steps = f"rank 0 at {plan.step}, rank 1 at {plan.step - 1}"
            plan.step -= tp.rank
            assert steps in message_of(VerificationError, plan.verify)
            plan.step += tp.rank
        return ""

    for _ in range(2):  # a file of another run or group keeps its bytes
        messages = run_ranks("in_process", 4, on_rank)
    file, _ = folder.iterdir()
    assert all("w (" in each and "rank 1 holds" in each for each in messages), messages
    assert read_fault(file)[0]["tensor parallel shard"][:2] == [[96, 32], dim]
    assert main(["reproduce", str(file)]) == 1


# --- planted faults ---


class OtherScales(ReferenceBackend):
    """Casts NVFP4 under a recipe with smaller scales."""

    def compute_scale(self, numerics: Any, operands: Any) -> Any:
        return super().compute_scale(replace(numerics, scale_max=256), operands)

    def partial_cast(self, numerics: Any, operands: Any, masters: Any) -> Any:
        return super().partial_cast(replace(numerics, scale_max=256), operands, masters)


def flipped_nibble(each: Weights, _: Any) -> None:
    """In memory."""
    if each.comm.rank == 1:
        each.buffers(1)["rowwise_data"].view(-1)[777] ^= 0x20


def flipped_derived(each: Weights, _: Any) -> None:
    """In a copy that the rank made for itself."""
    if each.comm.rank == 2:
        each.buffers(0)["columnwise_data"].view(-1)[5] ^= 0x02


def stale_scale(each: Weights, before: Sequence[dict[str, torch.Tensor]]) -> None:
    """That of the cast before."""
    if each.comm.rank == 2:
        each.buffers(0)["rowwise_scale_inv"].copy_(before[0]["rowwise_scale_inv"])


def one_step_behind(each: Weights, before: Sequence[dict[str, torch.Tensor]]) -> None:
    """A rank that holds what all held a step before."""
    if each.comm.rank == 0:
        for i, buffers in enumerate(before):
            for name, buffer in buffers.items():
                each.buffers(i)[name].copy_(buffer)


def master_moved_on(each: Weights, _: Any) -> None:
    """A rank that casts before its optimizer steps."""
    if each.comm.rank == 1:
        each.train()


# The fault; the mode that finds it; what the message says of it.
FAULTS: list[tuple[Callable[[Weights, Any], None], str, str, tuple[str, ...]]] = [
    (flipped_nibble, "full", "hash", ("b.weight (32, 96)", "rank 1 holds 0x", "[16, 19] of rowwise",
                                      "ranks 0, 2 hold the right bytes")),
    (flipped_derived, "full", "full", ("a.weight", "rank 2 holds", "[0, 10] of columnwise_data")),
    (stale_scale, "full", "hash", ("a.weight", "rank 2 holds 0x", "of rowwise_scale_inv", "stale")),
    (one_step_behind, "boundary", "hash", ("a.weight", "rank 0 holds", "the first of",
                                           "ranks 1, 2 hold the right",
                                           "also differ in b.weight, c.weight")),
    (master_moved_on, "boundary", "full", ("weight", "ranks 0, 1, 2 hold", "another master")),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
def test_planted_faults_are_named(
    fault: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On every rank alike, with weight, element, ranks and values; and a file repeats the cast."""
    plant, exchange, mode, texts = fault

    def on_rank(comm: Communicator) -> str:
        each = Weights(comm, exchange=exchange, verify=mode)
        each.step()
        for _ in range(6):  # "full" comes to every weight
            before = [{n: b.clone() for n, b in each.buffers(i).items()} for i in range(3)]
            each.train()
            each.plan.cast()
            each.gather()
            plant(each, before)
            if message := fault_of(each.plan.verify):
                return message
        return ""

    message = one_message(run_ranks("in_process", 3, on_rank))
    for text in texts:
        assert text in message, message
    file = next(folder.iterdir())
    assert str(file) in message
    assert main(["reproduce", str(file)]) == 1
    told = capsys.readouterr().out
    assert "held: " in told
    assert main(["reproduce", str(file), "--json"]) == 1
    held, *casts = json.loads(capsys.readouterr().out)["casts"].values()
    assert held["count"] >= 1
    assert casts == [None, None]
    assert "This machine casts the right bytes" in told


@pytest.mark.parametrize(("count", "more"), [(6, ""), (7, " and 1 more")])
def test_five_more_weights_are_named(
    count: int, more: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the first, where ranks differ in many; and why no file is left."""

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("zerocast.cast.verified.write_fault", full)
    each = Weights(
        zerocast.comm.SingleRank(), shapes={f"w{i}": (16, 32) for i in range(count)}, verify="hash"
    )
    verification = each.plan._verification
    each.plan.cast()
    each.buffers(0)["rowwise_data"].view(-1)[0] ^= 1
    others = [f"w{i}" for i in range(1, count)]
    told = verification._judge(each.comm, 0, 1, others)
    assert "rank 0 could not write" in str(told)
    assert "(no space left)" in str(told)
    assert str(told).endswith(f"Ranks also differ in w1, w2, w3, w4, w5{more}.")


@pytest.mark.parametrize(("recipe", "groups"), [("delayed", []), ("nvfp4", [["a.*", "b.*"]])])
def test_a_file_knows_what_the_cast_knew(
    recipe: str,
    groups: list[list[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the recipe remembered before it, and whether the amax is that of a group."""

    def on_rank(comm: Communicator) -> None:
        each = Weights(comm, recipe, verify="hash", amax_groups=groups)
        each.step()
        each.train()
        each.plan.cast()
        each.gather()
        each.buffers(0)["rowwise_data"].view(-1)[5] ^= comm.rank == 1
        with pytest.raises(VerificationError):
            each.plan.verify()

    run_ranks("in_process", 2, on_rank)
    (file,) = folder.iterdir()
    fault, tensors = read_fault(file)
    assert fault["grouped"] is bool(groups)
    assert ("before/amax_history" in tensors) is (recipe == "delayed")
    assert main(["reproduce", str(file)]) == 1
    assert "This machine casts the right bytes" in capsys.readouterr().out


class Astray(RecordingCommunicator):
    """Rank 1 receives another first byte of large buffers: of codes, and of masters."""

    def _changed(self, buffer: torch.Tensor) -> None:
        if self.rank == 1 and buffer.nbytes > 1000:
            buffer.view(torch.uint8)[0] ^= 0x10

    def all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> None:
        super().all_gather_(buffer, counts)
        self._changed(buffer)

    def start_all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> Callable[[], None]:
        wait = super().start_all_gather_(buffer, counts)

        def changed() -> None:
            wait()
            self._changed(buffer)

        return changed


@pytest.mark.parametrize("mode", ["hash", "full"])
def test_whoever_gathers_other_masters_judges_nobody(mode: str, folder: Path) -> None:
    """What carries codes wrongly carries the masters so by which they would be judged. All ranks
    say this, and blame no owner, and leave no file.
    """

    def on_rank(comm: Communicator) -> str:
        recording = Astray(comm)
        each = Weights(recording, verify=mode)
        return message_of(VerificationError, each.step)

    message = one_message(run_ranks("in_process", 3, on_rank))
    assert "rank 1 gathered other bytes of its master than the owners sent" in message
    assert "holds" not in message
    assert not list(folder.iterdir())


def test_the_likely_cause_of_a_difference() -> None:
    """Codes of others that a rank alone misses were not gathered; where a rank's own differ, too,
    it is stale; where all differ, no more is known of its owner. A single element is not called the
    first of many, and what each rank makes for itself is of no shard.
    """
    weight = HeldWeight("w", zerocast.empty((32, 32), "nvfp4").quantized_storage, [], None)
    others = Difference("rowwise_data", (0, 1), "0x1", "0x2", 1, owner=0)
    own = Difference("rowwise_data", (9, 1), "0x1", "0x2", 7, owner=2)
    missed = _message(weight, [(None, ""), (others, "file"), (None, "")])
    assert "were not gathered" in missed
    assert "the first of" not in missed
    stale = _message(weight, [(None, ""), (others, "file"), (own, "")])
    assert "it is stale there" in stale
    assert "shard of rank 2, the first of 7 elements" in stale
    everywhere = _message(weight, [(others, ""), (others, ""), (others, "")])
    assert "its owner holds other bytes as well: it cast under another recipe, " in everywhere
    assert "or cast wrongly" in everywhere
    scale = _message(weight, [(replace(own, count=2, owner=-1), "")])
    assert "the first of 2 elements" in scale
    assert "of the shard" not in scale


@pytest.mark.parametrize("exchange", ["full", "boundary"])
def test_another_recipe(exchange: str, folder: Path) -> None:
    """A hash finds it where every rank makes every scale. Where only a rank's own travel, all ranks
    hold them alike, and only a whole cast finds it.
    """

    def on_rank(comm: Communicator, mode: str) -> str:
        with zerocast.use_backend(OtherScales()) if comm.rank == 1 else nullcontext():
            each = Weights(comm, exchange=exchange, verify=mode)
        return fault_of(lambda: [each.step() for _ in range(3)])

    hashed, full = (
        one_message(run_ranks("in_process", 3, lambda comm, mode=mode: on_rank(comm, mode)))
        for mode in ("hash", "full")
    )
    assert bool(hashed) == (exchange == "full")
    for found in filter(None, (hashed, full)):
        assert "of rowwise_data, of the shard of rank 1" in found
        assert "under another recipe" in found


ON_PROCESSES = [pytest.param(kind, marks=pytest.mark.mpi) for kind in PROCESSES]


@pytest.mark.parametrize("kind", ["in_process", *ON_PROCESSES])
def test_a_missed_gather_and_another_step(kind: str, folder: Path) -> None:
    """Codes that nobody gathered; a rank that counts another step, which is told first."""

    def on_rank(comm: Communicator) -> list[str]:
        each, messages = Weights(comm, "block", verify="hash"), []
        each.step()
        each.train()
        each.plan.cast()
        each.plan.post_all_gather_processing()
        for turn in range(3):
            each.buffers()["rowwise_data"].view(-1)[0] ^= turn == 2 and comm.rank == 1
            messages += filter(None, [fault_of(each.plan.verify)])
            each.gather()
            each.plan.step -= comm.rank == 2
        return messages

    by_rank = run_ranks(kind, 3, on_rank)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    missed, *behind = by_rank[0]
    assert "a.weight (48, 64)" in missed
    assert "were not gathered" in missed
    for at, message in zip((1, 0), behind, strict=True):
        assert f"rank 0 at 2, rank 1 at 2, rank 2 at {at}" in message


# --- what it costs, and what it refuses ---


def test_a_hash_is_one_small_collective() -> None:
    """Of 8 bytes, for all weights."""

    @on_ranks("in_process", 2)
    def body(comm: Communicator) -> None:
        recording = RecordingCommunicator(comm)
        each = Weights(recording, verify="hash")
        each.step()
        recording.reset()
        each.plan.verify()
        ((_, kind),) = recording.traffic
        total = recording.total()
        assert (kind, total.calls, total.payload_bytes) == ("all_reduce", 1, 8)

    body()


def test_votes_tell_steps_and_digests_apart() -> None:
    """A thousand of them are all different; there are more than 2^30, and none stands for an error
    or for nothing.
    """
    assert 2**30 < _MOST < 2**31 - 1
    digests = torch.arange(25).view(25, 1)
    votes = {_vote(step, digest) for step in range(40) for digest in digests}
    assert len(votes) == 1000
    assert 1 <= min(votes) < max(votes) <= _MOST


@on_ranks("in_process", 2)
def test_a_plan_of_no_weights_has_nothing_to_compare(comm: Communicator) -> None:
    """And says nothing of it."""
    Weights(comm, shapes={}, verify="full").step()


@on_ranks("in_process", 2)
def test_what_keeps_a_rank_from_comparing_is_told(comm: Communicator) -> None:
    """To all, as what it is."""
    each = Weights(comm, verify="hash")
    each.step()
    if comm.rank == 1:
        each.plan._verification._digests.clear()
    assert "KeyError" in message_of(InputError, each.plan.verify)


def test_a_comparison_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the host."""
    each = Weights(zerocast.comm.SingleRank(), verify="hash")
    each.step()
    monkeypatch.setattr("zerocast.cast.verified.is_captured", lambda device: device.type == "cpu")
    with pytest.raises(UnsupportedError, match=r"on the host, got verify='hash'; capture forward"):
        each.plan.verify()


def test_a_damaged_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off, of another format, of another version, of no cast."""
    each = Weights(zerocast.comm.SingleRank(), verify="full")
    each.train()
    each.plan.cast()
    each.gather()
    for i in range(3):
        each.buffers(i)["rowwise_data"].view(-1)[0] ^= 1
    with pytest.raises(VerificationError, match="rank 0 holds"):
        each.plan.verify()
    (file,) = folder.iterdir()
    data = file.read_bytes()
    damaged = {
        b"": "is damaged or of another kind",
        data[:-1]: "is outside of the file",
        data[:100]: "is damaged or of another kind",
        data.replace(b"zerocast fault 1", b"zerocast fault 2"): "its format is 'zerocast fault 2'",
        data.replace(b'numerics version\\": ', b'numerics version\\": 9'): "install the version",
        data.replace(b"NVFP4BlockScaling", b"NVFP4BlockScalinG"): "cannot be repeated",
    }
    described, tensors = read_fault(file)
    file.unlink()
    write_fault(file, described, tensors | {"amaxes": tensors["amaxes"].repeat(2)})
    damaged[file.read_bytes()] = "its amaxes must be torch.int32"
    for content, text in damaged.items():
        file.write_bytes(content)
        assert main(["reproduce", str(file)]) == 2
        assert text in capsys.readouterr().err
    assert main(["reproduce", str(folder / "none")]) == 2


def test_a_master_that_has_lost_its_memory_is_refused(folder: Path) -> None:
    """Between the cast and the comparison, which reads it: on every rank, by the weight's name, and
    nothing is said to be wrong.
    """

    def on_rank(comm: Communicator) -> str:
        each = Weights(comm, verify="full")
        each.plan.cast()
        for master in each.masters if comm.rank == 1 else ():
            master.untyped_storage().resize_(0)
        return message_of(InputError, each.plan.all_gather)

    for message in run_in_process(2, on_rank):
        assert "must not change between the cast" in message
        assert "storage was freed" in message
    assert not list(folder.iterdir())


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Every dtype; a scalar, a tensor of nothing and one that lies behind it."""
    tensors = {
        "master": torch.tensor([[1.5, -0.0], [torch.inf, torch.nan]]),
        "amaxes": torch.arange(3, dtype=torch.int32),
        "before/draws": torch.tensor(2**62 + 1),
        "held/nothing": torch.empty(0, 4, dtype=torch.uint8),
        "held/rowwise_data": torch.arange(256, dtype=torch.uint8).view(4, 64).t(),
    }
    fault = {"name": "layer.0", "step": 3, "ranks": [0, 1]}
    write_fault(tmp_path / "fault", fault, tensors)
    read, found = read_fault(tmp_path / "fault")
    assert read == fault
    assert_same_tensors(found, tensors, "read")
