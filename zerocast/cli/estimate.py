"""estimate: computes the bytes, memory and time of a training step, compared with BF16 and FP8;
fit: measures the costs of this machine.
"""

import argparse
import json
from pathlib import Path

import torch

from zerocast.arguments import check_integer
from zerocast.cli.output import add_output
from zerocast.comm import run_in_process
from zerocast.lab.costs import MODELS, Machine, StepOptions, compare_gathers
from zerocast.lab.costs import fit as fit_machine
from zerocast.lab.costs.cost_tables import as_json, markdown, tables
from zerocast.lab.costs.picture import draw
from zerocast.recipes import RECIPES

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    named = ", ".join(MODELS)
    parser.add_argument("model", metavar="MODEL", help=f"{named}, or a config.json of transformers")
    add = parser.add_argument
    add("--recipe", default="nvfp4", choices=list(RECIPES), help="of the weights (nvfp4)")
    add("--dp", default=[1024], type=numbers, metavar="N,...", help="data-parallel ranks (1024)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    add("--rank", type=int, default=0, help="which data-parallel rank (0)")
    names = lambda text: text.split(",")  # noqa: E731
    add("--filter", type=names, default=[], metavar="NAME,...", help="layers that stay BF16")
    add("--exchange", default="boundary", choices=["boundary", "full"], help="of amaxes (boundary)")
    add("--gradient-dtype", choices=list(DTYPES), help="in which gradients travel (their own)")
    add("--overlap-all-gather", action="store_true", help="gather in buckets")
    add("--overlap-grad-reduce", action="store_true", help="send gradients in buckets (ZeRO-2)")
    add("--bucket-size", type=int, metavar="ELEMENTS", help="of a bucket (2^23 with an overlap)")
    add("--backward-passes", type=int, default=1, help="of a step (1)")
    add("--device", default="cuda", choices=["cuda", "cpu"], help="whose launches (cuda)")
    add("--machine", default="h100", help="h100, or a file that fit wrote (h100)")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--png", type=Path, metavar="FILE", help="draw a picture, too; needs matplotlib")
    add_output(parser, "png", reads=lambda given: [Path(given.model), Path(given.machine)])


def numbers(text: str) -> list[int]:
    """Return the numbers in a comma-separated argument. Separate arguments are not possible, since
    MODEL may follow the options.
    """
    return [int(each) for each in text.split(",")]


def run(given: argparse.Namespace) -> tuple[str, int]:
    """Return the output and the exit code.

    Raises:
        ZerocastError: for wrong arguments, or if a needed package is not installed.
        OSError: if a file cannot be read or written.
    """
    machine = Machine.load(given.machine)
    options = StepOptions(
        overlap_all_gather=given.overlap_all_gather,
        bucket_size=given.bucket_size,
        gradient_dtype=DTYPES.get(given.gradient_dtype),
        overlap_grad_reduce=given.overlap_grad_reduce,
        backward_passes=given.backward_passes,
        exchange=given.exchange,
        device=given.device,
    )
    by_ranks = [
        compare_gathers(
            given.model,
            given.recipe,
            dp,
            rank=given.rank,
            tp=given.tp,
            filter_fqns=given.filter,
            options=options,
        )
        for dp in given.dp
    ]
    if given.draft is not None:
        draw(by_ranks, machine, f"{given.model}, {given.tp} tensor-parallel ranks", given.draft)
    if given.json:
        return json.dumps([as_json(each, machine) for each in by_ranks], indent=1), 0
    pages = []
    for dp, estimates in zip(given.dp, by_ranks, strict=True):
        elements = next(iter(estimates.values())).elements
        head = (
            f"{given.model}: rank {given.rank} of {dp:,} data-parallel ranks, {given.tp} of tensor "
            f"parallelism; {elements:,} elements a rank."
        )
        pages += [head, tables(estimates, machine)]
    return "\n\n".join(pages), 0


def fit(path: Path, recipe: str, ranks: int) -> tuple[str, int]:
    """Write the costs of this machine to ``path``; return the errors of a step, and the exit code.

    Args:
        path: the file.
        recipe: the name of the weights' recipe.
        ranks: the number of ranks, which are threads of this process.

    Raises:
        InputError: if ``ranks`` is not 1 to 64.
        OSError: if the file cannot be written.
    """
    check_integer("ranks", ranks, 1, 64)
    machine, checks = run_in_process(ranks, lambda comm: fit_machine(comm, recipe))[0]
    machine.save(path)
    timed = [(check.phase, check.measured, check.estimated) for check in checks]
    timed.append(("**together**", sum(t[1] for t in timed), sum(t[2] for t in timed)))
    rows = [[name, f"{1e3 * a:.3f}", f"{1e3 * b:.3f}", f"{b / a - 1:+.0%}"] for name, a, b in timed]
    head = ["a step that was not fitted", "measured ms", "estimated ms", "error"]
    return f"{machine.name}\n\n{markdown(head, rows)}", 0
