"""Estimates as Markdown tables, also readable in a terminal, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerocast.lab.costs.estimation import Estimate

Estimates = Mapping[str, Estimate]
"""Estimates by the name of the configuration."""


def tables(estimates: Estimates) -> str:
    """Return tables that compare estimates of one model on the same number of ranks."""
    sent = {name: each.sent_bytes for name, each in estimates.items()}
    memory = {name: each.memory for name, each in estimates.items()}
    counts = {
        name: {
            "collectives": each.collectives,
            "launches of the cast": sum(each.launches.values()),
        }
        for name, each in estimates.items()
    }
    parts = [
        _table("bytes that a rank sends", sent),
        _table("", counts, total=False),
        _table("bytes that a rank holds", memory),
    ]
    return "\n\n".join(parts)


def _table(title: str, columns: Mapping[str, Mapping[str, int]], *, total: bool = True) -> str:
    """Return a table with ``columns``, and a row for each name that is not 0 in all of them."""
    names = _in_order(columns.values())
    rows = [[name, *(f"{each.get(name, 0):,}" for each in columns.values())] for name in names]
    if total:
        rows.append(["**together**", *(f"{sum(each.values()):,}" for each in columns.values())])
    return markdown([title, *columns], rows)


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
