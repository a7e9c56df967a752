"""README.md, CONTRIBUTING.md and docs/: their Python runs, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    """The page's Python, each block behind as many empty lines as stand before it on the page."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match.group(1) for match in found]


@pytest.fixture
def own_process_group():
    """A page that makes the default process group leaves none behind."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.own_defaults
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, own_process_group, capsys):
    """The blocks of a page run in order and share their names; those of the README run alone."""
    if page.name == "torchtitan.md":
        pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")
    names = {"__name__": "__main__"}
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), names)
        if page.name == "README.md":
            names = {"__name__": "__main__"}


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and mkdocs name them in addresses."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    """Relative links, and paths in backticks, name files that are there, and headings that they
    have; there is no other link.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            aim = (page.parent / file).resolve() if file else page
            assert aim.exists(), f"{page.name} links to {target}, which is not there"
            is_line = aim.suffix != ".md" and re.fullmatch(r"L\d+", anchor)
            assert is_line or not anchor or anchor in anchors(aim), (
                f"{page.name}: no heading {target}"
            )
    for path in re.findall(r"`((?:cuda_src|docs|examples|scripts|tests)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"


def test_the_readme_can_be_read_at_a_sitting():
    """README.md has at most 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_of_a_step_is_the_one_that_its_program_draws():
    """docs/step.svg, which README shows."""
    program = [sys.executable, str(ROOT / "scripts" / "draw_step.py")]
    subprocess.run(program, check=True)


def test_programs_that_pages_run_are_there():
    """Every program of the repository that a shell block runs exists and knows the options that
    follow it, itself or by a program beside it that it imports.
    """
    found = 0
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for path, options in re.findall(r"((?:scripts|examples)/[\w./]+)(.*)", block):
                program = (ROOT / path).read_text()
                for module in re.findall(
                    r"^from (\w+) import .*\boptions\b", program, re.MULTILINE
                ):
                    program += (ROOT / path).with_name(f"{module}.py").read_text()
                for option in re.findall(r"--[\w-]+", options):
                    assert f'"{option}"' in program, f"{page.name}: {path} has no {option}"
                found += 1
    assert found > 4


def test_properties_of_the_cuda_backend_have_a_test_each():
    """Each row of docs/cuda.md, but of the table that is written, names tests that are there, or
    programs.
    """
    text = (ROOT / "docs/cuda.md").read_text().split("## What ran")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    heads = [row for row in rows if row[1] in ("shown by", "asked by")]
    assert len(heads) == 6
    assert len(rows) > 30
    for claim, shown in rows:
        if (claim, shown) in heads or shown.startswith("nothing here"):
            continue
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", shown)
        assert named, claim
        for file, test in named:
            assert re.search(rf"^def {test}", (ROOT / file).read_text(), re.MULTILINE), shown


def test_a_newcomers_questions_have_a_file_each():
    """The questions under "Where to look" in docs/architecture.md: each is answered by a file."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Where to look\n")[1].split("\n## ")[0]
    answers = dict(re.findall(r"^\| (.*?\?) \| \[[^\]]+\]\(([^)]+)\) \|", section, re.MULTILINE))
    assert len(answers) == section.count("\n| ") - 1  # all rows but the head
    missing = {
        question: path for question, path in answers.items() if not (ROOT / "docs" / path).is_file()
    }
    assert not missing
