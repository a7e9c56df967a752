"""A ZeroOptimizer continues from a checkpoint bit for bit, on any number of ranks."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

import zerocast
from tests.optim.training import Training, assert_same_lists
from tests.support.ranks import on_ranks, shared_folder
from tests.support.recipes import RECIPES
from zerocast.checkpoint import load, save, writing
from zerocast.checkpoint.dcp_storage import Reader
from zerocast.checkpoint.files import DigestingWriter
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import InputError, NonFiniteError, ZerocastError

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain-sgd": (torch.optim.SGD, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "whole": (torch.optim.AdamW, {"lr": 0.01, "shard": "matrix"}),
}
CASES = [("delayed", "adamw"), ("nvfp4-drawn", "sgd"), ("mxfp8", "whole")]
WAYS = [(2, 3), (3, 1)]
ALL_CASES = [*itertools.product(RECIPES, ["adamw"]), *itertools.product(["delayed"], CLASSES)]
ALL_WAYS = [*itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 7))]


def nightly(few: list[Any], everything: list[Any]) -> list[Any]:
    """Some of the cases always, the others in nightly runs."""
    others = [case for case in everything if case not in few]
    return [*few, *(pytest.param(*case, marks=pytest.mark.nightly) for case in others)]


def make(comm: Communicator, recipe: str, kind: str, seed: int = 0) -> Training:
    """The weights of :class:`Training` under an optimizer that averages the masters, too."""
    optimizer, options = CLASSES[kind]
    training = Training(comm, RECIPES[recipe], optimizer, seed=seed, **options)
    training.optimizer.ema(0.75)
    return training


def held(training: Training) -> list[torch.Tensor]:
    """All that a step changes: weights with what recipes remember, masters, averages."""
    average = training.optimizer.ema(0.75)
    averages = [average.gather(p) for p in training.params]
    return [*(p.detach().clone() for p in training.params), *training.masters(), *averages]


@pytest.mark.parametrize(("before", "after"), nightly(WAYS, ALL_WAYS))
@pytest.mark.parametrize(("recipe", "kind"), nightly(CASES, ALL_CASES))
def test_a_run_continues_as_if_it_had_not_stopped(
    tmp_path: Path, recipe: str, kind: str, before: int, after: int
) -> None:
    """From the directory and from one file, whatever ranks saved and load."""
    paths = tmp_path / "sharded", tmp_path / "whole.safetensors"

    def first(comm: Communicator) -> list[torch.Tensor]:
        training = make(comm, recipe, kind)
        training.train(0, 1, alike=True)
        training.optimizer.param_groups[0]["lr"] *= 0.5
        for path in paths:
            save(path, training.optimizer)
        training.train(2, 3, alike=True)
        return held(training)

    expected = run_in_process(before, first)[0]

    def second(comm: Communicator) -> None:
        for path in paths:
            training = make(comm, recipe, kind, seed=1)
            assert load(path, training.optimizer).steps == 2
            training.train(2, 3, alike=True)
            assert_same_lists(held(training), expected, path.name)

    run_in_process(after, second)


@on_ranks("mpi", 4)
def test_processes_continue_beside_the_training(comm: Communicator) -> None:
    """An asynchronous save holds what was there when it was asked for, whatever is trained on."""
    path = shared_folder(comm) / "a" / "b"
    training = make(comm, "delayed", "adamw")
    training.train(0, 1, alike=True)
    pending = save(path, training.optimizer, asynchronous=True)
    training.train(2, alike=True)
    assert pending is not None
    pending.wait()
    save(path, training.optimizer, asynchronous=True)
    training.train(3, alike=True)
    another = make(comm, "delayed", "adamw", seed=1)
    save(path.with_name("c"), training.optimizer)  # waits for the one before
    assert load(path, another.optimizer).steps == 3
    another.train(3, alike=True)
    assert_same_lists(held(another), held(training), "after one step more")
    comm.barrier()
    assert len(list(path.iterdir())) == comm.size + 1  # nothing of earlier saves


@on_ranks("in_process", 2)
def test_a_writer_that_fails_is_raised_at_the_next_call(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank, and the checkpoint before it is whole."""
    training = make(comm, "nvfp4", "adamw")
    save(tmp_path / "c", training.optimizer)
    training.train(0, alike=True)
    comm.barrier()
    if comm.rank == 1:
        monkeypatch.setattr("os.fsync", lambda handle: 1 / 0)
    comm.barrier()
    save(tmp_path / "c", training.optimizer, asynchronous=True)
    with pytest.raises(ZerocastError, match="division by zero"):
        save(tmp_path / "c", training.optimizer)
    comm.barrier()
    monkeypatch.undo()
    assert load(tmp_path / "c", training.optimizer).steps == 0


