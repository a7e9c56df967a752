"""inspect: shows the tensors of a checkpoint as a table, as JSON, or as a page with histograms."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zerocast.arguments import counted, shown_bytes
from zerocast.cli.checkpoint_files import entries
from zerocast.cli.description import TensorDescription, describe
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
th:first-child, td:first-child, td:nth-child(4) { text-align: left }
td:first-child { font-family: ui-monospace, monospace }
.bad { color: #b00020; font-weight: bold }
rect { fill: #3367d6 }
"""


def inspect(path: Path, *, as_json: bool = False, page: Path | None = None) -> tuple[str, int]:
    """Return the output for the checkpoint at ``path``, and the exit code.

    Args:
        path: a file or directory that :func:`zerocast.cli.checkpoint_files.entries` can read.
        as_json: whether to print a list of :class:`TensorDescription` instead of a table.
        page: a file to which an HTML page is also written.

    Raises:
        InputError, OSError: if the checkpoint cannot be read, or the page cannot be written.
    """
    described, others = [], []
    try:
        for name, tensor in entries(path):
            if tensor is None:
                others.append(name)
            else:
                described.append(describe(name, tensor))
    except (ZerocastError, OSError, MemoryError, RecursionError):
        raise
    except Exception as error:  # attributes in a file may shadow the methods of its objects
        raise InputError(f"{path} cannot be shown: {type(error).__name__}: {error}") from error
    if page is not None:
        text = as_html(str(path), described, others)
        page.write_text(text, encoding="utf-8", errors="backslashreplace")
    if as_json:
        return json.dumps([asdict(each) for each in described], indent=1), 0
    return "\n".join([*table(described), "", summary(described, others)]), 0


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
    """Return the lines of the table."""
    rows = [list(HEAD), *([printable(cell) for cell in cells(each)] for each in described)]
    kept = [i for i in range(len(HEAD)) if i < 5 or any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    lines = [
        "  ".join(
            row[i].ljust(widths[i]) if i in (0, 2, 3) else row[i].rjust(widths[i]) for i in kept
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def summary(described: Sequence[TensorDescription], others: Sequence[str]) -> str:
    """Return a summary of all tensors and other entries."""
    quantized = [each for each in described if each.recipe]
    text = (
        f"{counted(len(described), 'tensor')}, "
        f"{shown_bytes(sum(each.nbytes for each in described))}; "
        f"{len(quantized)} are quantized, {shown_bytes(sum(each.nbytes for each in quantized))}."
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
