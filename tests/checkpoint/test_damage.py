"""A checkpoint that is damaged, foreign, newer or of another training is refused by name."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.optim.training import NVFP4, Training, assert_same_lists, held_by, make_params, named
from tests.support.claims import assert_same_tensors, message_of, one_message
from tests.support.recipes import RECIPES
from zerocast.checkpoint import load, save
from zerocast.checkpoint.manifest import _digest
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, RankMismatchError, UnsupportedError, ZerocastError
from zerocast.optim import ZeroOptimizer

MANIFEST = "checkpoint.json"
FOREIGN = re.compile(
    r"planner|plan\b|chunk|ReadItem|WriteItem|Traceback|fqn|BytesIO|``|:[a-z]+:`|\x1b"
)
"""Words of torch.distributed.checkpoint, markup, and codes of a terminal."""


def saved(path: Path, steps: int = 2) -> None:
    """A directory and a file, by two ranks."""

    def body(comm: Communicator) -> None:
        training = Training(comm, RECIPES["delayed"])
        training.train(*range(steps))
        save(path / "c", training.optimizer)
        save(path / "c.safetensors", training.optimizer)

    run_in_process(2, body)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, and not to be changed."""
    path = tmp_path_factory.mktemp("saved")
    saved(path)
    return path


def refusal(path: Path, make: Callable[[Communicator], ZeroOptimizer] | None = None) -> str:
    """What two ranks are told alike, in words of ours, with nothing changed."""

    def body(comm: Communicator) -> str:
        optimizer = make(comm) if make else Training(comm, RECIPES["delayed"], seed=1).optimizer
        before = held_by(optimizer)
        message = message_of(ZerocastError, load, path, optimizer)
        assert_same_lists(held_by(optimizer), before, "after the refusal")
        return message

    message = one_message(run_in_process(2, body))
    assert not FOREIGN.search(message), message
    return message


def weights() -> list[Any]:
    """Those of the checkpoint, by name."""
    return named(make_params(RECIPES["delayed"]))


def change(path: Path, edit: Callable[[Any], None], *, honest: bool = True) -> None:
    """Edit the manifest; with ``honest`` its digest is that of the new content."""
    given = json.loads((path / MANIFEST).read_text())
    edit(given)
    if honest:
        given["digest"] = _digest(given["content"])
    (path / MANIFEST).write_text(json.dumps(given))


