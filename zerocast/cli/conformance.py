"""``python -m zerocast conform``: compares a package with conformance packs, or writes these."""

import argparse
import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerocast.cli.output import add_output, aligned, progress
from zerocast.errors import InputError
from zerocast.lab.conformance import (
    PACKAGES,
    VERSION,
    Score,
    package_of,
    packs,
    score,
    write_packs,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    known = ", ".join(PACKAGES)
    parser.add_argument("package", nargs="?", metavar="PACKAGE", help=f"{known}; or module:name")
    parser.add_argument("--packs", type=Path, metavar="DIRECTORY", help="write the packs there")
    add_output(parser, "packs", is_directory=True)


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code, which is 1 if a byte differs.

    Raises:
        InputError: if neither argument is given, or the package cannot be measured.
    """
    if given.package is None and given.packs is None:
        raise InputError("give PACKAGE to be measured, or --packs DIRECTORY to write the packs to.")
    with contextlib.redirect_stdout(sys.stderr):  # packages may print
        return _run(given)


def _run(given: argparse.Namespace) -> tuple[Any, int]:
    package = None if given.package is None else package_of(given.package)
    made = packs()
    written = 0 if given.draft is None else write_packs(given.draft, made)
    if package is None:
        text = f"{written} packs of version {VERSION} written to {given.packs}"
        return {"packs": VERSION, "written": written} if given.json else text, 0
    scores = list[Score]()
    known = package.encodes.keys() | package.writes.keys() | package.gathers.keys()
    offered = [pack for pack in made if pack.subject in known]
    with progress("conform", len(offered), "packs") as add:
        for pack in offered:
            scores += score(package, [pack])
            add(1)
    code = int(any(each.different for each in scores))
    if given.json:
        found = {"package": package.title, "packs": VERSION}
        return {**found, "scores": [asdict(each) for each in scores]}, code
    rows = [[f"{s.level}: {s.subject}", f"{s.compared:,}", f"{s.different:,}"] for s in scores]
    found_levels = {each.level for each in scores}
    absent = dict.fromkeys(pack.level for pack in made if pack.level not in found_levels)
    parts = [
        f"{package.title}, by {len(scores)} of {len(made)} packs of version {VERSION}",
        "\n".join(aligned(["pack", "bytes", "different"], rows)),
        f"Not offered: {', '.join(absent)}." if absent else "",
        *map(explanation, scores),
    ]
    return "\n\n".join(filter(None, parts)), code


def explanation(found: Score) -> str:
    """Return the text on a pack with a difference or a refusal; else an empty string."""
    lines = [f"first, {found.first}"] if found.different else []
    if found.causes is None:
        lines.append("unexplained: no known changes to the formula give these bytes")
    for cause, number in (found.causes or {}).items():
        lines.append(f"{number:,} {'byte' if number == 1 else 'bytes'}: {cause}")
    for reason in dict.fromkeys(found.refused.values()):
        names = [name for name in found.refused if found.refused[name] == reason]
        lines.append(f"not quantized, {', '.join(names)}: {reason}")
    title = f"{found.level}: {found.subject}"
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""
