"""Deltas: what is held after them is the full cast, and nothing but the right one is applied."""

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import needs_emulation
from tests.refit.planned import change, codes_each, cuts, expected, masters, plan
from tests.support.compiled import COMPILED
from tests.support.instruction_sets import ISAS
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_bytes import assert_same_bytes
from tests.support.serving import LINEAR_ALONE
from zerocast.backends.reference.digest_formula import as_integers, digest_of
from zerocast.errors import DeltaError
from zerocast.export import DIALECTS
from zerocast.export.shard_plan import hold
from zerocast.numerics import Comparison
from zerocast.refit import Receiver, Refit
from zerocast.refit.delta import changed_segments, packed, unpacked, whole_segment
from zerocast.tensors.digest import digest

BLOCKS = DIALECTS["deepseek/fp8"]


def fed(dialect, comm, *, rounds=3, seed=0, **options):
    """The tensors of a receiver after each of some rounds of changes, and the masters then; of a
    partition that was drawn by ``seed``.
    """
    values = masters()
    source = plan(comm, values, cuts(comm.size, seed, codes_each(dialect)))
    refit = Refit(
        source, dialect, from_masters=True, dtype=torch.bfloat16, bucket_bytes=9000, group=comm,
        **options,
    )  # fmt: skip
    receiver, found, sizes = Receiver(), [], []
    for step in range(rounds):
        if step:
            change(values, step)
        deltas = dict(refit.deltas(receiver.version))
        for name, delta in deltas.items():
            receiver.apply_delta(name, delta)
        assert receiver.version == refit.version == step + 1
        receiver.check()
        found.append({name: tensor.clone() for name, tensor in receiver.tensors.items()})
        sizes.append(sum(delta.nbytes for delta in deltas.values()))
    return found, values, sizes


@pytest.mark.parametrize("name", LINEAR_ALONE)
def test_deltas_give_every_byte_of_a_full_cast(name):
    """From 3 ranks, of one dialect also 5, whose shards begin and end anywhere, or are empty."""
    dialect = DIALECTS[name]
    for world_size in (3, 5) if name == "modelopt/nvfp4" else (3,):
        results = run_ranks(
            "in_process", world_size, lambda comm, n=world_size: fed(dialect, comm, seed=n)
        )
        for found, values, sizes in results:
            for part, tensor in expected(dialect, values).items():
                assert_same_bytes(found[-1][part], tensor, f"{world_size} ranks, {part}")
            assert found[-1].keys() == expected(dialect, values).keys()
            assert sizes[1] < sizes[0] / 2


@pytest.mark.nightly
@pytest.mark.parametrize("hold_tensor_amax", [False, True])
@pytest.mark.parametrize("name", ["deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"])
@on_ranks("in_process", 2)
def test_a_thousand_deltas_give_every_byte_of_a_full_cast(comm, name, hold_tensor_amax):
    """One after the other from two ranks: after each, what is held is what is sent whole, and
    without a held amax ``quantize`` of the masters.
    """
    dialect = DIALECTS[name]
    values, receiver = masters(), Receiver()
    options = {"from_masters": True, "dtype": torch.bfloat16, "group": comm}
    source = plan(comm, values, cuts(comm.size, 6))
    refit = Refit(source, dialect, hold_tensor_amax=hold_tensor_amax, **options)
    for step in range(1000):
        for part, delta in refit.deltas(receiver.version):
            receiver.apply_delta(part, delta)
        whole = dict(refit.named_tensors())
        assert receiver.tensors.keys() == whole.keys()
        for part, tensor in whole.items():
            assert_same_bytes(receiver.tensors[part], tensor, f"{part}, step {step}")
        for part, tensor in ({} if hold_tensor_amax else expected(dialect, values)).items():
            assert_same_bytes(receiver.tensors[part], tensor, f"{part}, step {step}")
        change(values, step)


def sent_by(backend, dialect, comm):
    """Every delta of three versions, cast by ``backend``."""
    values = masters()
    with zerocast.use_backend(backend):
        source = plan(comm, values, cuts(comm.size, 4))
        options = {"from_masters": True, "dtype": torch.bfloat16, "group": comm}
        refit, found = Refit(source, dialect, **options), []
        for step in range(3):
            found += refit.deltas(refit.version if step else None)
            change(values, step, 0.001 if step else 0.2)
        return found


