"""Estimates as tables for a terminal, and as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zerocast.arguments import shown_bytes
from zerocast.lab.costs.estimation import Estimate

Estimates = Mapping[str, Estimate]
"""Estimates by the name of the configuration."""


def tables(estimates: Estimates) -> str:
    """Return tables that compare estimates of one model on the same number of ranks."""
    counts = {
        name: {
            "collectives": each.collectives,
            "launches of the cast": sum(each.launches.values()),
        }
        for name, each in estimates.items()
    }
    return "\n\n".join(
        [
            _of_bytes("sent by a rank", {name: e.sent_bytes for name, e in estimates.items()}),
            _aligned(["", *counts], _rows(counts, str)),
            _of_bytes("held by a rank", {name: e.memory for name, e in estimates.items()}),
        ]
    )


_Columns = Mapping[str, Mapping[str, int]]


def _of_bytes(title: str, columns: _Columns) -> str:
    """Return a table of bytes, their sums, and these as shares of BF16's, if that is a column."""
    sums = {name: sum(each.values()) for name, each in columns.items()}
    rows = [*_rows(columns, shown_bytes), ["together", *map(shown_bytes, sums.values())]]
    if "BF16" in sums:
        rows.append(["of BF16's", *(f"{each / sums['BF16']:.0%}" for each in sums.values())])
    return _aligned([title, *columns], rows)


def _rows(columns: _Columns, shown: Callable[[int], str]) -> list[list[str]]:
    """Return a row for each name whose number is not 0 in all columns."""
    names = _in_order(columns.values())
    return [[name, *(shown(each.get(name, 0)) for each in columns.values())] for name in names]


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal whose columns, except the first, are right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _in_order(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all columns, as far as possible in the order of each column."""
    names: list[str] = []
    for column in columns:
        place = 0
        for name in (name for name, value in column.items() if value):
            if name in names:
                place = names.index(name) + 1
            else:
                names.insert(place, name)
                place += 1
    return names


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns, except the first, are right-aligned."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)])

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {line(row)} |" for row in (head, rule, *rows))


def as_json(estimates: Estimates) -> dict[str, Any]:
    """Return the contents of estimates as JSON values."""
    return {
        name: {
            **vars(each),
            "traffic": _traffic(each.traffic),
            "tp_traffic": _traffic(each.tp_traffic),
        }
        for name, each in estimates.items()
    }


def _traffic(traffic: Mapping[tuple[str, str], Any]) -> list[dict[str, Any]]:
    counted = ("calls", "payload_bytes", "sent_bytes")
    return [
        {"what": what, "kind": kind, **{name: getattr(each, name) for name in counted}}
        for (what, kind), each in traffic.items()
    ]
