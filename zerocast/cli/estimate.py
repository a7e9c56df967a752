"""estimate: computes the bytes, launches and memory of a step, compared with BF16 and FP8."""

import argparse
from typing import Any

import torch

from zerocast.cli.cost_tables import as_json, tables
from zerocast.cli.output import progress
from zerocast.lab.costs import MODELS, StepOptions, compare_gathers
from zerocast.recipes import NAMED, as_recipe, in_words

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    named = ", ".join(MODELS)
    parser.add_argument("model", metavar="MODEL", help=f"{named}, or a config.json of transformers")
    add = parser.add_argument
    add("--recipe", default="nvfp4", help=f"of the weights (nvfp4): {', '.join(NAMED)}")
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


def numbers(text: str) -> list[int]:
    """Return the numbers in a comma-separated argument. Separate arguments are not possible, since
    MODEL may follow the options.

    Raises:
        ArgumentTypeError: for anything else.
    """
    if not all(each.isdecimal() for each in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be numbers such as 8,64, got {text!r}")
    return [int(each) for each in text.split(",")]


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code.

    Raises:
        ZerocastError: for wrong arguments, or if a needed package is not installed.
        OSError: if a file cannot be read.
    """
    options = StepOptions(
        overlap_all_gather=given.overlap_all_gather,
        bucket_size=given.bucket_size,
        gradient_dtype=DTYPES.get(given.gradient_dtype),
        overlap_grad_reduce=given.overlap_grad_reduce,
        backward_passes=given.backward_passes,
        exchange=given.exchange,
        device=given.device,
    )
    with progress("estimate", 3 * len(given.dp), "steps") as add:
        by_ranks = [
            compare_gathers(
                given.model,
                given.recipe,
                dp,
                done=add,
                rank=given.rank,
                tp=given.tp,
                filter_fqns=given.filter,
                options=options,
            )
            for dp in given.dp
        ]
    if given.json:
        return [as_json(each) for each in by_ranks], 0
    pages = []
    for dp, estimates in zip(given.dp, by_ranks, strict=True):
        elements = next(iter(estimates.values())).elements
        head = (
            f"{given.model}: rank {given.rank} of {dp:,} data-parallel ranks, {given.tp} of tensor "
            f"parallelism; {elements:,} elements a rank.\n"
            f"{given.recipe}: {in_words(as_recipe(given.recipe))}. FP8: one scale a tensor."
        )
        pages += [head, *tables(estimates)]
    return "\n\n".join(pages), 0
