"""What a user reads has no markup of docstrings and no codes of a terminal."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from zerocast.cli import main
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


COMMANDS = ("", "doctor", "inspect", "checksums", "estimate", "conform", "reproduce")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_has_markup_or_a_file_of_the_repository(command: str, capsys) -> None:
    """A wheel has no docs/."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert not MARKUP.search(text)
    assert "docs/" not in text


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
