"""Rows: what a check or benchmark finds, one line of JSON a row, whatever becomes of its process.

A row is begun, then ended, each by one write to the file. A process that is killed at any moment
leaves whole lines, and part of one at most, which nobody reads, and which goes when rows are done
again. Rows that the file has are not done again: whoever runs the same command on the same file
goes on where it ended. What raises may leave a GPU in a state in which nothing runs, so the process
ends there and another one goes on. A row that took too long has failed; one in which a process died
is begun once more, and then has failed.

    {"row": "speed llama 1 nvfp4", "began": 1764000000.0}
    {"row": "speed llama 1 nvfp4", "seconds": 2.1, "result": {...}}      or "failed": "why"
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class Rows:
    """The rows in a file.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def results(self) -> dict[str, Result]:
        """Return by row what was found."""
        return {line["row"]: line["result"] for line in self._lines() if "result" in line}

    def failures(self) -> dict[str, str]:
        """Return by row why there is no result."""
        return {line["row"]: line["failed"] for line in self._lines() if "failed" in line}

    def ended(self) -> set[str]:
        """Return the rows that are not done again."""
        return self.results().keys() | self.failures().keys()

    def note(self, row: str, seconds: float, result: Result) -> None:
        """Write what somebody else has found; the latest stands."""
        self._cut()
        self._write(row, seconds=round(seconds, 3), result=result)

    def fail_latest(self, why: str) -> None:
        """Let the row that has begun last have failed, if nothing came after that."""
        lines = self._lines()
        if lines and "began" in lines[-1]:
            self._write(lines[-1]["row"], failed=why)

    def forget(self, chosen: Callable[[str], bool]) -> None:
        """Drop rows, so that they are done again. A kill leaves all of them or none."""
        lines = [line for line in self._lines() if not chosen(line["row"])]
        if self.size:
            rest = self.path.with_suffix(".new")
            rest.write_text("".join(json.dumps(line) + "\n" for line in lines))
            rest.replace(self.path)

    def do(self, works: Mapping[str, Callable[[], Result]]) -> bool:
        """Do those of ``works`` that have no row, in order, up to one that raises; whether all have
        one now.
        """
        self._cut()
        began = Counter(line["row"] for line in self._lines() if "began" in line)
        ended = self.ended()
        for row, work in works.items():
            if row in ended:
                continue
            if began[row] > 1:
                self._write(row, failed="the process ended in it, twice")
                continue
            start = time.time()
            self._write(row, began=start)
            try:
                result = work()
            except Exception as error:
                first = (str(error) or "no message").splitlines()[0]
                self._write(row, failed=f"{type(error).__name__}: {first}")
                return False
            self._write(row, seconds=round(time.time() - start, 3), result=result)
        return True

    def _cut(self) -> None:
        if self.size:  # a kill may cut the write of a line that is longer than a page
            os.truncate(self.path, len(self._whole_lines()))

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._whole_lines().splitlines()]

    def _whole_lines(self) -> bytes:
        content = self.path.read_bytes() if self.size else b""
        return content[: content.rfind(b"\n") + 1]

    def _write(self, row: str, **fields: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"row": row, **fields}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size if self.path.exists() else 0


def told(rows: Rows, chosen: Callable[[str], bool]) -> bool:
    """Print of the rows that were chosen which failed, which were left out, and how many there are;
    whether none has failed.
    """
    results = {row: found for row, found in rows.results().items() if chosen(row)}
    failed = {row: why for row, why in rows.failures().items() if chosen(row)}
    for row, why in failed.items():
        print(f"FAILED {row}: {why}")
    for row, found in results.items():
        if "skipped" in found:
            print(f"left out {row}: {found['skipped']}")
    print(f"{len(results)} passed, {len(failed)} failed")
    return not failed


def supervise(rows: Rows, command: Sequence[str], limit: float) -> bool:
    """Run ``command``, which does rows, until it has done all of them; whether it has. It is run
    again as long as it makes rows, and killed where it has made none for ``limit`` seconds.
    """
    while True:
        size, process = rows.size, subprocess.Popen(command)
        status = _ended(process, rows, limit)
        if status == 0:
            return True
        if rows.size == size:
            return False
        if status is None:
            rows.fail_latest(f"it did not end within {limit:g} s")


def _ended(process: subprocess.Popen[bytes], rows: Rows, limit: float) -> int | None:
    """Its exit status, waited for; None where it was killed."""
    size, since = rows.size, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if rows.size != size:
            size, since = rows.size, time.monotonic()
        elif time.monotonic() - since > limit:
            process.kill()
            process.wait()
            return None
    return process.returncode
