"""Feeds damaged and odd inputs to everything that zerocast reads, and to the native library.

    python scripts/fuzz.py --inputs 1000000 --record fuzz.json
    python scripts/fuzz.py --replay casts:1234

An input is made by its target (fuzz_targets.py) and its number alone, so it can be replayed, and a
record goes on where an earlier call ended. Inputs run in child processes: one that takes its
process down, or longer than five minutes, is a finding with its number, and the next one follows.
Accepted, or refused by an error of zerocast.errors: anything else is a finding. They are printed
and recorded once for each place in the code. Exits with 1 where there is one.
"""

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INPUT_SECONDS = 300
MEMORY = 6 << 30  # bytes that a child may map beside what it has mapped when it begins
BATCH = 20_000
"""Inputs of one child."""


def run_inputs(name: str, first: int, count: int, progress: Path) -> None:
    """Run inputs in this process: print a line of JSON for each that is a finding, and at the end
    one with counts. ``progress`` holds the number of the input that is running.
    """
    sys.path.insert(0, str(ROOT))
    import torch
    from fuzz_targets import TARGETS

    from zerocast.errors import ZerocastError

    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = {"accepted": 0, "refused": 0}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        progress.open("r+b") as file,
        mmap.mmap(file.fileno(), 8) as place,
    ):
        target = TARGETS[name][0](Path(folder))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
        for number in range(first, first + count):
            place[:] = number.to_bytes(8, "little")
            signal.alarm(INPUT_SECONDS)  # ends the process
            try:
                target(random.Random(f"{name}:{number}"))
                counts["accepted"] += 1
            except ZerocastError:
                counts["refused"] += 1
            except BaseException as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [f for f in frames if f"{ROOT}/zerocast" in f.filename] or frames
                where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"
                text = "".join(traceback.format_exception(error))[-3000:]
                kind = type(error).__name__
                print(json.dumps({"number": number, "kind": kind, "where": where, "text": text}))
                if isinstance(error, KeyboardInterrupt):
                    raise
        signal.alarm(0)
        os.chdir("/")
    print(json.dumps(counts), flush=True)


def batch(name: str, first: int, count: int) -> tuple[int, dict[str, int], list[dict[str, Any]]]:
    """Run inputs in a child: how many of them ran, what became of them, and the findings."""
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(first.to_bytes(8, "little"))
        progress.flush()
        command = [sys.executable, __file__, "--child", f"{name}:{first}:{count}:{progress.name}"]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        at = int.from_bytes(Path(progress.name).read_bytes()[:8], "little")
    lines = []
    for line in child.stdout.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    found = [line for line in lines if "number" in line]
    counts = next((line for line in lines if "accepted" in line), {})
    if child.returncode == 0:
        return count, counts, found
    ended = signal.Signals(-child.returncode).name if child.returncode < 0 else child.returncode
    where = next((line for line in child.stderr.splitlines() if "/zerocast/" in line), "")
    crash = {"number": at, "kind": f"ended by {ended}", "where": where.strip()}
    return at - first + 1, counts, [*found, crash | {"text": child.stderr[-3000:]}]


def main() -> int:
    """Run inputs, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all, by all targets")
    parser.add_argument("--only", help="targets, by names separated by commas")
    parser.add_argument("--record", type=Path, help="a file of JSON, to go on with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to stop after")
    parser.add_argument("--replay", metavar="TARGET:NUMBER", help="one input, with its traceback")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, first, count, progress = asked.child.split(":", 3)
        run_inputs(name, int(first), int(count), Path(progress))
        return 0
    if asked.replay:
        name, number = asked.replay.split(":")
        _, counts, found = batch(name, int(number), 1)
        print(counts, *(each["text"] for each in found), sep="\n")
        return bool(found)
    sys.path.insert(0, str(ROOT))
    from fuzz_targets import TARGETS

    record: dict[str, Any] = {}
    if asked.record and asked.record.exists():
        record = json.loads(asked.record.read_text())
    names = asked.only.split(",") if asked.only else list(TARGETS)
    shares = sum(TARGETS[name][1] for name in names)
    begun = time.monotonic()
    for name in names:
        own = record.setdefault(
            name, {"inputs": 0, "accepted": 0, "refused": 0, "seconds": 0.0, "findings": {}}
        )
        end = asked.inputs * TARGETS[name][1] // shares
        while own["inputs"] < end and time.monotonic() - begun < asked.seconds:
            before = time.monotonic()
            ran, counts, found = batch(name, own["inputs"], min(BATCH, end - own["inputs"]))
            own["inputs"] += ran
            own["seconds"] = round(own["seconds"] + time.monotonic() - before, 1)
            for key, count in counts.items():
                own[key] += count
            for each in found:
                same = own["findings"].setdefault(
                    f"{each['kind']} at {each['where']}", {**each, "count": 0}
                )
                same["count"] += 1
                if same["count"] == 1:
                    key = f"{name}:{each['number']}"
                    print(f"FINDING {key}: {each['kind']} at {each['where']}", flush=True)
            if asked.record:
                asked.record.write_text(json.dumps(record, indent=1))
        print(
            f"{name:13} {own['inputs']:8} inputs in {own['seconds']:8} s: {own['accepted']} "
            f"accepted, {own['refused']} refused, {len(own['findings'])} findings",
            flush=True,
        )
    return any(record[name]["findings"] for name in names)


if __name__ == "__main__":
    sys.exit(main())
