"""Changes the code line by line, and says which changes no test notices.

    python scripts/mutation.py                      # all mutants of all of TESTS
    python scripts/mutation.py cast --sample 400    # drawn, of each file its share
    python scripts/mutation.py layout --only owners --tests tests/layout/test_owners.py

A mutant is one change that scripts/mutation_operators.py makes: an operator, a constant, a
condition the other way round, two arguments exchanged, a statement or a result left out. Left alone
are strings and errors' texts, ``assert`` (what we assume of ourselves) and annotations. The tests
of TESTS that reach the changed line run until one fails, the fastest of each test function first,
in a process forked from one that has imported everything; a mutant of a header is compiled. What no
test notices has survived. scripts/results/mutation.txt names such mutants one by one, with the
reason; the score is given with and without those that are equivalent, which no test can notice.

Python 3.11 or later, Linux. Of the solver's proofs (tests/layout/test_proofs.py) nothing is run.
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import inspect
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  (so that no fork imports it)
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mutation_operators import Mutant, of_cpp, of_python  # noqa: E402

TESTS = {
    "layout": ["tests/layout", "tests/cast/test_boundary_exchange.py"],
    "formats": ["tests/formats"],
    "cast": ["tests/cast"],
    "headers": ["tests/backends/test_index_headers.py"],
}
"""What notices the mutants of each part: packages of zerocast, and :data:`HEADERS`."""
HEADERS = ("arithmetic/tables", "cpu/launch", "cpu/scale_rows", "cpu/strips", "cuda/planes",
           "cuda/tiles")  # fmt: skip
LEFT_OUT = ("test_proofs.py", "test_life.py", "test_simulation.py", "test_random_partitions",
            "test_many_ranks")  # fmt: skip
"""Tests that take longest."""
SLOWEST = 5.0
"""CPU seconds of the slowest test that is used, while lines are traced."""
STILLBORN = "setup of tests/backends/test_index_headers.py"
"""What fails where a header does not compile: such a mutant does not count."""
EXPLAINED = ROOT / "scripts/results/mutation.txt"


def put(mutant: Mutant, live: dict[str, list[types.FunctionType]]) -> None:
    """Give the ``live`` functions of this process, by file, the mutant's code."""
    path, changed = str(ROOT / mutant.path), {}

    def collect(code: types.CodeType) -> None:
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                changed[each.co_qualname, each.co_firstlineno] = each
                if not each.co_flags & inspect.CO_OPTIMIZED:  # a class
                    collect(each)

    collect(compile(mutant.source, path, "exec"))
    for function in live[path]:
        code = function.__code__
        if code.co_qualname == mutant.function:
            function.__code__ = changed[code.co_qualname, code.co_firstlineno]


