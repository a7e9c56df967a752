"""The command line: ``python -m zerocast`` with one of ``doctor``, ``inspect FILE_OR_DIR``,
``checksums FILE_OR_DIR``, ``compare A B``, ``convert SOURCE TARGET``, ``estimate MODEL``,
``conform PACKAGE`` and ``reproduce FILE``.

doctor reports what this installation can do, what would be slow and why, and compares the sharded
cast with the unsharded one. inspect describes the tensors of a checkpoint, and checksums prints the
SHA-256 of each. compare reports which weights of two checkpoints differ, and why. estimate computes
the costs of a training step of a model. These print text, or JSON for other programs. conform
reports which bytes of a package differ from ours, and why. reproduce repeats a cast in which
``verify`` found a difference.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import zerocast
from zerocast.cli import (
    checkpoint_files,
    comparison,
    conformance,
    convert_command,
    doctor,
    estimate,
    inspection,
    reproduce,
    stored_checksums,
)
from zerocast.cli.output import add_output, drafted
from zerocast.errors import ZerocastError
from zerocast.safe_files import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default those of the process, and return its exit code.

    The code is 1 if doctor finds something wrong, or reproduce, conform or compare a difference; 2
    if a command fails.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zerocast",
        description="What zerocast can do here, what checkpoints hold, and what training costs.",
    )
    parser.add_argument("--version", action="version", version=f"zerocast {zerocast.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor", help="what this installation can do, and whether its cast is right"
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.set_defaults(run=lambda given: doctor.report(as_json=given.json))
    look = commands.add_parser("inspect", help="the tensors of a checkpoint, and what they hold")
    held = "of torch.save or safetensors, or a directory of these or of torch's DCP"
    look.add_argument("path", type=Path, metavar="FILE_OR_DIR", help=held)
    look.add_argument("--json", action="store_true", help="print JSON instead of a table")
    look.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")
    add_output(look, "html", reads=lambda given: checkpoint_files.sources(given.path))
    look.set_defaults(
        run=lambda given: inspection.inspect(given.path, as_json=given.json, page=given.draft)
    )
    sums = commands.add_parser("checksums", help="the SHA-256 of each tensor of a checkpoint")
    stored = "of safetensors, or a directory of these"
    sums.add_argument("path", type=Path, metavar="FILE_OR_DIR", help=stored)
    sums.add_argument("--json", action="store_true", help="print JSON instead of lines")
    sums.set_defaults(run=lambda given: stored_checksums.checksums(given.path, as_json=given.json))
    cast = commands.add_parser("convert", help="casts a checkpoint to a format of servers")
    convert_command.add_arguments(cast)
    cast.set_defaults(run=convert_command.run)
    two = commands.add_parser("compare", help="which weights of two checkpoints differ, and why")
    comparison.add_arguments(two)
    two.set_defaults(run=comparison.run)
    again = commands.add_parser("reproduce", help="a cast in which verify found a difference")
    again.add_argument("path", type=Path, metavar="FILE", help="that verify left")
    again.set_defaults(run=lambda given: reproduce.reproduce(given.path))
    cost = commands.add_parser("estimate", help="what a training step of a model costs")
    estimate.add_arguments(cost)
    cost.set_defaults(run=estimate.run)
    ruler = commands.add_parser("conform", help="whether a package gives the same bytes")
    conformance.add_arguments(ruler)
    ruler.set_defaults(run=conformance.run)
    given = parser.parse_args(arguments)
    try:
        with drafted(given) as given.draft:
            text, code = given.run(given)
    except (ZerocastError, OSError, MemoryError, RecursionError) as error:
        problem = printable(str(error)) or "there is not enough memory for that."
        sys.stderr.write(f"{parser.prog}: {problem}\n")
        return 2
    sys.stdout.write(text and text + "\n")  # of several ranks, one says something
    return int(code)
