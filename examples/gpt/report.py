"""What a launch leaves behind: a table, a JSON record, a picture of losses and bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpt.training import RECIPES, Run, Settings
from zerocast.arguments import shown_bytes
from zerocast.recipes import in_words

# The rows of the closing table, and the phases of a step that each adds up. Clipping begins with
# the exchange of gradients, which the step then has behind it. Delayed scaling casts in the pass
# that takes the amaxes; 4-over-6 chooses scales, and exchanges what it chooses by.
PHASES = {
    "forward and backward": ["forward_backward"],
    "gradients and clipping": ["clip", "reduce_scatter"],
    "optimizer": ["optimizer"],
    "amax": ["partial_amax", "partial_select", "select"],
    "all-reduce": ["reduce_amax", "reduce_candidates"],
    "cast": ["compute_scale", "partial_cast", "store_plain"],
    "all-gather": ["all_gather"],
    "post-processing": ["post_all_gather_processing"],
}

SMOOTHED = 10
"""Steps that the shown training loss is a mean over; one step's is noise."""


def title(settings: Settings, ranks: int) -> str:
    """What was trained, and how."""
    dtype = str(settings.dtype).removeprefix("torch.")
    return (
        f"GPT of 3.3 million weights, {ranks} rank{'s' * (ranks > 1)}, {settings.steps} steps of "
        f"{settings.batch} sequences, seed {settings.seed}, {dtype}"
        + ("; activations and gradients quantized" if settings.autocast else "")
        + ("; gathers overlap the forward" if settings.overlap else "")
    )


def legend(name: str) -> str:
    """A recipe's name, and what it means."""
    recipe = RECIPES[name]
    return f"{name}: {'not quantized' if recipe is None else in_words(recipe)}"


def print_table(runs: Sequence[Run], settings: Settings, ranks: int) -> None:
    """One column a run; numbers are rank 0's."""
    table = Table(title=title(settings, ranks))
    table.add_column("per rank")
    for run in runs:
        table.add_column(run.recipe, justify="right")

    def row(name: str, cells: Sequence[str], **options: bool) -> None:
        table.add_row(name, *cells, **options)

    training = [f"{smoothed_losses(r)[-1]:.3f}" for r in runs]
    row("training loss at the end (nats a byte)", training)
    validation = [f"{r.validation_loss:.3f}" for r in runs]
    row("validation loss (nats a byte)", validation, end_section=True)
    for kind in runs[0].sent_bytes:
        cells = [shown_bytes(r.sent_bytes[kind]) for r in runs]
        row(f"sent a step, {kind.replace('_', '-')}", cells, end_section=kind == "all_gather")
    for kind in runs[0].held_bytes:
        cells = [shown_bytes(r.held_bytes[kind]) for r in runs]
        row(f"held, {kind.replace('_', ' ')}", cells, end_section=kind == "optimizer_state")
    for name, phases in PHASES.items():
        seconds = [sum(r.seconds.get(phase, 0.0) for phase in phases) for r in runs]
        row(f"time a step, {name} (ms)", [f"{1e3 * s:.2f}" for s in seconds])
    row("time a step, all of it (ms)", [f"{1e3 * sum(r.seconds.values()):.2f}" for r in runs])
    Console(width=max(100, 46 + 17 * len(runs))).print(table)
    for run in runs:
        print(legend(run.recipe))


def smoothed_losses(run: Run) -> list[float]:
    """At every step the mean training loss of the last :data:`SMOOTHED` steps."""
    ends = range(1, len(run.losses) + 1)
    windows = [run.losses[max(0, end - SMOOTHED) : end] for end in ends]
    return [sum(window) / len(window) for window in windows]


def write_record(path: Path, runs: Sequence[Run], settings: Settings, ranks: int) -> None:
    """Everything measured, as JSON."""
    record = {
        "ranks": ranks,
        "settings": asdict(settings) | {"dtype": str(settings.dtype)},
        "runs": [
            asdict(run)
            | {"training_loss": smoothed_losses(run)[-1], "validation_loss": run.validation_loss}
            for run in runs
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def draw(path: Path, runs: Sequence[Run], heading: str) -> None:
    """The validation loss over steps, below it what each run has more than the first (bf16, where
    that is compared), and beside them what a rank gathers and holds. A recipe has one colour, in
    the pictures of all launches.
    """
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(heading)
    colors = {name: f"C{i}" for i, name in enumerate(RECIPES)}
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2), height_ratios=(2, 1))
    losses = figure.add_subplot(grid[0, 0])
    gaps = figure.add_subplot(grid[1, 0], sharex=losses)
    base = dict(runs[0].validation_losses)
    for run in runs:
        steps, values = zip(*run.validation_losses, strict=True)
        color = colors[run.recipe]
        losses.plot(steps, values, ".-", color=color, label=legend(run.recipe))
        above = [v - base[step] for step, v in run.validation_losses]
        gaps.plot(steps, above, ".-", color=color)
    losses.set(ylabel="nats a byte", title="validation loss")
    gaps.set(xlabel="step", ylabel="nats a byte", title=f"validation loss above {runs[0].recipe}'s")
    figure.legend(loc="outside lower center", ncols=2)
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)

    names = [run.recipe for run in runs]
    of_rank = {
        "sent by a rank to all-gather": [r.sent_bytes["all_gather"] / 1e6 for r in runs],
        "weights held by a rank": [r.held_bytes["weights"] / 1e6 for r in runs],
    }
    for place, (what, megabytes) in enumerate(of_rank.items()):
        axes = figure.add_subplot(grid[place, 1])
        bars = axes.barh(names, megabytes, color=[colors[name] for name in names])
        axes.bar_label(bars, fmt="{:.2f}", padding=3)
        axes.invert_yaxis()  # the first run on top
        axes.set(title=what, xlabel="MB", xlim=(0, 1.2 * max(0.1, *megabytes)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
