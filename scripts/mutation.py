"""Changes the code line by line, and says which changes no test notices.

    python scripts/mutation.py                      # all mutants of all of TESTS
    python scripts/mutation.py cast --sample 400    # drawn, of each file its share
    python scripts/mutation.py layout --only owners

A mutant is one change that scripts/mutation_operators.py makes: an operator, a constant, a
condition the other way round, two arguments exchanged, a statement or a result left out. Left alone
are strings and errors' texts, ``assert`` (what we assume of ourselves) and annotations. The tests
of TESTS that reach the changed line run until one fails, the fastest of each test function first,
in a process forked from one that has imported everything; a mutant of a header is compiled. What no
test notices has survived. scripts/results/mutation.txt names such mutants one by one, with the
reason; the score is given with and without those that are equivalent, which no test can notice.

Why not a library: mutmut leaves out functions that are decorated, properties among them, and what
runs when a module is imported, and chooses tests by function; cosmic-ray imports torch anew for
each mutant; neither changes C++.

Python 3.11 or later, Linux. Of the solver's proofs (tests/layout/test_proofs.py) nothing is run.
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mutation_operators import Mutant, mutants_of  # noqa: E402

TESTS = {
    "layout": ["tests/layout", "tests/cast/test_boundary_exchange.py"],
    "formats": ["tests/formats"],
    "cast": ["tests/cast", "tests/optim/test_adamw.py"],
    "headers": ["tests/backends/test_index_headers.py"],
}
"""What notices the mutants of each part: packages of zerocast, and :data:`HEADERS`."""
HEADERS = "arithmetic/tables cpu/launch cpu/scale_rows cpu/strips cuda/planes cuda/tiles"
LEFT_OUT = (
    "test_proofs or test_life or test_simulation or test_random_partitions or test_many_ranks"
)
"""Tests that take longest."""
SLOWEST = 5.0
"""CPU seconds of the slowest test that is used, while lines are traced."""
STILLBORN = "setup of tests/backends/test_index_headers.py"
"""What fails where a header does not compile: such a mutant does not count."""
FAILED: list[str] = []
"""What has failed in this process."""
Items = dict[str, pytest.Item]


def put(mutant: Mutant, live: Iterable[types.FunctionType]) -> None:
    """Give the ``live`` functions of this process the mutant's code."""
    path = str(ROOT / mutant.path)

    def within(code: types.CodeType) -> Iterator[types.CodeType]:
        yield code
        for each in code.co_consts:
            yield from within(each) if isinstance(each, types.CodeType) else ()

    codes = within(compile(mutant.source, path, "exec"))
    changed = {(code.co_qualname, code.co_firstlineno): code for code in codes}
    for function in live:
        code = function.__code__
        if (code.co_filename, code.co_qualname) == (path, mutant.function):
            function.__code__ = changed[code.co_qualname, code.co_firstlineno]


