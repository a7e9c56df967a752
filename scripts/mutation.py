"""Changes the code line by line, and says which changes no test notices.

    python scripts/mutation.py                      # all mutants of all of TESTS
    python scripts/mutation.py cast --sample 400    # drawn, of each file its share
    python scripts/mutation.py layout --only owners

A mutant is one change that scripts/mutation_operators.py makes: an operator, a constant, a
condition the other way round, two arguments exchanged, a statement or a result left out. Left alone
are strings and errors' texts, ``assert`` (what we assume of ourselves) and annotations. The tests
of TESTS that reach the changed line run until one fails, the fastest of each test function first,
in a process forked from one that has imported torch; a mutant of a header is compiled. What no test
notices has survived. scripts/results/mutation.txt names such mutants one by one, with the
reason; the score is given with and without those that are equivalent, which no test can notice.

Why not a library: mutmut leaves out functions that are decorated, properties among them, and what
runs when a module is imported, and chooses tests by function; cosmic-ray imports torch anew for
each mutant; neither changes C++. universalmutator does, but knows lines of text, strings and types
among them: of layout/, numerics/ and cast/ it makes 36,617 mutants that compile, in the place of
2,805.

Python 3.11 or later, Linux. Of the solver's proofs (tests/layout/test_proofs.py) nothing is run.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import sympy  # noqa: F401  (what is imported here, each mutant finds imported)
import torch
from coverage import Coverage
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mutation_operators import Mutant, mutants_of  # noqa: E402

TESTS = {
    "layout": ["tests/layout", "tests/cast/test_boundary_exchange.py"],
    "numerics": ["tests/numerics"],
    "cast": ["tests/cast", "tests/optim/test_adamw_cast.py"],
    "headers": ["tests/backends/test_index_headers.py"],
}
"""What notices the mutants of each part: packages of zerocast, and :data:`HEADERS`."""
HEADERS = "arithmetic/tables cpu/launch cpu/scale_rows cpu/strips cuda/planes cuda/tiles"
OPTIONS = [
    "-mnot (mpi or slow or nightly or integration or cuda)",
    "-knot (proofs or life or simulation or random_partitions or many_ranks)",  # take longest
    "-Wignore:Module already imported",  # whose assertions tell less
    *("-x", "--timeout=0", "-pno:cacheprovider", "-pno:faulthandler", "--hypothesis-profile=brief"),
]
SECONDS, SLOWEST = 20.0, 5.0
"""CPU time of the tests of one mutant, and of the slowest of them, while lines are traced."""
STILLBORN = "setup of tests/backends/test_index_headers.py"
"""What fails where a header does not compile: such a mutant does not count."""


class Session:
    """A session of pytest, and its plugin: runs tests up to the first that fails.

    Args:
        tests: these, in this order: files, folders, or tests by name.
        traced: the files of which is noted what reaches their lines.

    Attributes:
        failed: the name of the test that fails, or nothing.
        seconds: of CPU time of each test.
        reached_by: the tests by file and line.
    """

    def __init__(self, tests: Iterable[str], traced: str = "nothing") -> None:
        self.failed, self.seconds = "", dict[str, float]()
        trace = Coverage(data_file=None, include=traced)
        trace.set_option("run:disable_warnings", ["no-data-collected"])
        with redirect_stdout(io.StringIO()) as text, redirect_stderr(text), trace.collect():
            code = pytest.main([*OPTIONS, *tests], [self])
        self.failed = self.failed or (f"pytest: {code!r}" if code else "")
        data = trace.get_data()
        self.reached_by = {path: data.contexts_by_lineno(path) for path in data.measured_files()}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        Coverage.current().switch_context(nodeid)
        self.seconds[nodeid] = -time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] += time.process_time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.when} of {report.nodeid}"

    def reaching(self, mutant: Mutant) -> list[str]:
        """The fastest test of each function, then the second of each; so many seconds of them."""
        lines = self.reached_by.get(str(ROOT / mutant.path), {})
        # A line that is part of a longer one has the tests of that; what is imported has all.
        above = (set(lines.get(line, ())) - {""} for line in range(mutant.line, 0, -1))
        names = next(filter(None, above), ()) if mutant.function else self.seconds
        functions, chosen, left = defaultdict(list), [], SECONDS
        for name in sorted(names, key=self.seconds.__getitem__):
            functions[name.partition("[")[0]].append(name)
        for name in filter(None, chain(*zip_longest(*functions.values()))):
            if not chosen or self.seconds[name] < min(SLOWEST, left):
                left -= self.seconds[name]
                chosen.append(name)
        return chosen


def put(mutant: Mutant, folder: str) -> None:
    """Let the import of a module find the mutant; or the compiler, that of a header."""
    path, loader = str(ROOT / mutant.path), importlib.machinery.SourceFileLoader
    if path.endswith(".py"):
        original, changed = loader.get_code, compile(mutant.source, path, "exec")
        loader.get_code = lambda self, name: changed if self.path == path else original(self, name)
        return
    from tests.backends.test_index_headers import ROOTS  # late: it imports zerocast

    header = Path(folder, *Path(mutant.path).parts[1:])
    header.parent.mkdir()
    header.write_text(mutant.source)
    ROOTS.insert(0, folder)


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What ``work()`` returns in a process of its own, or how that ended: it died, or took more CPU
    time, or twenty times as long.
    """
    context = multiprocessing.get_context("fork")
    answer, to = context.Pipe(duplex=False)

    def child() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
        to.send(work())

    process = context.Process(target=child)
    process.start()
    to.close()
    try:
        return answer.recv() if answer.poll(20 * seconds) else "takes too long"
    except EOFError:
        return "dies"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()