@pytest.mark.parametrize("name", [*ISAS, pytest.param("forward", marks=needs_emulation)])
@pytest.mark.parametrize(
    "dialect", ["compressed-tensors/fp8-tensor", "deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"]
)
def test_every_backend_sends_the_same_deltas(name, dialect):
    """Those of the reference, byte by byte."""

    def run(comm, backend):
        return sent_by(backend, dialect, comm)

    expected = run_ranks("in_process", 3, lambda comm: run(comm, "reference"))
    for rank, found in enumerate(run_ranks("in_process", 3, lambda c: run(c, COMPILED[name]))):
        assert [part for part, _ in found] == [part for part, _ in expected[rank]]
        for (part, delta), (_, other) in zip(found, expected[rank], strict=True):
            assert_same_bytes(delta, other, f"rank {rank}, {part}")


def quantized_under(value: torch.Tensor, amax: float, dialect) -> dict[str, torch.Tensor]:
    """The codes and scales of ``value`` beside a row whose amax is the tensor's."""
    row = torch.zeros(1, value.shape[1])
    row[0, 0] = amax
    weight = zerocast.quantize(torch.cat([value, row]), dialect.recipe, dtype=torch.bfloat16)
    stored = dialect.encode(weight.quantized_storage)
    rows = value.shape[0]
    return {part: t[:rows] if t.dim() == 2 else t for part, t in stored.items()}


def test_a_tensor_amax_is_held_until_it_must_change():
    """It is a power of two that is not below the weight's own; an ulp more of that changes no byte,
    and more than it, or half of the weight's own when it was taken, takes a new one.
    """
    dialect = DIALECTS["compressed-tensors/nvfp4"]
    value = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    value[0, 0] = 3.0
    weight = zerocast.empty(value.shape, "block", dtype=torch.bfloat16)
    source = zerocast.CastPlan([weight], [value], [0], names=["a.weight"])
    refit = Refit(source, dialect, from_masters=True, dtype=torch.bfloat16, hold_tensor_amax=True)
    receiver = Receiver()

    def check(amax: float) -> int:
        deltas = dict(refit.deltas(receiver.version))
        for name, delta in deltas.items():
            receiver.apply_delta(name, delta)
        for part, tensor in quantized_under(value, amax, dialect).items():
            assert_same_bytes(receiver.tensors[f"a.{part}"], tensor, part)
        return sum(unpacked(name, delta).values.numel() for name, delta in deltas.items())

    check(4.0)
    value[0, 0] = 3.015625  # the next value of BF16
    assert check(4.0) <= 9  # the codes and the scale of one block
    value.clamp_(-1.5078125, 1.5078125)
    check(4.0)
    value.clamp_(-1.5, 1.5)
    check(2.0)
    value.clamp_(-0.75, 0.75)
    check(1.0)
    value[0, 0] = 1.5
    check(2.0)
    value.zero_()
    check(0.0)


LAST_BITS = 2.0**-149
"""The least number of FP32, a multiple of which every other is."""


@pytest.mark.parametrize(
    ("own", "held", "kept_at", "anew_at"),
    [
        (1, 1, 1, 2),
        (3, 4, 2, 1),
        (5, 8, 3, 2),
        (2**21, 2**21, 2**20 + 1, 2**20),  # 2**-128
        (2**22 + 1, 2**23, 2**21 + 1, 2**21),
        (2**23 + 2, 2**24, 2**22 + 2, 2**22 + 1),  # half of it is below 2**-126
        (3 * 2**24, 2**26, 2**25, 3 * 2**23),
        (2**149, 2**149, 2**148 + 2**125, 2**148),
    ],
)
def test_the_least_amaxes_are_held_as_all_others(own, held, kept_at, anew_at):
    """Under the smallest power of two that is not less, below 2**-126, too; anew at half of what it
    was, which may be subnormal. In multiples of 2**-149.
    """

    def bits(multiple: int) -> torch.Tensor:
        return torch.tensor([multiple * LAST_BITS], dtype=torch.float32).view(torch.int32)

    taken = hold(bits(own), None)
    assert taken.view(torch.float32).tolist() == [held * LAST_BITS, own * LAST_BITS]
    assert torch.equal(hold(bits(kept_at), taken), taken)
    assert torch.equal(hold(bits(anew_at), taken), hold(bits(anew_at), None))


