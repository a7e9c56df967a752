"""Keeps the line numbers of the walks in docs/architecture.md.

    python scripts/walk_lines.py            prints the places that are not where the page says
    python scripts/walk_lines.py --write    corrects their line numbers

A place is a link to a line of a file and the name that is defined there, between backticks:
[plan.py:20](../zerocast/cast/plan.py#L20) `CastPlan.cast`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PLACE = re.compile(r"\[([\w.]+):(\d+)\]\(\.\./([\w/.]+)#L\2\) `([\w.]+)`")


def line_of(path: Path, name: str) -> int:
    """Return the line of a definition: of Python by its qualified name, else of its first mention.

    Raises:
        LookupError: where the file does not define ``name``.
    """
    text = path.read_text()
    if path.suffix != ".py":
        found = [
            i for i, line in enumerate(text.splitlines(), 1) if re.search(rf"\b{name}\(", line)
        ]
        if not found:
            raise LookupError(f"{path} does not have {name}")
        return found[0]
    nodes: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        found_here = [
            node
            for node in nodes
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part
        ]
        if not found_here:
            raise LookupError(f"{path} does not define {name}")
        nodes = found_here[0].body
    return found_here[0].lineno


def corrected(text: str) -> str:
    """Return the page with the line numbers of today."""

    def place(match: re.Match[str]) -> str:
        label, _, path, name = match.groups()
        line = line_of(ROOT / path, name)
        return f"[{label}:{line}](../{path}#L{line}) `{name}`"

    return PLACE.sub(place, text)


def main() -> None:
    """Print or correct what is not where the page says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="correct the line numbers")
    write = parser.parse_args().write
    before = PAGE.read_text()
    after = corrected(before)
    if write:
        PAGE.write_text(after)
    elif before != after:
        lines = zip(before.splitlines(), after.splitlines(), strict=True)
        sys.exit("\n".join(new for old, new in lines if old != new))


if __name__ == "__main__":
    main()