def flip(path: Path, place: float) -> None:
    """Change one bit, so far into the file."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def part(path: Path, rank: int = 1) -> Path:
    """The file of a rank."""
    return next(path.glob(f"*-rank{rank:05}.safetensors"))


def optimizer_of(given: Any) -> Any:
    """What the manifest says of the only optimizer."""
    return given["content"]["training"]["optimizers"][0]


def content(**changes: Any) -> Callable[[Any], None]:
    """An edit of what the optimizer said of itself."""
    return lambda given: optimizer_of(given).update(changes)


def weight(what: str, value: Any) -> Callable[[Any], None]:
    """An edit of what was said of the first weight."""
    return lambda given: optimizer_of(given)["weights"][0].update({what: value})


def pieces(given: Any) -> Any:
    """Of a master that has several: file, first byte, offsets and sizes of each."""
    tensors = given["content"]["tensors"].items()
    return max((t["chunks"] for name, t in tensors if name.startswith("master.")), key=len)


def reshape(given: Any) -> None:
    """Let the checkpoint say another shape of a master."""
    given["content"]["tensors"]["master.layer.3"]["shape"] = [36]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), "holds no checkpoint: "),
    "nothing": (lambda p: shutil.rmtree(p), "holds no checkpoint"),
    "cut manifest": (
        lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text()[:-9]),
        "or its manifest is damaged",
    ),
    "bit of the manifest": (lambda p: flip(p / MANIFEST, 0.5), "manifest.*damaged"),
    "edited": (lambda p: change(p, content(steps=9), honest=False), "its digest differs"),
    "foreign": (lambda p: (p / MANIFEST).write_text('{"a": 1}'), "not a checkpoint of zerocast"),
    "a list": (lambda p: (p / MANIFEST).write_text("[1]"), "not a checkpoint of zerocast"),
    "newer": (
        lambda p: change(p, lambda given: given.update(zerocast_checkpoint=3)),
        "checkpoint of format 3, and this version of zerocast reads format 2",
    ),
    "newer training": (lambda p: change(p, content(format=3)), "must be of format 2, got 3"),
    "numerics": (lambda p: change(p, content(numerics=9)), "version of the numerics: .* with 9"),
    "missing file": (lambda p: part(p).unlink(), "names the file .*, which cannot be read"),
    "cut file": (lambda p: part(p).write_bytes(part(p).read_bytes()[:-1]), "it was cut off"),
    "empty file": (lambda p: part(p).write_bytes(b""), "it was cut off or replaced"),
    "longer file": (lambda p: part(p).write_bytes(part(p).read_bytes() + b"x"), "must have"),
    "bit of a tensor": (lambda p: flip(part(p), 0.6), "is damaged between bytes 0 and"),
    "exchanged files": (
        lambda p: part(p, 0).write_bytes(part(p, 0).read_bytes()[::-1]),
        "must be those of its checkpoint, and differ",
    ),
    "a missing tensor": (
        lambda p: change(p, lambda g: g["content"]["tensors"].pop("master.layer.2")),
        "must have master.layer.2, and has none",
    ),
    "a missing piece": (
        lambda p: change(p, lambda g: g["content"]["tensors"]["master.layer.2"]["chunks"].pop()),
        "the pieces of master.layer.2 do not cover each of its elements once",
    ),
    "another shape": (lambda p: change(p, reshape), "the pieces of master.layer.3 do not"),
    "outside": (
        lambda p: change(p, lambda g: g["content"]["files"][0].update(name="../c.safetensors")),
        "'../c.safetensors' is not a file in its directory",
    ),
    "beyond the file": (
        lambda p: change(p, lambda g: pieces(g)[0].__setitem__(1, 1 << 40)),
        r"master.layer.\d is outside of its file",
    ),
    "before the file": (
        lambda p: change(p, lambda g: pieces(g)[0].__setitem__(1, -8)),
        "-8 is not a count",
    ),
    "a piece twice": (
        lambda p: change(p, lambda g: pieces(g).__setitem__(-1, pieces(g)[0])),
        r"the pieces of master.layer.\d do not cover each of its elements once",
    ),
    "no digests": (
        lambda p: change(p, lambda g: g["content"]["files"][0]["digests"].clear()),
        "it does not have a digest for each block of",
    ),
    "nested": (
        lambda p: (p / MANIFEST).write_text("[" * 100_000),
        "its manifest is damaged .RecursionError",
    ),
    "no training": (
        lambda p: change(p, lambda g: g["content"].update(training={})),
        "holds tensors and no training state .KeyError",
    ),
    "no weights": (
        lambda p: change(p, lambda given: optimizer_of(given).pop("weights")),
        "damaged, or holds tensors and no training state .KeyError: 'weights'",
    ),
    "steps": (lambda p: change(p, content(steps=-1)), "must be a number of steps, .* got -1"),
    "averages": (lambda p: change(p, content(averages=[0.5])), r"must have the averages .*0.5"),
    "mode": (lambda p: change(p, content(mode="x")), "must be 'train' or 'eval', got 'x'"),
    "of_rank": (
        lambda p: change(p, lambda given: given["content"]["training"].update(of_rank=[{}])),
        "damaged, .*IndexError",
    ),
    "another identity": (
        lambda p: change(p, content(identity="0" * 16)),
        "damaged, .*its run number differs",
    ),
    "state that is missing": (
        lambda p: change(p, lambda g: g["content"]["training"]["state"]["layer.0"].pop("exp_avg")),
        "the state of layer.0 must have .* has no exp_avg",
    ),
}


@pytest.mark.parametrize(("damage", "match"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], Any], match: str
) -> None:
    """The same error on every rank, with nothing changed."""
    shutil.copytree(checkpoint / "c", tmp_path / "c")
    damage(tmp_path / "c")
    message = refusal(tmp_path / "c")
    assert re.search(match, message), message


def test_every_bit_of_one_file_counts(checkpoint: Path, tmp_path: Path) -> None:
    """A file whose bits were flipped anywhere, its own table included, or that was cut anywhere,
    is refused.
    """
    draw, file = random.Random(0), tmp_path / "c.safetensors"
    training = Training(None, RECIPES["delayed"])
    whole = (checkpoint / "c.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(100):
        for places, text in (
            ((start, len(whole)), "is damaged between bytes"),
            ((whole.index(b"}, ") + 3, start), "must be those of its checkpoint|damaged"),
        ):
            data = bytearray(whole)
            data[draw.randrange(*places)] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
            with pytest.raises(InputError, match=text):
                load(file, training.optimizer)
        file.write_bytes(whole[: draw.randrange(len(whole))])
        with pytest.raises(InputError, match=r"is not a checkpoint|it was cut off"):
            load(file, training.optimizer)
    file.write_bytes(whole)
    assert load(file, training.optimizer).steps == 2


def test_a_checkpoint_of_another_training_is_refused(checkpoint: Path) -> None:
    """Other weights, names, recipes, optimizers; both sides are named."""
    cases: dict[str, Callable[[Communicator], ZeroOptimizer]] = {
        "same fp8_format|same recipe of layer.0": lambda comm: Training(comm, NVFP4).optimizer,
        "same class: .*AdamW, .*Adam.": lambda comm: (
            Training(comm, RECIPES["delayed"], torch.optim.Adam).optimizer
        ),
        "same weights: it has 'layer.0', and this one does not": lambda comm: ZeroOptimizer(
            weights()[1:], group=comm
        ),
        "same number of param groups: it was saved with 1, and this one has 2": lambda comm: (
            ZeroOptimizer(
                [{"params": each} for each in (weights()[:3], weights()[3:])],
                group=comm,
            )
        ),
    }
    for match, make in cases.items():
        message = refusal(checkpoint / "c", make)
        assert re.search(match, message), message


def test_places_that_are_taken_and_wrong_arguments(checkpoint: Path, tmp_path: Path) -> None:
    """A save does not stand among other files; what cannot be saved says why."""
    optimizer = Training(None).optimizer
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds 'notes.txt', which zerocast did not save"):
        save(tmp_path, optimizer)
    with pytest.raises(InputError, match="must be a directory for a checkpoint"):
        save(tmp_path / "notes.txt", optimizer)
    with pytest.raises(InputError, match="one file must not be a directory"):
        save(tmp_path / "c.safetensors", optimizer, asynchronous=True)
    with pytest.raises(InputError, match="asynchronous must be True or False"):
        save(tmp_path / "c", optimizer, asynchronous=1)  # type: ignore[arg-type]
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    for call in (save, load):
        with pytest.raises(InputError, match="or a torch optimizer and, as model"):
            call(checkpoint / "c", plain)
        with pytest.raises(InputError, match="or a torch optimizer and, as model"):
            call(checkpoint / "c", None)
        with pytest.raises(InputError, match="must step parameters of the given model"):
            call(checkpoint / "c", plain, torch.nn.Linear(2, 2))
        with pytest.raises(InputError, match="leave group out"):
            call(checkpoint / "c", optimizer, group=zerocast.comm.SingleRank())
    layer = torch.nn.Sequential(torch.nn.Linear(32, 32))
    zerocast.nn.convert(layer, "current", weights="quantized")
    with pytest.raises(UnsupportedError, match="holds codes and no master"):
        save(tmp_path / "c", torch.optim.SGD(layer.parameters()), layer)
    with pytest.raises(InputError, match="holds no checkpoint"):
        load(tmp_path / "c", optimizer)


def test_ranks_that_see_different_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Both checkpoints are whole, and of the same step."""
    saved(tmp_path)

    def body(comm: Communicator) -> str:
        optimizer = Training(comm, RECIPES["delayed"]).optimizer
        path = checkpoint if comm.rank == 0 else tmp_path
        return message_of(RankMismatchError, load, path / "c", optimizer)

    for message in run_in_process(2, body):
        assert re.search("every rank must see the same checkpoint .* rank 0 has '", message)