def let_import(mutant: Mutant) -> None:
    """Let the import of the module find the mutant."""
    path, loader = str(ROOT / mutant.path), importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(mutant.source, path, "exec") if self.path == path else original(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What ``work()`` returns in a process of its own, or how that ended: it died, or took more CPU
    time, or twenty times as long.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            answer = "", work()
        except BaseException as error:
            answer = repr(error), None
        with os.fdopen(write, "wb") as to:
            to.write(pickle.dumps(answer))
        os._exit(0)
    os.close(write)
    timer = threading.Timer(20 * seconds, os.killpg, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(read, "rb") as source:
        data = source.read()
    timer.cancel()
    timer.join()
    status = os.waitpid(child, 0)[1]
    if not data:
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    error, result = pickle.loads(data)
    if error:
        raise RuntimeError(error)
    return result


class Session:
    """A session of pytest whose loop is ``loop(self)``.

    Attributes:
        items: the tests by name.
        result: what the loop returned.
    """

    def __init__(self, loop: Callable[[Session], Any]) -> None:
        self._loop, self._failed = loop, ""
        self.items: dict[str, pytest.Item] = {}
        self.result: Any = None

    def pytest_collection(self) -> None:
        """Failing examples are not made smaller."""
        from hypothesis import Phase, settings  # late: its own plugin imports it first

        few = [Phase.explicit, Phase.generate]
        settings.register_profile("mutation", settings(), phases=few)
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        chosen = [i for i in session.items if not any(name in i.nodeid for name in LEFT_OUT)]
        self.items = {item.nodeid: item for item in chosen}
        self.result = self._loop(self)
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        self.result = str(excrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            phase = "" if report.when == "call" else f"{report.when} of "
            self._failed = phase + report.nodeid

    def failing(self, names: Iterable[str], each: Callable[[str], None] = lambda _: None) -> str:
        """Run these tests, up to the first that fails: its name, or nothing."""
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=False):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            each(item.nodeid)
            if self._failed:
                break
        return self._failed


def in_session(tests: Sequence[str], loop: Callable[[Session], Any]) -> Any:
    """What the loop of a session of these tests returns, or why it has none."""
    session = Session(loop)
    options = ["-q", "-p", "no:cacheprovider", "--timeout=0"]
    marks = ["-m", "not (mpi or slow or nightly or integration or cuda)"]
    code = pytest.main([*options, *marks, *tests], plugins=[session])
    return session.result if session.items else f"collection ends with {code}"


class Reached:
    """Which tests reach what, and how long each takes.

    Attributes:
        by: the tests by file and line, and by file and outermost function.
        seconds: of CPU time of each test.
        failed: the name of one that fails without a mutant, or nothing.
    """

    def __init__(self, session: Session, part: str) -> None:
        self.by: dict[tuple[str, int | str], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        folder, places = str(ROOT / "zerocast" / part), set[tuple[str, int | str]]()
        since = time.process_time()

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            if not code.co_filename.startswith(folder):
                return None
            places.add((code.co_filename, frame.f_lineno))
            places.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))
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
        self.failed = session.failing(session.items, ended)
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def tests_of(self, mutant: Mutant, limit: float) -> list[str]:
        """Those that reach its line, or its function where the line is part of a longer one."""
        path = str(ROOT / mutant.path)
        names = self.by.get((path, mutant.line)) or self.by.get((path, mutant.function), set())
        return self.in_order(names, limit)

    def in_order(self, names: Iterable[str], limit: float) -> list[str]:
        """The fastest test of each function, then the second of each; so many seconds of them."""
        place: Counter[str] = Counter()
        ordered = []
        for name in sorted(names, key=lambda each: self.seconds[each]):
            function = name.partition("[")[0]
            ordered.append((place[function], self.seconds[name], name))
            place[function] += 1
        chosen, spent = [], 0.0
        for _, seconds, name in sorted(ordered):
            if not chosen or (seconds < SLOWEST and spent + seconds <= limit):
                spent += seconds
                chosen.append(name)
        return chosen


class Survey:
    """The mutants of one part, those that are tried, and what is found.

    Args:
        part: one of :data:`TESTS`.
        args: the command line's.
    """

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        self._part, self._args, self._tests = part, args, args.tests or TESTS[part]
        if part == "headers":
            paths = [f"cuda_src/{name}.h" for name in HEADERS]
            by_file = [of_cpp(ROOT, path) for path in paths]
        else:
            folder = ROOT / "zerocast" / part
            paths = [f"zerocast/{part}/{path.name}" for path in sorted(folder.glob("*.py"))]
            by_file = [of_python(ROOT, path) for path in paths]
        self._total = sum(map(len, by_file))
        if args.sample and args.sample < self._total:
            share, draw = args.sample / self._total, random.Random(args.seed)
            by_file = [draw.sample(each, round(len(each) * share)) for each in by_file]
        self._by_file = [each for each in by_file if each and args.only in each[0].path]
        self._mutants = [mutant for each in self._by_file for mutant in each]

    def run(self) -> None:
        """Try the mutants that no earlier call has killed."""
        known, args = found(self._args.out), self._args
        new = [mutant for mutant in self._mutants if not known.get(mutant.key)]
        loop = self._of_headers if self._part == "headers" else self._of_functions
        names = forked(lambda: in_session(self._tests, lambda s: loop(s, new)), 36000)
        assert isinstance(names, list), names
        if self._part == "headers":
            return

        def imported(mutant: Mutant) -> Any:
            let_import(mutant)
            return in_session(self._tests, lambda session: session.failing(names))

        for mutant in new:
            if not mutant.function:
                self._note(mutant, names, lambda m=mutant: imported(m), 60 + 3 * args.seconds)

    def _of_functions(self, session: Session, new: Sequence[Mutant]) -> Any:
        reached = forked(lambda: Reached(session, self._part), 3600)
        if not isinstance(reached, Reached) or reached.failed:
            return f"without a mutant: {getattr(reached, 'failed', reached)}"
        live = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is types.FunctionType:  # isinstance() asks deprecated proxies, too
                live[each.__code__.co_filename].append(each)

        def tried(mutant: Mutant, names: Sequence[str]) -> str:
            put(mutant, live)
            return session.failing(names)

        for mutant in new:
            if mutant.function:
                names = reached.tests_of(mutant, self._args.seconds)
                seconds = 3 + 3 * sum(reached.seconds[name] for name in names)
                self._note(mutant, names, lambda m=mutant, n=names: tried(m, n), seconds)
        return reached.in_order(reached.seconds, self._args.seconds)

    def _of_headers(self, session: Session, new: Sequence[Mutant]) -> Any:
        names = list(session.items)
        roots = session.items[names[0]].module.ROOTS

        def tried(mutant: Mutant) -> str:
            with tempfile.TemporaryDirectory() as folder:
                changed = Path(folder, *Path(mutant.path).parts[1:])
                changed.parent.mkdir()
                changed.write_bytes(mutant.source)
                roots.insert(0, folder)
                return session.failing(names)

        for mutant in new:
            self._note(mutant, names, lambda m=mutant: tried(m), 8)
        return names

    def _note(
        self, mutant: Mutant, names: Sequence[str], work: Callable[[], str], seconds: float
    ) -> None:
        killed = forked(work, seconds) if names else ""
        record = {"mutant": mutant.key, "line": mutant.line, "killed_by": killed}
        with self._args.out.open("a") as to:
            to.write(json.dumps(record) + "\n")

    def report(self) -> None:
        """Print the scores, and what survived."""
        known, reasons = found(self._args.out), explained()
        print(
            f"{'file':40}{'mutants':>8}{'killed':>8}{'equivalent':>12}{'score':>8}{'of others':>11}"
        )
        for row in [*self._by_file, self._mutants]:
            name = self._part if row is self._mutants else row[0].path
            keys = {m.key for m in row if not known.get(m.key, STILLBORN).startswith(STILLBORN)}
            killed = sum(bool(known[key]) for key in keys)
            same = sum(not known[key] and reasons[key].startswith("equivalent") for key in keys)
            score, of_others = killed / (len(keys) or 1), killed / (len(keys) - same or 1)
            print(f"{name:40}{len(keys):8}{killed:8}{same:12}{score:8.1%}{of_others:11.1%}")
        if self._args.sample and len(self._mutants) < self._total:
            low, high = interval(killed, len(keys) - same)
            print(f"drawn from {self._total}: 95 % of such draws hold {low:.1%} to {high:.1%}")
        for mutant in self._mutants:
            if known.get(mutant.key) == "":
                print(f"{mutant.path}:{mutant.line} {mutant.function}", mutant.key[2],
                      reasons[mutant.key], sep="\n    ")  # fmt: skip


def found(out: Path) -> dict[tuple[str, ...], str]:
    """What killed each mutant that has been tried; nothing where it survived."""
    records = map(json.loads, out.read_text().splitlines() if out.exists() else [])
    return {tuple(record["mutant"]): record["killed_by"] for record in records}


def explained() -> defaultdict[tuple[str, ...], str]:
    """What :data:`EXPLAINED` says of each mutant that it names."""
    why = defaultdict(lambda: "NOT EXPLAINED")
    for block in EXPLAINED.read_text().split("\n\n"):
        if block.startswith(("zerocast/", "cuda_src/")):
            first, change, *reason = block.splitlines()
            path, _, function = first.partition(" ")
            why[path, function, change.strip()] = " ".join(map(str.strip, reason))
    return why


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share that was drawn."""
    z, share = 1.96, killed / tried
    middle, width = share + z * z / 2 / tried, share * (1 - share) / tried + (z / 2 / tried) ** 2
    low, high = ((middle + sign * z * math.sqrt(width)) / (1 + z * z / tried) for sign in (-1, 1))
    return low, high


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(TESTS), metavar="PART")
    parser.add_argument("--sample", type=int, help="mutants of a part, drawn by file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20, help="of CPU time for one mutant")
    parser.add_argument("--only", default="", help="of a part the files that are named so")
    parser.add_argument("--tests", nargs="*", help="instead of those of the part")
    parser.add_argument("--out", type=Path, default=Path("mutation.jsonl"),
                        help="what was found: the killed are not tried again")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        survey = Survey(part, args)
        survey.run()
        survey.report()
    print(f"{sum(os.times()[:4]) / 60:.1f} CPU minutes")


if __name__ == "__main__":
    main()