def test_a_rank_that_cannot_write_at_all_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On every rank, though its disk has no room even to say so; and once only."""
    write = DigestingWriter.__init__
    note = writing._put_note

    def full(self: Any, path: Path) -> None:
        if "rank00001" in path.name:
            raise OSError(28, "no space")
        write(self, path)

    def no_note(path: Path, said: dict[str, Any]) -> None:
        if "rank00001" in path.name:
            raise OSError(28, "no space")
        note(path, said)

    def body(comm: Communicator) -> None:
        training = make(comm, "nvfp4", "adamw")
        save(tmp_path / "c", training.optimizer)
        training.train(0, alike=True)
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(DigestingWriter, "__init__", full)
            monkeypatch.setattr(writing, "_put_note", no_note)
        comm.barrier()
        saving = save(tmp_path / "c", training.optimizer, asynchronous=True)
        assert saving is not None
        with pytest.raises(
            ZerocastError, match=r"rank 1: saving .*c in the background failed: .*no space"
        ):
            saving.wait()
        comm.barrier()
        monkeypatch.undo()
        comm.barrier()
        assert load(tmp_path / "c", training.optimizer).steps == 0

    run_in_process(3, body)
    assert "in the background failed" in caplog.text


def test_what_a_user_saves_comes_back(tmp_path: Path) -> None:
    """Schedules, scalers, numbers, tensors; what belongs to a rank, on as many ranks."""

    def body(comm: Communicator) -> None:
        training = Training(comm)
        schedules = [
            torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [1, 1, 2]),
            torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 1.0, total_steps=9),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        training.train(0)
        for schedule in schedules:
            schedule.step()
        extra = {
            "schedules": [schedule.state_dict() for schedule in schedules],
            "scaler": scaler.state_dict(),
            "numbers": (1, 0.1, float("inf"), True, None, {3: "x"}),
            "tensors": {"bf16": torch.linspace(-1, 1, 7).bfloat16(), "empty": torch.zeros(0, 3)},
        }
        own = {"generator": torch.Generator().manual_seed(comm.rank).get_state(), "at": comm.rank}
        save(tmp_path, training.optimizer, extra=extra, of_rank=own)
        loaded = load(tmp_path, training.optimizer)
        tensors = loaded.extra.pop("tensors")
        assert_same_lists([*tensors.values()], [*extra.pop("tensors").values()], "tensors")
        assert loaded.extra == extra
        assert type(loaded.extra["schedules"][0]["milestones"]) is type(schedules[0].milestones)
        assert loaded.of_rank is not None
        assert loaded.of_rank["at"] == comm.rank
        assert torch.equal(loaded.of_rank["generator"], own["generator"])
        with pytest.raises(InputError, match=r"value.extra.f must consist of .*, got a function"):
            save(tmp_path, training.optimizer, extra={"f": make})

    run_in_process(2, body)
    assert load(tmp_path, Training(SingleRank(), seed=1).optimizer).of_rank is None


def test_values_of_numpy_and_all_integers_come_back(tmp_path: Path) -> None:
    """NumPy's generators and numbers, unsigned tensors; what cannot be saved is named."""
    numpy = pytest.importorskip("numpy")
    optimizer = Training(SingleRank()).optimizer
    extra = {"seeds": torch.ones(2, dtype=torch.uint64), "at": numpy.int64(3)}
    state = numpy.random.get_state()
    save(tmp_path, optimizer, extra=extra, of_rank={"numpy": state})
    drawn = numpy.random.random(3).tolist()
    loaded = load(tmp_path, optimizer)
    assert torch.equal(loaded.extra["seeds"], extra["seeds"])
    assert loaded.extra["at"] == 3
    assert loaded.of_rank is not None
    assert loaded.of_rank["numpy"][1].dtype == state[1].dtype
    numpy.random.set_state(loaded.of_rank["numpy"])
    assert numpy.random.random(3).tolist() == drawn
    wrapper = TwoTensor(torch.ones(2), torch.ones(2))
    for value, match in [(wrapper, "got a TwoTensor"), (torch._neg_view(torch.ones(2)), "neg"),
                         (torch.ones(2, dtype=torch.complex64), "got torch.complex64"),
                         (numpy.array(["a"]), "got a ndarray")]:  # fmt: skip
        for given in ({"extra": {"v": value}}, {"of_rank": {"v": value}}):
            with pytest.raises(InputError, match=match):
                save(tmp_path, optimizer, **given)