def test_an_amax_that_no_power_of_two_bounds_is_taken_as_it_is():
    """Above 2**127, and where it is not finite; a finite one that follows is taken anew."""
    for value in (3e38, float("inf"), float("nan")):
        amax = torch.tensor([value], dtype=torch.float32).view(torch.int32)
        taken = hold(amax, None)
        assert torch.equal(taken, amax.expand(2))
        if value > 3.1e38 or value != value:
            after = torch.tensor([2.0**127 * 1.5]).view(torch.int32)
            assert torch.equal(hold(after, taken), hold(after, None))


@pytest.fixture
def sent():
    """A refit, a receiver of its first version, and three deltas that follow."""
    values = masters()
    comm = zerocast.comm.SingleRank()
    source = plan(comm, values, cuts(1, 0))
    refit = Refit(source, BLOCKS, from_masters=True, dtype=torch.bfloat16, group=comm)
    receiver = Receiver()
    for name, delta in refit.deltas():
        receiver.apply_delta(name, delta)
    deltas = []
    for step in range(3):
        change(values, step)
        deltas.append(dict(refit.deltas(refit.version)))
    return refit, receiver, deltas, values


def snapshot(receiver):
    """Copies of what it holds."""
    return {name: tensor.clone() for name, tensor in receiver.tensors.items()}


@pytest.mark.parametrize("case", ["lost", "repeated", "other", "overwritten"])
def test_a_delta_that_does_not_follow_is_refused_by_name(sent, case):
    """After one that was lost, a second time, another tensor's, or after another write; nothing is
    written then, and a full sync repairs it.
    """
    refit, receiver, deltas, values = sent
    name, message = "b.weight", "b.weight: this delta follows version 2, and version 1 is held"
    given = deltas[1][name]
    if case == "repeated":
        receiver.apply_delta(name, deltas[0][name])
        given, message = deltas[0][name], "follows version 1, and version 2 is held"
    elif case == "other":
        given, message = deltas[0]["a.weight"], "b.weight: this delta does not make version 2"
    elif case == "overwritten":
        given, message = deltas[0][name], "b.weight: this delta does not make version 2"
        place = int(unpacked(name, given).places[0])
        receiver.tensors[name].view(torch.uint8).view(-1)[place] ^= 1
    before = snapshot(receiver)
    with pytest.raises(zerocast.DeltaError, match=message):
        receiver.apply_delta(name, given)
    for part, tensor in before.items():
        assert_same_bytes(receiver.tensors[part], tensor, part)
    for part, delta in refit.deltas():
        receiver.apply_delta(part, delta)
    receiver.check()
    for part, tensor in expected(BLOCKS, values).items():
        assert_same_bytes(receiver.tensors[part], tensor, part)


def test_every_damaged_byte_of_a_delta_is_refused(sent):
    """Each byte of a delta in turn, and every length that it may be cut to."""
    _, receiver, deltas, _ = sent
    delta = deltas[0]["a.weight_scale_inv"]
    before = snapshot(receiver)
    wrong = [delta[:end] for end in range(len(delta))]
    for place in range(len(delta)):
        other = delta.clone()
        other[place] ^= 1 << place % 8
        wrong.append(other)
    for each in wrong:
        with pytest.raises(zerocast.DeltaError, match="a.weight_scale_inv: the delta"):
            receiver.apply_delta("a.weight_scale_inv", each)
    assert_same_bytes(receiver.tensors["a.weight_scale_inv"], before["a.weight_scale_inv"], "scale")
    receiver.apply_delta("a.weight_scale_inv", delta)


