"""A few inputs of each target of scripts/fuzz.py; a million take minutes to hours."""

import random
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, Target

from zerocast.errors import ZerocastError
from zerocast.tensors import saved_storage

OWN_TESTS = ("checkpoints", "states")
"""What tests/checkpoint damages."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in OWN_TESTS])
def test_inputs_are_accepted_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By errors of zerocast alone; what is accepted is used and has the right bytes."""
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name][0](tmp_path)
    refused = [is_refused(target, random.Random(f"test {name}:{number}")) for number in range(60)]
    assert 0 < sum(refused) < len(refused)


def is_refused(target: Target, draw: random.Random) -> bool:
    """Whether an input is, by an error of zerocast; any other error is raised."""
    try:
        target(draw)
    except ZerocastError:
        return True
    return False


def test_a_reader_that_trusts_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were shapes and dtypes not compared with the recipe, an input would show it."""
    monkeypatch.setattr(saved_storage, "_check_nominal", lambda *_, **__: None)
    target = TARGETS["weights"][0](Path())
    draws = map(random.Random, range(300))
    with pytest.raises((RuntimeError, TypeError, AttributeError)):  # of torch and Python
        any(is_refused(target, draw) and False for draw in draws)
