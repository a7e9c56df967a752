"""Which releases of Python and torch run the wheel: a table of cells, tried one by one.

    python scripts/matrix.py                       all cells; prints the page
    python scripts/matrix.py 3.12/newest --write   one cell; rows and page are written

A cell makes an environment, installs the wheel, torch and the test tools, and then runs three
checks outside of the clone: ``doctor``, the Python blocks of README.md, and the tests in QUICK. The
rows are kept in ``scripts/results/matrix.json``, the page in ``docs/matrix.md``. A cell without an
interpreter or a torch says so.

Exit code 1 where a check of a cell that ran has failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "scripts/results/matrix.json"
PAGE = ROOT / "docs/matrix.md"

OLDEST, PINNED, NEWEST = "2.11.0", "2.13.0", "newest"
CELLS = [
    f"{python}/{torch}"
    for python, releases in {
        "3.10": (OLDEST, PINNED),
        "3.11": (OLDEST, PINNED, NEWEST),
        "3.12": (PINNED, NEWEST),
        "3.13": (NEWEST,),
        "3.14": (NEWEST,),
    }.items()
    for torch in releases
]
TOOLS = (
    "hypothesis", "ml_dtypes", "numpy", "packaging", "pytest>=9",
    "pytest-mpi", "pytest-timeout", "pytest-xdist", "safetensors",
)  # fmt: skip
QUICK = (
    "tests/numerics",
    "tests/tensors",
    "tests/cast/test_bitwise_guarantee.py",
    "tests/cast/test_plan.py",
    "tests/nn/test_compile.py",
    "tests/nn/test_linear.py",
    "tests/optim/test_equality.py",
    "tests/checkpoint/test_resumption.py",
    "tests/test_torch_release.py",
)
MARKS = "not mpi and not slow and not integration and not nightly"
CHECKS = ("doctor", "README", "tests")
LAST_LINES = 15


class CannotRun(Exception):
    """The cell's interpreter or torch cannot be had here."""


def run(*command: str | Path, cwd: Path) -> tuple[bool, str]:
    """Run a command without this clone on Python's path; return its success and its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode == 0, done.stdout


def interpreter(version: str) -> str:
    """The program of a release of Python that is on PATH and starts."""
    path = shutil.which(f"python{version}")
    if path is None or not run(path, "-c", "", cwd=ROOT)[0]:
        raise CannotRun(f"no interpreter: there is no python{version} on PATH that starts")
    return path


def try_cell(cell: str, wheel: Path) -> dict[str, str]:
    """Try one cell; return its row: what was found of each check, and the versions."""
    wanted_python, wanted_torch = cell.split("/")
    row = {"cell": cell, "date": datetime.date.today().isoformat(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        done, said = run(interpreter(wanted_python), "-m", "venv", "environment", cwd=place)
        if not done:
            raise CannotRun("no environment: " + said.strip().splitlines()[-1])
        python = place / "environment/bin/python"
        torch = "torch" if wanted_torch == NEWEST else f"torch=={wanted_torch}"
        done, said = run(python, "-m", "pip", "install", "-q", wheel, torch, *TOOLS, cwd=place)
        if not done:
            raise CannotRun("not installed: " + said.strip().splitlines()[-1])
        versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
        row["python"], row["torch"] = run(python, "-c", versions, cwd=place)[1].split()[-2:]
        # The tests import `tests` and `examples`; what they test is the wheel.
        for part in ("tests", "examples", "docs", "scripts", "cuda_src"):
            shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in (
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "pyproject.toml",
            "constraints.txt",
        ):
            shutil.copy(ROOT / file, place)
        test = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS)
        commands = {
            "doctor": (python, "-m", "zerocast", "doctor"),
            "README": (*test, "tests/test_readme.py::test_the_python_of_a_page_runs[README.md]"),
            "tests": (*test, "-n", "auto", "--dist", "worksteal", *QUICK),
        }
        for check in CHECKS:
            done, said = run(*commands[check], cwd=place)
            counts = re.findall(r"\d+ (?:passed|failed|error)\w*", said)
            row[check] = ", ".join(counts) or ("right" if done else "wrong")
            if not done:
                row["failed"] = f"{row.get('failed', '')} {check}".strip()
                print("\n".join(said.splitlines()[-LAST_LINES:]), file=sys.stderr)
    return row


def page(rows: Iterable[dict[str, str]]) -> str:
    """The page of Markdown: a line for each cell of CELLS, tried or not."""
    found = {row["cell"]: row for row in rows}
    lines = [
        "# Releases of Python and torch",
        "",
        "Made by `python scripts/matrix.py --write`. Each cell installs the wheel into a new",
        "environment, without the clone on Python's path. *README* runs the page's Python, *tests*",
        "a quick part of the suite:",
        "",
        *(f"- `{path}`" for path in QUICK),
        "",
        "| Python | torch | doctor | README | tests | on |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cell in CELLS:
        python, torch = cell.split("/")
        row = found.get(cell, {"why": "not tried yet", "date": ""})
        if "why" in row:
            lines.append(f"| {python} | {torch} | {row['why']} | | | {row['date']} |")
            continue
        name = f"{row['torch']} ({torch})"
        checks = " | ".join(row[check] for check in CHECKS)
        lines.append(f"| {row['python']} | {name} | {checks} | {row['date']}, {row['machine']} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Try the cells that are named, or all; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL", help=", ".join(CELLS))
    parser.add_argument(
        "--wheel", type=Path, help="the wheel to try; default: one built from this tree"
    )
    parser.add_argument("--write", action="store_true", help="keep the rows, and write the page")
    given = parser.parse_args(arguments)
    if unknown := set(given.cells) - set(CELLS):
        parser.error(f"cells must be of {', '.join(CELLS)}; given: {', '.join(sorted(unknown))}")
    rows = {row["cell"]: row for row in json.loads(ROWS.read_text())} if ROWS.exists() else {}
    with tempfile.TemporaryDirectory() as built:
        wheel = given.wheel
        if wheel is None:
            done, said = run(
                sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built, ROOT, cwd=ROOT
            )
            assert done, said
            (wheel,) = Path(built).glob("*.whl")
        for cell in given.cells or CELLS:
            try:
                rows[cell] = try_cell(cell, wheel.resolve())
            except CannotRun as problem:
                today = datetime.date.today().isoformat()
                rows[cell] = {"cell": cell, "date": today, "why": str(problem)}
            print(json.dumps(rows[cell]), file=sys.stderr)
            if given.write:
                ROWS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
                PAGE.write_text(page(rows.values()))
    print(page(rows.values()))
    return int(any("failed" in rows[cell] for cell in given.cells or CELLS))


if __name__ == "__main__":
    sys.exit(main())