def drawn(part: str, args: argparse.Namespace) -> list[list[Mutant]]:
    """The mutants of each file of a part that are to be tried."""
    names = [f"cuda_src/{name}.h" for name in HEADERS.split() if part == "headers"]
    paths = [*sorted(ROOT.glob(f"zerocast/{part}/*.py")), *(ROOT / name for name in names)]
    files = [list(mutants_of(str(path.relative_to(ROOT)), path.read_text())) for path in paths]
    share, draw = (args.sample or sys.maxsize) / sum(map(len, files)), random.Random(args.seed)
    if share < 1:
        files = [draw.sample(each, round(len(each) * share)) for each in files]
    return [each for each in files if each and args.only in each[0].path]


def survey(part: str, args: argparse.Namespace) -> None:
    """Try the mutants that no earlier call has killed, and print what is known of all."""
    files, known = drawn(part, args), found(args.out)
    tests = forked(lambda: Session(TESTS[part], str(ROOT / "zerocast" / part / "*")), 3600)
    assert isinstance(tests, Session), tests
    assert not tests.failed, f"without a mutant: {tests.failed}"

    def killer(mutant: Mutant) -> str:
        names = tests.reaching(mutant)

        def failed() -> str:
            put(mutant, folder)
            return Session(names).failed

        with tempfile.TemporaryDirectory() as folder:
            return forked(failed, 9 + 3 * sum(map(tests.seconds.__getitem__, names)))

    for mutant in chain(*files):
        if not known.get(mutant[:3]):
            record = {"mutant": mutant[:3], "line": mutant.line, "killed_by": killer(mutant)}
            with args.out.open("a") as to:
                print(json.dumps(record), file=to)
    report(part, files, found(args.out))


def report(part: str, files: Sequence[list[Mutant]], known: dict[tuple[str, ...], str]) -> None:
    """Print the scores, and what survived."""
    everything, reasons = list(chain(*files)), explained()
    line = "{:40}{:>8}{:>8}{:>12}{:>8}{:>11}"
    print(line.format("file", "mutants", "killed", "equivalent", "score", "of others"))
    for row in [*files, everything]:
        keys = {m[:3] for m in row if not known[m[:3]].startswith(STILLBORN)}
        killed = sum(bool(known[key]) for key in keys)
        same = sum(not known[key] and reasons[key].startswith("equivalent") for key in keys)
        scores = [f"{killed / max(of, 1):.1%}" for of in (len(keys), len(keys) - same)]
        name = part if row is everything else row[0].path
        print(line.format(name, len(keys), killed, same, *scores))
    for m in everything:
        if not known[m[:3]]:
            print(f"{m.path}:{m.line} {m.function}\n    {m.change}\n    {reasons[m[:3]]}")


def found(out: Path) -> dict[tuple[str, ...], str]:
    """What killed each mutant that has been tried; nothing where it survived."""
    records = map(json.loads, out.read_text().splitlines() if out.exists() else [])
    return {tuple(record["mutant"]): record["killed_by"] for record in records}


def explained() -> defaultdict[tuple[str, ...], str]:
    """What scripts/results/mutation.txt says of each mutant that it names."""
    why = defaultdict(lambda: "NOT EXPLAINED")
    for block in (ROOT / "scripts/results/mutation.txt").read_text().split("\n\n"):
        if block.startswith(("zerocast/", "cuda_src/")):
            first, change, *reason = block.splitlines()
            path, _, function = first.partition(" ")
            why[path, function, change.strip()] = " ".join(map(str.strip, reason))
    return why


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(TESTS), metavar="PART")
    parser.add_argument("--sample", type=int, help="mutants of a part, drawn by file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="of a part the files that are named so")
    parser.add_argument("--out", type=Path, default=Path("mutation.jsonl"),
                        help="what was found: the killed are not tried again")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Of conftest.py's, without making failing examples smaller.
    settings.register_profile("brief", derandomize=True, database=None, deadline=None,
                              phases=[Phase.explicit, Phase.generate])  # fmt: skip
    for part in args.parts:
        survey(part, args)


if __name__ == "__main__":
    main()
