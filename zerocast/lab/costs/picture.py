"""Draws estimates: bytes sent, memory and seconds, beside each other and over ranks.

It needs matplotlib, of the extra [examples].
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerocast import BackendError
from zerocast.lab.costs.cost_tables import Estimates
from zerocast.lab.costs.machine import Machine

_Group = Mapping[str, Mapping[str, float]]
"""The parts of each bar of some ranks, by name."""


def draw(by_ranks: Sequence[Estimates], machine: Machine, title: str, path: Path) -> None:
    """Write a PNG of stacked bars, a group for each number of data-parallel ranks.

    Args:
        by_ranks: the estimates of one number of ranks each.
        machine: the machine whose seconds are shown.
        title: above them.
        path: the file.

    Raises:
        BackendError: without matplotlib.
        OSError: where the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "a picture is drawn by matplotlib, which is not installed; pip install "
            "'zerocast[examples]', or leave --png out."
        ) from error
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels: tuple[tuple[str, float, list[_Group]], ...] = (
        ("GB that a rank sends in a step", 1e9, [_each(e, "sent_bytes") for e in by_ranks]),
        ("GB that a rank holds", 1e9, [_each(e, "memory") for e in by_ranks]),
        (
            "seconds of a step",
            1.0,
            [{name: each.seconds(machine) for name, each in e.items()} for e in by_ranks],
        ),
    )
    ranks = [f"{next(iter(estimates.values())).dp:,}" for estimates in by_ranks]
    for axes, (label, unit, groups) in zip(figure.subplots(1, 3), panels, strict=True):
        _bars(axes, groups, unit)
        names = list(groups[0])
        axes.set_xticks(
            [g * (len(names) + 1) + i for g in range(len(groups)) for i in range(len(names))],
            [f"{name}\n{count}" for count in ranks for name in names],
            fontsize=7,
        )
        axes.set_xlabel("data-parallel ranks")
        axes.set_title(label)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _each(estimates: Estimates, attribute: str) -> _Group:
    return {name: getattr(each, attribute) for name, each in estimates.items()}


def _bars(axes: Any, groups: Sequence[_Group], unit: float) -> None:
    """Stack the parts of every bar; parts of one name have one colour and one entry in the
    legend; those below a hundredth of the highest bar are summed up.
    """
    highest = max(sum(parts.values()) for group in groups for parts in group.values())
    names = {
        name
        for group in groups
        for parts in group.values()
        for name, value in parts.items()
        if value >= highest / 100
    }
    columns = [
        (g * (len(group) + 1) + i, parts)
        for g, group in enumerate(groups)
        for i, parts in enumerate(group.values())
    ]
    places, bottoms = [place for place, _ in columns], [0.0] * len(columns)
    for name in [*sorted(names), "other"]:
        heights = [
            sum(v for k, v in parts.items() if (k if k in names else "other") == name) / unit
            for _, parts in columns
        ]
        if any(heights):
            axes.bar(places, heights, bottom=bottoms, label=name, width=0.9)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