def test_other_programs_read_the_masters(tmp_path: Path) -> None:
    """One file is safetensors of whole masters; torch's dcp.load reads the directory by Reader."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        training = Training(comm)
        training.train(0)
        save(tmp_path / "c", training.optimizer)
        save(tmp_path / "c.safetensors", training.optimizer)
        return training.masters()

    masters = run_in_process(3, body)[0]
    read = {f"master.layer.{i}": torch.empty_like(each) for i, each in enumerate(masters)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, storage_reader=Reader(tmp_path / "c"))
    assert_same_lists([*read.values()], masters, "by dcp.load")
    with safetensors.safe_open(tmp_path / "c.safetensors", "pt") as file:
        assert_same_lists([file.get_tensor(name) for name in read], masters, "by safetensors")
        assert json.loads(file.metadata()["zerocast_checkpoint"])["content"]["ranks"] == 3
    for part in (tmp_path / "c").glob("*.safetensors"):
        with safetensors.safe_open(part, "pt") as file:
            assert file.keys()


@on_ranks("in_process", 2)
def test_a_run_that_went_wrong_does_not_replace_its_checkpoint(
    comm: Communicator, tmp_path: Path
) -> None:
    """A master that is not finite is refused by name when it is saved."""
    training = Training(comm)
    save(tmp_path, training.optimizer)
    training.feed(0)
    if comm.rank == 1:
        training.params[3].grad[5] = torch.nan
    training.optimizer.step()
    with pytest.raises(NonFiniteError, match="the master of layer.3 must be finite, got nan"):
        save(tmp_path, training.optimizer)
    assert load(tmp_path, training.optimizer).steps == 0


class Model(torch.nn.Module):
    """Trained and frozen weights, plain ones and some that hold codes, buffers, a layer's state."""

    def __init__(self, seed: int, statistics: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        recipe = RECIPES["delayed"]
        with zerocast.model_init(recipe=recipe):
            self.layer = zerocast.nn.Linear(32, 48, bias=False)
            self.base = zerocast.nn.Linear(48, 32, bias=False)
        self.base.weight.requires_grad_(False)
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mean", torch.full((4,), statistics))
        self.register_buffer("cache", torch.full((2,), float(seed)), persistent=False)


def run(model: Model, draw: int) -> None:
    """A forward and a backward, after which layers remember amaxes."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(draw))
    with zerocast.autocast(recipe=RECIPES["delayed"]):
        model.base(model.layer(x)).square().mean().backward()


@pytest.mark.parametrize("alike", [True, False])
def test_the_rest_of_a_model_is_saved_with_it(tmp_path: Path, alike: bool) -> None:
    """Buffers, frozen weights and layers' states; what ranks hold differently, on as many ranks."""
    # Models are made one after the other: threads would draw from one generator.
    made = [Model(0, 1.0 if alike else float(rank)) for rank in range(2)]
    others = {ranks: [Model(1, 7.0) for _ in range(ranks)] for ranks in (2, 3)}

    def first(comm: Communicator) -> dict[str, torch.Tensor]:
        model = made[comm.rank]
        optimizer = zerocast.optim.ZeroOptimizer([("layer", model.layer.weight)], group=comm)
        run(model, 0)
        optimizer.step()
        save(tmp_path, optimizer, model)
        return states(model)

    expected = run_in_process(2, first)

    def second(comm: Communicator) -> None:
        model = others[comm.size][comm.rank]
        optimizer = zerocast.optim.ZeroOptimizer([("layer", model.layer.weight)], group=comm)
        if comm.size == 3 and not alike:
            with pytest.raises(InputError, match="mean was saved by 2 ranks with different"):
                load(tmp_path, optimizer, model)
            return
        load(tmp_path, optimizer, model)
        found = states(model)
        for name, tensor in expected[comm.rank % 2].items():
            assert torch.equal(found[name], tensor), name
        assert torch.equal(model.cache, torch.ones(2))

    for ranks in others:
        run_in_process(ranks, second)


def test_layers_that_remembered_nothing_do_so_again(tmp_path: Path) -> None:
    """A run that goes back to a save from before its first forward repeats it."""
    model = Model(0, 1.0)
    optimizer = zerocast.optim.ZeroOptimizer([("layer", model.layer.weight)])
    save(tmp_path, optimizer, model)
    run(model, 0)
    assert model.layer.get_extra_state() is not None
    load(tmp_path, optimizer, model)
    assert model.layer.get_extra_state() is None


def states(model: Model) -> dict[str, torch.Tensor]:
    """All that was saved of a model, in copies."""
    found = {
        "mean": model.mean,
        "frozen": model.frozen,
        "base": model.base.weight.dequantize(),
        "layer": model.layer.weight.dequantize(),
        "extra": model.layer.get_extra_state(),
    }
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def test_boxes_are_the_elements_of_a_range() -> None:
    """Any range of a tensor of any shape, in its order, each box contiguous."""
    draw = random.Random(0)
    for shape in ((), (7,), (3, 5), (2, 3, 4), (1, 1, 6), (4, 1, 3), (2, 2, 2, 3)):
        numel = torch.Size(shape).numel()
        whole = torch.arange(numel).view(shape)
        for _ in range(50):
            start, end = sorted(draw.choices(range(numel + 1), k=2))
            share = zerocast.optim.boxes.Share.of_range(
                shape, zerocast.layout.Extent(start, end), torch.arange(start, end)
            )
            assert share.local.tolist() == list(range(start, end))
            assert len(share.pieces) <= max(2 * len(shape) - 1, 1)
            for box, piece in share.pieces.items():
                places = tuple(map(slice, box.offsets, map(sum, zip(*box, strict=True))))
                assert torch.equal(whole[places], piece)