def let_import(mutant: Mutant) -> None:
    """Let the import of the module find the mutant."""
    path, loader = str(ROOT / mutant.path), importlib.machinery.SourceFileLoader
    original, changed = loader.get_code, compile(mutant.source, path, "exec")
    loader.get_code = lambda self, name: changed if self.path == path else original(self, name)


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What ``work()`` returns in a process of its own, or how that ended: it died, or took more CPU
    time, or twenty times as long.
    """
    context = multiprocessing.get_context("fork")
    answer, to = context.Pipe(duplex=False)

    def child() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            to.send((work(), ""))
        except BaseException as error:
            to.send((None, repr(error)))

    process = context.Process(target=child)
    process.start()
    to.close()
    try:
        result, error = answer.recv() if answer.poll(20 * seconds) else ("takes too long", "")
    except EOFError:
        result, error = "dies", ""
    os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    if error:
        raise RuntimeError(error)
    return result


class Session:
    """A session of pytest whose ``result`` is what ``loop(items)`` returns, if it does."""

    def __init__(self, tests: Sequence[str], loop: Callable[[Items], Any]) -> None:
        self._loop, self.result = loop, "pytest ends early: run these tests by themselves"
        some = ["-mnot (mpi or slow or nightly or integration or cuda)", f"-knot ({LEFT_OUT})"]
        pytest.main(["-q", "-p", "no:cacheprovider", "--timeout=0", *some, *tests], [self])

    def pytest_collection(self) -> None:
        """Failing examples are not made smaller."""
        from hypothesis import Phase, settings  # late: its own plugin imports it first

        settings.register_profile("mutation", settings(), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.result = self._loop({item.nodeid: item for item in session.items})
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        FAILED.extend([f"{report.when} of {report.nodeid}"] * report.failed)


def failing(
    names: Iterable[str], items: Items, each: Callable[[str], None] = lambda _: None
) -> str:
    """Run these tests, up to the first that fails: its name, or nothing."""
    tests = [items[name] for name in names]
    for test, following in zip(tests, [*tests[1:], None], strict=False):
        test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
        each(test.nodeid)
        if FAILED:
            return FAILED[0]
    return ""


class Reached:
    """Which tests reach what, and how long each takes.

    Attributes:
        by: the tests by file and line, and by file and outermost function.
        seconds: of CPU time of each test.
        failed: the name of one that fails without a mutant, or nothing.
    """

    def __init__(self, items: Items, folder: str) -> None:
        self.by: dict[tuple[str, int | str], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        places, since = set[tuple[str, int | str]](), time.process_time()

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            if not code.co_filename.startswith(folder):
                return None
            outermost = code.co_qualname.partition(".<locals>")[0]
            places.update(product([code.co_filename], [frame.f_lineno, outermost]))
            return trace

        def ended(name: str) -> None:
            nonlocal since
            self.seconds[name] = time.process_time() - since
            for place in places:
                self.by[place].add(name)
            places.clear()
            since = time.process_time()

        threading.settrace(trace)
        sys.settrace(trace)
        self.failed = failing(items, items, ended)

    def in_order(self, names: Iterable[str], limit: float) -> list[str]:
        """The fastest test of each function, then the second of each; so many seconds of them."""
        place: Counter[str] = Counter()

        def turn(name: str) -> tuple[int, float]:
            place[name.partition("[")[0]] += 1
            return place[name.partition("[")[0]], self.seconds[name]

        chosen: list[str] = []
        for name in sorted(sorted(names, key=self.seconds.__getitem__), key=turn):
            if not chosen or self.seconds[name] < min(SLOWEST, limit):
                limit -= self.seconds[name]
                chosen.append(name)
        return chosen


class Survey:
    """The mutants of one part, those that are tried, and what is found.

    Args:
        part: one of :data:`TESTS`.
        args: the command line's.
    """

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        self._part, self._args = part, args
        names = [f"cuda_src/{name}.h" for name in HEADERS.split() if part == "headers"]
        paths = [*sorted(ROOT.glob(f"zerocast/{part}/*.py")), *(ROOT / name for name in names)]
        by_file = [mutants_of(str(path.relative_to(ROOT)), path.read_bytes()) for path in paths]
        total = sum(map(len, by_file))
        if args.sample and args.sample < total:
            share, draw = args.sample / total, random.Random(args.seed)
            by_file = [draw.sample(each, round(len(each) * share)) for each in by_file]
        self._by_file = [each for each in by_file if each and args.only in each[0].path]
        self._mutants = [mutant for each in self._by_file for mutant in each]

    def run(self) -> None:
        """Try the mutants that no earlier call has killed, and print what is known of all."""
        known, tests = found(self._args.out), TESTS[self._part]
        new = [mutant for mutant in self._mutants if not known.get(mutant[:3])]
        loop = self._of_headers if self._part == "headers" else self._of_functions
        names = forked(lambda: Session(tests, lambda items: loop(items, new)).result, 36000)
        assert isinstance(names, list), names

        def imported(mutant: Mutant) -> Any:
            let_import(mutant)
            return Session(tests, partial(failing, names)).result

        for mutant in new:
            if self._part != "headers" and not mutant.function:
                self._note(mutant, names, imported, 60 + 3 * self._args.seconds)
        self._report()

    def _of_functions(self, items: Items, new: Sequence[Mutant]) -> Any:
        reached = forked(lambda: Reached(items, str(ROOT / "zerocast" / self._part)), 3600)
        if not isinstance(reached, Reached) or reached.failed:
            return f"without a mutant: {getattr(reached, 'failed', reached)}"
        # Not isinstance(): it asks deprecated proxies, too.
        live = [each for each in gc.get_objects() if type(each) is types.FunctionType]

        def tried(names: Sequence[str], mutant: Mutant) -> str:
            put(mutant, live)
            return failing(names, items)

        for mutant in new:
            if mutant.function:
                path = str(ROOT / mutant.path)  # a line may be part of a longer one
                tests = reached.by.get((path, mutant.line)) or reached.by[path, mutant.function]
                names = reached.in_order(tests, self._args.seconds)
                seconds = 3 + 3 * sum(reached.seconds[name] for name in names)
                self._note(mutant, names, partial(tried, names), seconds)
        return reached.in_order(reached.seconds, self._args.seconds)

    def _of_headers(self, items: Items, new: Sequence[Mutant]) -> Any:
        roots = next(iter(items.values())).module.ROOTS  # type: ignore[attr-defined]

        def tried(mutant: Mutant) -> str:
            with tempfile.TemporaryDirectory() as folder:
                changed = Path(folder, *Path(mutant.path).parts[1:])
                changed.parent.mkdir()
                changed.write_bytes(mutant.source)
                roots.insert(0, folder)
                return failing(items, items)

        for mutant in new:
            self._note(mutant, items, tried, 8)
        return list(items)

    def _note(
        self, mutant: Mutant, names: Iterable[str], tried: Callable[[Mutant], str], seconds: float
    ) -> None:
        killed = forked(lambda: tried(mutant), seconds) if names else ""
        record = {"mutant": mutant[:3], "line": mutant.line, "killed_by": killed}
        with self._args.out.open("a") as to:
            print(json.dumps(record), file=to)

    def _report(self) -> None:
        """Print the scores, and what survived."""
        known, reasons = found(self._args.out), explained()
        line = "{:40}{:>8}{:>8}{:>12}{:>8}{:>11}"
        print(line.format("file", "mutants", "killed", "equivalent", "score", "of others"))
        for row in [*self._by_file, self._mutants]:
            name = self._part if row is self._mutants else row[0].path
            keys = {m[:3] for m in row if not known.get(m[:3], STILLBORN).startswith(STILLBORN)}
            killed = sum(bool(known[key]) for key in keys)
            same = sum(not known[key] and reasons[key].startswith("equivalent") for key in keys)
            scores = [f"{killed / max(of, 1):.1%}" for of in (len(keys), len(keys) - same)]
            print(line.format(name, len(keys), killed, same, *scores))
        for m in self._mutants:
            if known.get(m[:3]) == "":
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
    parser.add_argument("--seconds", type=float, default=20, help="of CPU time for one mutant")
    parser.add_argument("--only", default="", help="of a part the files that are named so")
    parser.add_argument("--out", type=Path, default=Path("mutation.jsonl"),
                        help="what was found: the killed are not tried again")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        Survey(part, args).run()


if __name__ == "__main__":
    main()
