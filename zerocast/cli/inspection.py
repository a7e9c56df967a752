"""inspect: shows the tensors of a checkpoint as a table, as JSON, or as a page with histograms."""

from __future__ import annotations

import argparse
import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerocast.arguments import shown_bytes
from zerocast.cli.checkpoint_files import entries, sources
from zerocast.cli.description import TensorDescription, describe
from zerocast.cli.output import add_output, aligned, progress
from zerocast.errors import InputError, ZerocastError
from zerocast.safe_files import printable

HEAD = (
    "tensor", "shape", "dtype", "recipe", "bytes", "amax", "codes", "scale_inv", "saturated",
    "zeros", "not finite",
)  # fmt: skip

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse }
th, td { padding: 4px 10px; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child, th:nth-child(4), td:nth-child(4) { text-align: left }
td:first-child { font-family: ui-monospace, monospace }
.bad { color: #b00020; font-weight: bold }
rect { fill: #3367d6 }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    held = "of torch.save or safetensors, or a directory of these or of torch's DCP"
    parser.add_argument("path", type=Path, metavar="FILE_OR_DIR", help=held)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")
    add_output(parser, "html", reads=lambda given: sources(given.path))


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code.

    Raises:
        InputError, OSError: if the checkpoint cannot be read, or the page cannot be written.
    """
    described, others = inspect(given.path)
    if given.draft is not None:
        text = as_html(str(given.path), described, others)
        given.draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    if given.json:
        return [asdict(each) for each in described], 0
    return "\n".join([*table(described), "", summary(described, others)]), 0


def inspect(path: Path) -> tuple[list[TensorDescription], list[str]]:
    """Return the descriptions of the tensors in a checkpoint, and the names of its other entries.

    Args:
        path: a file or directory that :func:`zerocast.cli.checkpoint_files.entries` can read.

    Raises:
        InputError, OSError: if the checkpoint cannot be read.
    """
    described, others = [], []
    stored = sum(file.stat().st_size for file in sources(path) if file.is_file())
    try:
        with progress("inspect", stored) as add:
            for name, tensor in entries(path):
                if tensor is None:
                    others.append(name)
                else:
                    described.append(describe(name, tensor))
                    add(described[-1].nbytes)
    except (ZerocastError, OSError, MemoryError, RecursionError):
        raise
    except Exception as error:  # attributes in a file may shadow the methods of its objects
        raise InputError(f"{path} cannot be shown: {type(error).__name__}: {error}") from error
    return described, others


def cells(about: TensorDescription) -> list[str]:
    """Return the row of one tensor, with the columns of :data:`HEAD`."""

    def span(ends: tuple[float, float] | None) -> str:
        return "" if ends is None else f"{ends[0]:.3g} to {ends[1]:.3g}"

    def share(part: float | None) -> str:
        return "" if part is None else f"{100 * part:.2f} %"

    return [
        about.name, "x".join(map(str, about.shape)) or "scalar", about.dtype,
        about.recipe.removesuffix("()"), shown_bytes(about.nbytes),
        "" if about.amax is None else f"{about.amax:.4g}", span(about.codes), span(about.scales),
        share(about.saturated), share(about.zeros),
        str(about.not_finite) if about.not_finite else "",
    ]  # fmt: skip


def table(described: Sequence[TensorDescription]) -> list[str]:
    """Return the lines of the table, without columns that would be empty."""
    rows = [[printable(cell) for cell in cells(each)] for each in described]
    kept = [i for i in range(len(HEAD)) if i < 3 or any(row[i] for row in rows)]
    lefts = [place for place, i in enumerate(kept) if i in (0, 2, 3)]
    return aligned([HEAD[i] for i in kept], [[row[i] for i in kept] for row in rows], lefts)


def summary(described: Sequence[TensorDescription], others: Sequence[str]) -> str:
    """Return a summary of all tensors and other entries."""
    text = f"{len(described)} tensors, {shown_bytes(sum(each.nbytes for each in described))}."
    if quantized := [each for each in described if each.recipe]:
        held = sum(each.nbytes for each in quantized)
        plain = sum(2 * math.prod(each.shape) for each in quantized)
        text += (
            f" {len(quantized)} are quantized: {shown_bytes(held)}, where BF16 takes "
            f"{shown_bytes(plain)}."
        )
    if others:
        named = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        text += f" {len(others)} entries are not tensors: {printable(named)}."
    return text


def as_html(title: str, described: Sequence[TensorDescription], others: Sequence[str]) -> str:
    """Return a self-contained HTML page."""
    escape = html.escape
    head = "".join(f"<th>{escape(name)}</th>" for name in (*HEAD, "magnitudes"))
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(each)[:-1])
        + f'<td class="bad">{each.not_finite or ""}</td><td>{picture(each)}</td></tr>'
        for each in described
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(summary(described, others))} Bars show the shares of magnitudes: of codes by "
        "value or exponent, of plain values by power of two; point at one for its number.</p>\n"
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></html>\n"
    )


def picture(about: TensorDescription, width: int = 8, height: int = 40) -> str:
    """Return the histogram of a tensor as SVG."""
    if not about.bars:
        return ""
    top = max(about.bars) or 1.0
    bars = "".join(
        f'<rect x="{i * width}" y="{height * (1 - bar / top):.1f}" width="{width - 1}" '
        f'height="{height * bar / top:.1f}"><title>{html.escape(label)}: {100 * bar:.2f} %</title>'
        "</rect>"
        for i, (bar, label) in enumerate(zip(about.bars, about.labels, strict=True))
    )
    return f'<svg width="{len(about.bars) * width}" height="{height}" role="img">{bars}</svg>'
