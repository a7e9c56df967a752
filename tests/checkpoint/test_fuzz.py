"""Whatever a checkpoint's files hold, loading it refuses it by name, or continues from it."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.optim.training import Training, assert_same_lists
from tests.support.nightly import nightly
from tests.support.recipes import RECIPES
from zerocast.checkpoint import load, save
from zerocast.checkpoint.manifest import _digest
from zerocast.errors import InputError, ZerocastError

MANIFEST = "checkpoint.json"
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), "", "x",
    "F32", "shard", "..", "\0", [], [0], [[]], {}, {"$tensor": "x"}, {"$tuple": 3}, {"value": None},
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in a value of JSON, each with every key."""
    found = []
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *places(value[key])]
    return found


def edit(given: Any, draw: random.Random) -> None:
    """Change, remove, copy or exchange values anywhere in the content of a manifest."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        everywhere = places(given["content"])
        holder, key = draw.choice(everywhere)
        match draw.randrange(4):
            case 0:
                holder[key] = draw.choice(VALUES)
            case 1:
                del holder[key]
            case 2:
                other, place = draw.choice(everywhere)
                holder[key] = json.loads(json.dumps(other[place]))
            case 3:
                if type(holder[key]) is int:
                    holder[key] += draw.choice((-(2**40), -8, -4, -1, 1, 4, 8, 2**40))


@pytest.mark.parametrize("inputs", [60, nightly(20_000)])
def test_an_edited_manifest_is_refused_or_right(tmp_path: Path, inputs: int) -> None:
    """Its digest is made right again, so nothing but the checks of what it says is in the way."""
    draw, saved = random.Random(inputs), Training(None, RECIPES["delayed"])
    saved.train(0, 1)
    save(tmp_path, saved.optimizer, extra={"epoch": 3})
    text, masters = (tmp_path / MANIFEST).read_text(), saved.masters()
    training = Training(None, RECIPES["delayed"], seed=1)
    training.train(0)
    before, refused = training.saved(), 0
    fresh = training.masters()
    for number in range(inputs):
        given = json.loads(text)
        edit(given, draw)
        given["digest"] = _digest(given["content"])
        (tmp_path / MANIFEST).write_text(json.dumps(given))
        try:
            load(tmp_path, training.optimizer)
        except ZerocastError:
            refused += 1
            assert_same_lists(training.masters(), fresh, f"masters after refusal {number}")
        else:
            assert_same_lists(training.masters(), masters, f"masters of input {number}")
            training.optimizer.load_state_dict(before)
    assert refused > inputs // 2


@pytest.mark.parametrize("place", ["c", "c.safetensors"])
@pytest.mark.parametrize("inputs", [60, nightly(20_000)])
def test_flipped_and_cut_files_are_refused(tmp_path: Path, inputs: int, place: str) -> None:
    """Any bit of the manifest or of a file that it names, or of one file, and any cut."""
    draw, training = random.Random(inputs), Training(None, RECIPES["delayed"])
    training.train(0)
    save(tmp_path / "whole" / place, training.optimizer)
    fresh = training.masters()
    for number in range(inputs):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "d")
        files = [path for path in (tmp_path / "d").rglob("*") if path.is_file()]
        path = draw.choice(sorted(files))
        data = bytearray(path.read_bytes())
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(InputError, match="damaged|says it holds|cut off|not a checkpoint"):
            load(tmp_path / "d" / place, training.optimizer)
        assert_same_lists(training.masters(), fresh, f"masters after input {number}")
