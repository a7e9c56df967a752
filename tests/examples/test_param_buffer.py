"""The parameter buffer by hand: right bytes, waited for layer by layer, on any number of ranks."""

import functools
import re
from pathlib import Path

import pytest
import torch

import zerocast
from tests.conftest import Ranks, stamp
from tests.support.claims import assert_same_tensors, stored
from tests.support.late_gathers import GathersLate
from tests.support.nightly import nightly
from tests.support.programs import on_mpi_ranks, on_torchrun_ranks, output_of
from tests.support.ranks import PROCESSES, on_ranks
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = EXAMPLES / "param_buffer.py"

RECIPES = sorted(zerocast.recipes.RECIPES)

SMALL, LARGE = 1, 2**16
"""Bucket sizes, in elements: each weight has its own; one holds all weights of a kind."""


@pytest.fixture(scope="module")
def example():
    """The module ``param_buffer``, imported as the program imports its parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import param_buffer

        yield param_buffer


def small_model(recipe: str) -> torch.nn.Sequential:
    """Weights of 32 to 2048 elements, codes and BF16, the same on every rank."""
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 32),
        torch.nn.Linear(32, 1, bias=False),
    )
    generator = torch.Generator().manual_seed(3)  # ranks are threads, and torch's own is shared
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2, generator=generator)
    zerocast.nn.convert(model, zerocast.recipes.RECIPES[recipe]())
    return model.to(torch.bfloat16)


def train(example, recipe: str, comm: Communicator, bucket_size: int) -> dict[str, torch.Tensor]:
    """Three steps, the same data on every rank; every stored byte of every weight by name."""
    model = small_model(recipe)
    buffer = example.ParamBuffer(model, [(layer,) for layer in model], comm, bucket_size, lr=0.01)
    data = torch.Generator().manual_seed(4)
    for _ in range(3):
        inputs = torch.randn(8, 32, generator=data).bfloat16()
        model(inputs).float().square().mean().backward()
        buffer.step()
        model.zero_grad()
    example.arrive(buffer.buckets)
    right, verdict = example.check_weights(model, buffer.gather_master, comm)
    assert right, verdict
    return stored(model)


@functools.cache
def trained_alone(example, recipe: str) -> dict[str, torch.Tensor]:
    """By one rank: in a thread, too, because ranks multiply on one core each, and more would round
    otherwise.
    """
    return run_in_process(1, lambda comm: train(example, recipe, comm, LARGE))[0]


# Each recipe meets each size of buckets and each number of threads; processes gather as threads do.
TRAININGS = [
    pytest.param(recipe, bucket_size, on.values[0], marks=on.marks, id=f"{recipe}-{on.id}")
    for i, recipe in enumerate(RECIPES)
    for bucket_size, on in [
        *((size, stamp("in_process", 3 + 2 * ((i + j) % 3)))
          for j, size in enumerate((SMALL, 3000, LARGE))),
        (3000, stamp(PROCESSES[i % 2], 3)),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "bucket_size", "ranks"), TRAININGS, indirect=["ranks"])
def test_any_number_of_ranks_trains_the_same_bytes(
    example, recipe: str, bucket_size: int, ranks: Ranks
) -> None:
    """On 3, 5 and 7 ranks, three steps leave on every rank the bytes of one rank, and those of the
    unsharded cast, in buckets of one weight and of all: some ranks own nothing of a small weight,
    or of a whole bucket but padding.
    """
    expected = trained_alone(example, recipe)
    by_rank = ranks.run(lambda comm: train(example, recipe, comm, bucket_size))
    for rank, found in enumerate(by_rank):
        assert_same_tensors(found, expected, f"on rank {rank} of {ranks.size}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_read_before_it_has_arrived(example, recipe):
    """Gathers that do nothing until they are waited for, with bytes spoilt until then, give the
    same training: every layer waits for its weights.
    """
    expected = trained_alone(example, recipe)
    for found in run_in_process(3, lambda comm: train(example, recipe, GathersLate(comm), SMALL)):
        assert_same_tensors(found, expected)


@on_ranks("in_process", 3)
def test_a_layer_waits_for_its_own_buckets_only(comm, example):
    """After a step every bucket is on its way; when a layer runs, its buckets have come and those
    of later layers have not.
    """
    model = small_model("nvfp4")
    buffer = example.ParamBuffer(model, [(layer,) for layer in model], comm, SMALL, lr=0.01)
    model(torch.ones(1, 32).bfloat16()).sum().backward()
    buffer.step()
    pending = [[bool(bucket.arrivals) for bucket in buffer.buckets]]
    for layer in model:
        layer.register_forward_pre_hook(
            lambda *_: pending.append([bool(bucket.arrivals) for bucket in buffer.buckets])
        )
    model(torch.ones(1, 32).bfloat16())
    # Weights in order: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias, 3.weight
    assert pending == [[False] * come + [True] * (7 - come) for come in (0, 2, 4, 6, 7)]


def test_buckets_hold_whole_weights_of_one_kind(example):
    """Codes and BF16 weights lie in buckets of their own, each in the model's order and closed as
    soon as it has the size asked for.
    """
    model = small_model("nvfp4")
    names = {weight: name for name, weight in model.named_parameters()}

    def filled(size):
        return [
            [names[weight] for weight in bucket]
            for bucket in example.fill_buckets(model.parameters(), size)
        ]

    assert filled(LARGE) == [
        ["0.weight", "2.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]
    assert filled(2049) == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
        ["3.weight"],
    ]
    assert filled(65) == [
        ["0.weight"], ["0.bias", "1.weight"], ["1.bias", "2.bias"], ["2.weight"], ["3.weight"]
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 3, 6])
def test_byte_shards_tile_every_plane(example, recipe, size):
    """The byte ranges of all ranks, in rank order, are each plane of each bucket from end to end,
    and no byte has two owners.
    """

    def body(comm):
        buckets = example.fill_buckets(small_model(recipe).parameters(), 3000)
        made = [example.Bucket(weights, comm) for weights in buckets]
        return [(b.own.start, b.own.stop, {len(p) for p in b.planes}) for b in made]

    for owned in zip(*run_in_process(size, body), strict=True):
        end = 0
        for start, stop, _ in owned:
            assert start == end < stop
            end = stop
        assert all(lengths == {end} for _, _, lengths in owned)


@on_ranks("in_process", 3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_sends_codes_once(comm, example, recipe):
    """One all-reduce a step; and per plane of codes half a byte an element under NVFP4 and one
    under the others, 4128 elements padded to 4224; and 224 BF16 weights, padded to 384.
    """
    recording = RecordingCommunicator(comm)
    model = small_model(recipe)
    buffer = example.ParamBuffer(model, [(layer,) for layer in model], recording, LARGE, lr=0.1)
    recording.reset()
    for _ in range(2):
        model(torch.ones(1, 32).bfloat16()).sum().backward()
        buffer.step()
    example.arrive(buffer.buckets)
    gathers = recording.total(kind="all_gather")
    planes = 2 if recipe in ("mxfp8", "mxfp4", "rowwise") else 1
    codes = planes * 4224 // (2 if "fp4" in recipe else 1)
    assert recording.total(kind="all_reduce").calls == 2
    assert (gathers.calls, gathers.payload_bytes) == (2 * (planes + 1), 2 * (codes + 2 * 384))


def test_a_weight_without_a_unit_is_refused(example):
    """A weight that no forward would wait for is named."""
    model = small_model("nvfp4")
    with pytest.raises(ValueError, match=r"2\.weight is in none"):
        example.ParamBuffer(
            model, [(model[0], model[1]), (model[3],)], zerocast.as_communicator(None), 1, lr=0.01
        )


@pytest.mark.parametrize(
    "launcher",
    ["mpiexec", nightly("torchrun")],
)
def test_the_program_says_what_it_trained(launcher):
    """On 3 ranks the GPT trains, sends less than half of BF16's bytes with NVFP4 codes, and holds
    the bytes of the unsharded cast.
    """
    launched = {"mpiexec": on_mpi_ranks, "torchrun": on_torchrun_ranks}[launcher]
    said = output_of(launched(3, PROGRAM, "--steps", 4))
    assert "3 ranks, 4 steps, 7 buckets, nvfp4" in said
    first, last = map(float, re.findall(r"([\d.]+) at", said))
    assert 4 < last < first < 6
    sent, in_bf16 = (
        float(kilobytes.replace(",", "")) for kilobytes in re.findall(r"([\d,.]+) kB", said)
    )
    assert 0 < sent < 0.5 * in_bf16
    assert "The sharded weights equal the unsharded cast on every rank" in said
