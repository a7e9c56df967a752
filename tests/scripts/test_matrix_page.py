"""scripts/matrix.py: a cell that cannot run says why, and the page has a line for each cell."""

import json
import re
from pathlib import Path

import matrix
import pytest


def test_a_cell_without_an_interpreter_says_so(monkeypatch):
    """A release of Python that is not there is named, before anything is made."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(matrix.CannotRun, match="there is no python3.14 on PATH that starts"):
        matrix.try_cell("3.14/newest", Path("a.whl"))


def test_the_page_is_of_the_rows_that_are_kept():
    """docs/matrix.md is what the rows of scripts/results/matrix.json give, a line a cell."""
    rows = json.loads(matrix.ROWS.read_text())
    assert matrix.PAGE.read_text() == matrix.page(rows)
    assert {row["cell"] for row in rows} <= set(matrix.CELLS)
    lines = matrix.page([{"cell": "3.14/newest", "date": "2026-01-02", "why": "no torch"}])
    assert "| 3.14 | newest | no torch | | | 2026-01-02 |" in lines
    assert lines.count("not tried yet") == len(matrix.CELLS) - 1


def test_cells_that_are_not_known_are_refused(capsys):
    """A cell that the table does not have is an error that lists those that it has."""
    with pytest.raises(SystemExit):
        matrix.main(["4.0/newest"])
    assert "cells must be of 3.10/2.11.0" in capsys.readouterr().err


def test_the_scripts_take_every_python_of_the_table():
    """README, the classifiers and the check of scripts/environment.sh name the table's Pythons."""
    minors = [int(cell.split("/")[0].split(".")[1]) for cell in matrix.CELLS]
    first, last = min(minors), max(minors)
    texts = {
        name: (matrix.ROOT / name).read_text()
        for name in ("README.md", "pyproject.toml", "scripts/environment.sh")
    }
    for name in ("README.md", "scripts/environment.sh"):
        assert f"Python 3.{first} to 3.{last}" in texts[name], name
    assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in texts["scripts/environment.sh"]
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', texts["pyproject.toml"])
    assert sorted(map(int, named)) == list(range(first, last + 1))
