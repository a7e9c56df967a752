"""``python -m zerocast compare``: which weights of two checkpoints differ, and why, most likely."""

import argparse
import html
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerocast.cli.checkpoint_files import sources
from zerocast.cli.differences import (
    WeightDifference,
    difference,
    experts_in_other_layouts,
    experts_of,
)
from zerocast.cli.inspection import STYLE
from zerocast.cli.output import add_output, aligned, progress
from zerocast.cli.stored_weights import StoredWeights
from zerocast.safe_files import printable

HEAD = ("tensor", "A", "B", "codes", "scales", "largest", "relative", "likely cause")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    held = "a directory of safetensors files, quantized or not"
    parser.add_argument("a", type=Path, metavar="A", help=held)
    parser.add_argument("b", type=Path, metavar="B", help="another")
    cast = "the directory that both were cast from: formulas are then found by computing them anew"
    parser.add_argument("--source", type=Path, metavar="DIR", help=cast)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    add_output(parser, "html", reads=lambda given: [
        file for folder in (given.a, given.b, given.source) if folder for file in sources(folder)
    ])  # fmt: skip


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code, which is 1 if a weight differs.

    Raises:
        InputError, OSError: if a checkpoint cannot be read, or the page cannot be written.
    """
    a, b = StoredWeights(given.a), StoredWeights(given.b)
    source = None if given.source is None else StoredWeights(given.source)
    names = [*a.by_name, *(name for name in b.by_name if name not in a.by_name)]
    apart = experts_in_other_layouts(a, b)
    left = {each.name for each in apart}
    names = [name for name in names if experts_of(name)[0] not in left]
    found = []
    with progress("compare", len(names), "weights") as add:
        for name in names:
            if (each := difference(name, a, b, source)) is not None:
                found.append(each)
            add(1)
    found, names = found + apart, names + sorted(left)
    title = f"A = {printable(str(given.a))}, B = {printable(str(given.b))}"
    summary = f"{len(found)} of {len(names)} weights differ: {title}"
    if given.draft is not None:
        given.draft.write_text(as_html(summary, found), encoding="utf-8")
    if given.json:
        shown = {"weights": len(names), "differences": [asdict(each) for each in found]}
        return shown, int(bool(found))
    table = [*aligned(HEAD, list(map(cells, found)), (0, 1, 2, 7)), ""] if found else []
    return "\n".join([*table, summary]), int(bool(found))


def cells(found: WeightDifference) -> list[str]:
    """Return the row of one weight, with the columns of :data:`HEAD`."""
    counts = ("" if each is None else f"{each:,}" for each in (found.codes, found.scales))
    sizes = ("" if each is None else f"{each:.3g}" for each in (found.largest, found.relative))
    texts = [found.name, found.a or "-", found.b or "-", *counts, *sizes, found.cause]
    return [printable(each) for each in texts]


def as_html(summary: str, differences: Sequence[WeightDifference]) -> str:
    """Return a self-contained HTML page."""
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(each)) + "</tr>"
        for each in differences
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>compare</title>\n'
        f"<style>{STYLE}td:last-child {{ text-align: left }}</style>\n"
        f"<p>{html.escape(summary)}</p>\n"
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></html>\n"
    )
