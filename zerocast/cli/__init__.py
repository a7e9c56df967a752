"""The command line: ``python -m zerocast`` with one of ``doctor``, ``inspect FILE_OR_DIR``,
``checksums FILE_OR_DIR``, ``compare A B``, ``convert SOURCE TARGET``, ``estimate MODEL``,
``conform PACKAGE`` and ``reproduce FILE``.

doctor reports what this installation can do, what would be slow and why, and compares the sharded
cast with the unsharded one. inspect describes the tensors of a checkpoint, and checksums prints the
SHA-256 of each. compare reports which weights of two checkpoints differ, and why. estimate computes
the costs of a training step of a model. conform reports which bytes of a package differ from ours,
and why. reproduce repeats a cast in which ``verify`` found a difference.

A module of a command has ``add_arguments``, and ``run``, which takes the parsed arguments and
returns what is printed, a text or JSON values, and the exit code.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence

import zerocast
from zerocast.arguments import did_you_mean
from zerocast.cli import (
    comparison,
    conformance,
    convert_command,
    doctor,
    estimate,
    inspection,
    reproduce,
    stored_checksums,
)
from zerocast.cli.output import drafted
from zerocast.errors import ZerocastError
from zerocast.safe_files import printable

COMMANDS = {
    "doctor": (doctor, "what this installation can do, and whether its cast is right"),
    "inspect": (inspection, "the tensors of a checkpoint, and what they hold"),
    "checksums": (stored_checksums, "the SHA-256 of each tensor of a checkpoint"),
    "convert": (convert_command, "casts a checkpoint to a format of servers"),
    "compare": (comparison, "which weights of two checkpoints differ, and why"),
    "reproduce": (reproduce, "repeats a cast in which verify found a difference"),
    "estimate": (estimate, "what a training step of a model costs"),
    "conform": (conformance, "whether a package gives the same bytes"),
}
"""The modules of the commands, and what they are for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default those of the process, and return its exit code.

    The code is 1 if doctor finds something wrong, or another command a difference; 2 if a command
    fails.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zerocast",
        description="What zerocast can do here, what checkpoints hold, and what training costs.",
    )
    parser.add_argument("--version", action="version", version=f"zerocast {zerocast.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.set_defaults(run=module.run)
    words = sys.argv[1:] if arguments is None else arguments
    if problem := _misspelt(words, commands.choices):
        parser.error(problem)
    given = parser.parse_args(words)
    try:
        with drafted(given) as given.draft:
            found, code = given.run(given)
    except (ZerocastError, OSError, MemoryError, RecursionError) as error:
        problem = printable(str(error)) or "there is not enough memory for that."
        sys.stderr.write(f"{parser.prog}: {problem}\n")
        return 2
    if not isinstance(found, str):  # JSON has no NaN and no infinity
        finite = json.loads(json.dumps(found), parse_constant=lambda _: None)
        found = json.dumps(finite, indent=1)
    sys.stdout.write(found and found + "\n")  # of several ranks, one says something
    return int(code)


def _misspelt(words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return what is wrong if the command or one of its options is none, else an empty string."""
    name = words[0] if words else "-"
    if name.startswith("-"):
        return ""
    if name not in commands:
        return f"there is no command {name!r}.{did_you_mean(name, commands)}"
    options = re.findall(r"--([\w-]+)", commands[name].format_help())
    for option in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        if not any(each.startswith(option) for each in options):
            return f"{name} has no option --{option}.{did_you_mean(option, options)}"
    return ""
