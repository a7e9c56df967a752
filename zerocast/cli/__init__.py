"""The command line: ``python -m zerocast doctor`` and ``python -m zerocast inspect FILE_OR_DIR``.

doctor says what this installation can do, what would be slow and why, and compares the sharded cast
with the unsharded one. inspect describes the tensors of a checkpoint. Both print text, or JSON for
other programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zerocast.cli import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments``, by default those of the process; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m zerocast", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor", help="what this installation can do, and whether its cast is right"
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.set_defaults(run=lambda given: doctor.report(as_json=given.json))
    given = parser.parse_args(arguments)
    text, code = given.run(given)
    sys.stdout.write(text + "\n")
    return int(code)