def test_a_delta_that_is_sealed_and_makes_no_sense_is_refused():
    """A header that says what its bytes are not, under a right checksum: places outside of the
    tensor, runs of other lengths, dtypes and shapes that are none.
    """
    old = torch.arange(64, dtype=torch.uint8)
    new = old.clone()
    new[5:9] += 1
    parts, _ = changed_segments([Comparison(old.clone(), new, 0)])
    shape = {"shape": (8, 8), "dtype": torch.uint8}
    held = packed([whole_segment(old)], since=None, version=0, total=int(digest(old)), **shape)
    delta = packed(parts, since=0, version=1, total=int(digest(new)), **shape)
    receiver = Receiver()
    receiver.apply_delta("x", held)
    # dtype; dimensions; segments; a size; first element, runs, elements of the segment
    wrong = {6: (0, -1, 7), 9: (-1, 1, 3, 2**40), 10: (-1, 0, 2, 2**40), 11: (-8, 1, 2**40),
             13: (-1, 60, 2**62), 14: (-2, -1, 0, 3, 2**40), 15: (-1, 0, 3, 5, 2**40)}  # fmt: skip
    for place, values in wrong.items():
        for value in values:
            made = delta.clone()
            made[:128].view(torch.int64)[place] = value
            made[32:40] = 0
            made[32:40] = digest(made).view(1).view(torch.uint8)
            with pytest.raises(DeltaError, match="x: "):
                receiver.apply_delta("x", made)
            assert_same_bytes(receiver.tensors["x"].view(-1), old, "after the refusal")
    receiver.apply_delta("x", delta)
    assert_same_bytes(receiver.tensors["x"].view(-1), new, "after the delta")


def test_a_write_between_two_deltas_is_found(sent):
    """By reading everything, where the delta does not touch the place."""
    _, receiver, _, _ = sent
    receiver.check()
    receiver.tensors["d.weight"].view(torch.uint8)[3, 5] ^= 4
    with pytest.raises(zerocast.DeltaError, match=r"d\.weight: the tensor that is held is not"):
        receiver.check()


def test_deltas_follow_the_version_that_was_used_up(sent):
    """Another version, or an iteration that was left, needs a full sync."""
    refit, _, _, values = sent
    for wrong in (refit.version - 1, refit.version + 1):
        with pytest.raises(zerocast.InputError, match=f"version 4, got since={wrong}"):
            refit.deltas(wrong)
    with pytest.raises(zerocast.InputError, match="since must be an integer"):
        refit.deltas("4")
    change(values, 9)
    next(refit.deltas(refit.version))
    with pytest.raises(zerocast.InputError, match="not complete"):
        refit.deltas(refit.version)
    for _ in refit.deltas():
        pass
    assert refit.version == 5


# --- the format ---


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.003, 0.3, 1.0])
def test_runs_come_back(dtype, share):
    """Of 400,000 elements so many changed ones, in the middle of a larger tensor: gaps and runs of
    one entry and of many, the first and the last element.
    """
    generator = torch.Generator().manual_seed(0)
    count, first, size = 400_000, 1_000_003, dtype.itemsize
    old = torch.randint(256, (count * size,), generator=generator, dtype=torch.uint8)
    new = old.clone()
    chosen = (torch.rand(count, generator=generator) < share).nonzero().view(-1)
    if share:
        chosen = torch.cat([chosen, torch.tensor([0, count - 1])])
    new.view(count, size)[chosen, size - 1] ^= 0x41
    old, new = old.view(dtype), new.view(dtype)
    places, held = chosen.unique(), as_integers(old.clone())
    (segment,), _ = changed_segments([Comparison(held, as_integers(new), first)])
    assert_same_bytes(held, as_integers(new), "what is held afterwards")
    fields = {"since": 3, "version": 4, "total": -5, "shape": (7, 300_000), "dtype": dtype}
    delta = unpacked("x", packed([segment], **fields))
    assert (delta.since, delta.version, delta.checksum) == (3, 4, -5)
    assert (delta.shape, delta.dtype) == ((7, 300_000), dtype)
    whole = old.clone()
    whole.view(torch.uint8).view(count, size)[delta.places - first] = delta.values.view(
        torch.uint8
    ).view(-1, size)
    assert_same_bytes(whole, new, f"{dtype}, {share}")
    assert segment.data.nbytes <= max(count * size * 1.02, len(places) * (3 + size) + 30)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_digests_of_parts_and_changes_add_up(dtype):
    """Of parts that begin anywhere in a word; of single elements; of what changed."""
    values = torch.randint(256, (301 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    whole = digest(values)
    for cut in range(40):
        assert digest(values[:cut]) + digest(values[cut:].clone(), cut) == whole
        assert digest(values[:cut]) + digest(values[cut:], cut) == whole
    places = torch.arange(301)
    assert digest_of(values, places) == whole
    before = values.roll(1)
    assert digest(before) + digest_of(values, places, before) == whole