def test_ranks_that_save_otherwise_are_refused(tmp_path: Path) -> None:
    """To another place, beside the training on one rank only, other values of the user's: all raise
    what differs, and the checkpoint that is there stays.
    """
    saved(tmp_path)
    given: dict[str, Callable[[int], dict[str, Any]]] = {
        "path ": lambda rank: {"path": tmp_path / f"c{rank}"},
        "asynchronous=False' where rank 1 has 'asynchronous=True": lambda rank: {
            "asynchronous": bool(rank)
        },
        "extra ": lambda rank: {"extra": {"epoch": rank}},
    }

    def body(comm: Communicator) -> None:
        optimizer = Training(comm, RECIPES["delayed"]).optimizer
        before = load(tmp_path / "c", optimizer)
        for text, options in given.items():
            arguments = {"path": tmp_path / "c", "optimizer": optimizer} | options(comm.rank)
            message = message_of(RankMismatchError, lambda each=arguments: save(**each))
            assert re.search(f"every rank must save the same: rank 0 has '{text}", message)
        assert load(tmp_path / "c", optimizer) == before

    run_in_process(2, body)


class Masters:
    """A model whose parameters are masters, and their torch optimizer, on each rank whole."""

    def __init__(self, *, steps: int) -> None:
        torch.manual_seed(steps)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32))
        zerocast.nn.convert(self.model, RECIPES["delayed"], weights="master")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            self.optimizer.step()

    def held(self) -> dict[str, torch.Tensor]:
        """All that loading changes, in copies."""
        found = {n: p.detach().clone() for n, p in self.model.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{i} {key}": value.clone() for key, value in state.items()}
        return found


MASTER_DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "steps": (content(steps="x"), "must be a number of steps, .* got 'x'"),
    "averages": (content(averages=[0.5]), "which a torch optimizer cannot hold"),
    "mode": (content(mode="eval"), "saved in the mode of eval"),
    "options": (content(options=[{"lr": -1.0}]), "must have .* only lr"),
    "more options": (content(options=[{}, {}]), "number of param groups: .* with 2, and"),
    "another recipe": (weight("recipe", None), "same recipe of 0.weight"),
    "another shape": (weight("shape", [32, 48]), "same shape of 0.weight"),
    "no state": (
        lambda given: given["content"]["training"]["state"]["0.weight"].pop("exp_avg_sq"),
        "the state of 0.weight must have .* has no exp_avg_sq",
    ),
    "another kind of state": (
        lambda g: g["content"]["training"]["state"]["0.weight"].update(exp_avg={"value": 1}),
        "exp_avg of 0.weight must be torch.float32",
    ),
    "another dtype": (
        lambda g: g["content"]["tensors"]["master.0.weight"].update(dtype="I32"),
        "must be torch.float32, as it is here, and was saved as torch.int32",
    ),
    "no recipe state": (
        lambda given: given["content"]["tensors"].pop("recipe.0.weight.scale"),
        "must have recipe.0.weight.scale, and has none",
    ),
}


def test_masters_of_a_damaged_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    """Of a torch optimizer, too, with nothing changed."""
    save(tmp_path / "c", **vars(Masters(steps=2)))
    for name, (edit, match) in MASTER_DAMAGES.items():
        shutil.copytree(tmp_path / "c", tmp_path / name)
        change(tmp_path / name, edit)
        training = Masters(steps=1)
        before = training.held()
        with pytest.raises(InputError, match=match):
            load(tmp_path / name, training.optimizer, training.model)
        assert_same_tensors(training.held(), before, name)
