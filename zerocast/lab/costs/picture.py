"""Draws estimates: bytes sent, memory and seconds, by configuration and number of ranks.

It needs matplotlib, which the extra [examples] installs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from zerocast import BackendError
from zerocast.lab.costs.cost_tables import Estimates
from zerocast.lab.costs.machine import Machine


def draw(by_ranks: Sequence[Estimates], machine: Machine, title: str, path: Path) -> None:
    """Write a PNG of stacked bars, one for each estimate.

    Args:
        by_ranks: for each number of ranks, its estimates.
        machine: the machine whose seconds are shown.
        title: the title of the picture.
        path: the file.

    Raises:
        BackendError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "a picture is drawn by matplotlib, which is not installed; pip install "
            "'zerocast[examples]', or leave --png out."
        ) from error
    bars = {f"{name}\n{one.dp:,}": one for each in by_ranks for name, one in each.items()}
    panels = {
        "GB that a rank sends in a step": [_in_gb(each.sent_bytes) for each in bars.values()],
        "GB that a rank holds": [_in_gb(each.memory) for each in bars.values()],
        "seconds of a step": [each.seconds(machine) for each in bars.values()],
    }
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (label, parts) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        bottoms = [0.0] * len(parts)
        for name in sorted({name for each in parts for name, value in each.items() if value}):
            heights = [each.get(name, 0.0) for each in parts]
            axes.bar(list(bars), heights, bottom=bottoms, label=name)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axes.set_title(label)
        axes.set_xlabel("data-parallel ranks")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _in_gb(parts: Mapping[str, int]) -> dict[str, float]:
    return {name: nbytes / 1e9 for name, nbytes in parts.items()}
