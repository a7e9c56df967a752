"""What a user reads has no markup of docstrings and no codes of a terminal."""

import ast
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from zerocast.arguments import did_you_mean
from zerocast.cli import COMMANDS, main
from zerocast.cli.checkpoint_files import entries

PACKAGE = Path(zerocast.__file__).parent
MARKUP = re.compile(r"``|:[a-z]+:`|\x1b|\\x1b\[")


def literals(source: str) -> Iterator[ast.Constant]:
    """The texts in ``source`` that are not docstrings."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = (each.value for each in node.keywords if each.arg == "doc")
            docs |= {id(part) for value in given for part in ast.walk(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def test_no_text_of_the_package_has_markup() -> None:
    """In none of its literals but docstrings; the scan finds one that is planted."""
    assert [each.value for each in literals('"""``a``"""\nraise E(f":class:`{b}`")')] == [
        ":class:`",
        "`",
    ]
    found = [
        f"{file}:{each.lineno}: {each.value!r}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for each in literals(file.read_text())
        if MARKUP.search(each.value) and each.value != MARKUP.pattern
    ]
    assert not found


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_help_has_markup_or_a_file_of_the_repository(command: str, capsys) -> None:
    """A wheel has no docs/."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert not MARKUP.search(text)
    assert "docs/" not in text


def test_near_names_are_suggested() -> None:
    """In any case; of names with dots by their parts, also for patterns; none that is far, and none
    for what is no text.
    """
    layers = ["layers.0.q_proj", "layers.1.q_proj", "layers.1.down_proj", "lm_head"]
    for given, known, told in (
        ("NVP4", ["current", "nvfp4"], " Did you mean 'nvfp4'?"),
        ("fp8-blocks", ["fp8-block", "block"], " Did you mean 'fp8-block' or 'block'?"),
        ("*.q_prj", layers, " Did you mean 'layers.0.q_proj' or 'layers.1.q_proj'?"),
        ("*.zzz", layers, ""),
        (["nvfp4"], ["nvfp4"], ""),
    ):
        assert did_you_mean(given, known) == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("inspct a", "there is no command 'inspct'. Did you mean 'inspect'?"),
        ("compare a b --sorce=c", "compare has no option --sorce. Did you mean 'source'?"),
        ("estimate llama-8b --recipe nvp4", "got 'nvp4'. Did you mean 'nvfp4'?"),
        ("estimate lama-8b", "Did you mean 'llama-8b'"),
        ("conform torchoa", "got 'torchoa'. Did you mean 'torchao' or 'torch'?"),
    ],
)
def test_a_misspelt_word_of_a_command_is_answered(words: str, told: str, capsys) -> None:
    """A command, an option, a recipe, a model, a package."""
    with contextlib.suppress(SystemExit):
        assert main(words.split()) == 2
    assert told in capsys.readouterr().err


def a_text(path: Path) -> None:
    """No archive."""
    path.write_text("hello")


def a_module(path: Path) -> None:
    """A whole object."""
    torch.save(torch.nn.Linear(3, 3), path)


def cut(path: Path) -> None:
    """The beginning of a file."""
    torch.save({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_text, "must be a zip archive"),
        (cut, "must be a zip archive"),
        (a_module, r"GLOBAL torch\.nn\.modules\.linear\.Linear was .*; save a state"),
    ],
)
def test_a_file_that_inspect_refuses_is_named_as_what_it_is(
    make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    """Not in the words of torch.load, which are for a terminal."""
    make(tmp_path / "file.pt")
    message = message_of(zerocast.InputError, lambda: list(entries(tmp_path / "file.pt")))
    assert re.search(said, message)
    assert not MARKUP.search(message)
