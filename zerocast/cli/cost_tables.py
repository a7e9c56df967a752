"""Estimates as tables, and as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zerocast.arguments import shown_bytes
from zerocast.cli.output import aligned
from zerocast.lab.costs import Estimate

Estimates = Mapping[str, Estimate]
"""Estimates by the name of the configuration."""


def tables(estimates: Estimates) -> list[str]:
    """Return tables that compare estimates of one model on the same number of ranks, and before
    them a sentence that compares the first one with BF16.
    """
    sent = {name: each.sent_bytes for name, each in estimates.items()}
    held = {name: each.memory for name, each in estimates.items()}
    counts = {
        name: {
            "collectives": each.collectives,
            "launches of the cast": sum(each.launches.values()),
        }
        for name, each in estimates.items()
    }
    first = next(iter(estimates))
    sends, holds = (_shares(columns)[0] for columns in (sent, held))
    return [
        f"Of the bytes of the step with BF16 weights {first} sends {sends} and holds {holds}.",
        _of_bytes("sent by a rank", sent),
        "\n".join(aligned(["in a step", *counts], _rows(counts, "{:,}".format))),
        _of_bytes("held by a rank", held),
    ]


_Columns = Mapping[str, Mapping[str, int]]


def _of_bytes(title: str, columns: _Columns) -> str:
    """Return a table of bytes, their sums, and these as shares of BF16's."""
    sums = [shown_bytes(sum(each.values())) for each in columns.values()]
    rows = [*_rows(columns, shown_bytes), ["together", *sums], ["of BF16's", *_shares(columns)]]
    return "\n".join(aligned([title, *columns], rows))


def _shares(columns: _Columns) -> list[str]:
    """Return the sums of columns as shares of that of BF16."""
    whole = sum(columns["BF16"].values()) or 1
    return [f"{100 * sum(each.values()) / whole:.0f} %" for each in columns.values()]


def _rows(columns: _Columns, shown: Callable[[int], str]) -> list[list[str]]:
    """Return a row for each name whose number is not 0 in all columns."""
    names = _in_order(columns.values())
    return [[name, *(shown(each.get(name, 0)) for each in columns.values())] for name in names]


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
