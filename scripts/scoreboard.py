"""Records how many bytes of a package are ours, and writes the results of docs/conformance.md.

    python scripts/scoreboard.py NAME           measures the package, which is installed here
    python scripts/scoreboard.py NAME --failed  records that it was not installed or measured
    python scripts/scoreboard.py                writes the page alone

It needs nothing but Python where it measures nothing.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results" / "scoreboard.json"
PAGE = ROOT / "docs" / "conformance.md"
SUMS = ROOT / "tests" / "lab" / "conformance" / "SHA256SUMS"
MARK = "<!-- What follows is written by scripts/scoreboard.sh. -->\n"
HEAD = "| pack | bytes | different | causes |\n|---|--:|--:|---|\n"


def measured(name: str) -> dict[str, Any]:
    """Return what ``python -m zerocast conform`` finds."""
    command = [sys.executable, "-m", "zerocast", "conform", name, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(score: dict[str, Any]) -> str:
    """Return the row of one pack."""
    causes = score["causes"]
    texts = ["unexplained"] if causes is None else [f"{c} ({n:,})" for c, n in causes.items()]
    if score["refused"]:
        texts.append(f"does not quantize {', '.join(score['refused'])}")
    counts = f"{score['compared']:,} | {score['different']:,}"
    return f"| {score['level']}: {score['subject']} | {counts} | {'; '.join(texts)} |\n"


def share(score: dict[str, Any] | None) -> str:
    """Return the share of equal bytes in percent, rounded down."""
    if score is None or not score["compared"]:
        return "-"
    equal = 10_000 * (score["compared"] - score["different"]) // score["compared"]
    return "100" if equal == 10_000 else f"{equal / 100:.2f}"


def shares(found: dict[str, Any]) -> str:
    """Return the table of shares: a row for each dialect and package."""
    lines = ["| dialect | package | tensors | blocks |\n|---|---|--:|--:|\n"]
    by_place = {
        (score["subject"], entry["package"], score["level"]): score
        for entry in found.values()
        for score in entry["scores"]
    }
    for subject, package in sorted({(s, p) for s, p, _ in by_place if "/" in s}):
        cells = [share(by_place.get((subject, package, level))) for level in ("tensors", "blocks")]
        title = package.partition("+")[0]
        lines.append(f"| {subject} | {title} | {cells[0]} | {cells[1]} |\n")
    return "".join(lines)


def page(found: dict[str, Any], failed: dict[str, str]) -> str:
    """Return the text below the mark."""
    digest = hashlib.sha256(SUMS.read_bytes()).hexdigest()
    versions = sorted({entry["packs"] for entry in found.values()})
    parts = [
        "## Shares of equal bytes\n\n"
        f"Of packs of version {', '.join(map(str, versions))}; the SHA-256 of their SHA256SUMS is "
        f"`{digest}`.\nIn percent, rounded down; a package is measured in the dialects that it "
        f"writes on a CPU.\n\n{shares(found)}"
    ]
    parts += [f"Not measured: {name}, on {date}.\n" for name, date in sorted(failed.items())]
    for entry in found.values():
        rows = "".join(map(row, entry["scores"]))
        title = entry["package"].partition("+")[0]
        parts.append(f"## {title}\n\nMeasured on {entry['date']}.\n\n{HEAD}{rows}")
    return "\n".join(parts)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--failed", action="store_true")
    given = parser.parse_args()
    entry = measured(given.name) if given.name and not given.failed else {}
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.name:
        date = datetime.now(timezone.utc).date().isoformat()
        results[given.name] = {"date": date, **entry}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    found = {name: entry for name, entry in results.items() if "scores" in entry}
    failed = {name: entry["date"] for name, entry in results.items() if "scores" not in entry}
    before = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{before}{MARK}\n{page(found, failed)}")


if __name__ == "__main__":
    main()
