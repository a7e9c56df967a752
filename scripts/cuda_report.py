"""The page that scripts/bench_cuda.py writes; and what pages say has run on a GPU.

python scripts/cuda_report.py            fails where docs/cuda.md or README.md say anything else
python scripts/cuda_report.py --write    than the rows in scripts/results, and writes that there
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from bench_frame import READS
from bench_rows import Rows
from gpu_queue import ORDER, ROWS

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "scripts" / "results"
BEGIN, END = "<!-- Written by scripts/cuda_report.py -->\n", "\n<!-- until here -->"
NEVER_TRIED = {
    "train": "FSDP2, NCCL and torch.compile on GPUs",
    "zero": "training by ZeroOptimizer on GPUs",
    "qat": "QAT on GPUs",
}
"""By stage what nobody has tried before one of its rows has passed."""

GOALS = {"amax": 0.90, "cast": 0.85, "transpose": 0.80}
"""Shares of the bound to be reached on an H200, Llama set, 1 rank."""

HOST_GOAL = 150e-6
"""Seconds of ``plan.cast()`` until it returns."""

LAUNCHES = 4
"""Of one cast, for each recipe, its memset included."""

SHARE_OF_64 = 50
"""Amax and cast at rank 0 of 64 take at most the time of 1 rank divided by this."""

TIMES_AS_FAST = {1: 2.5, 64: 10}
"""As TransformerEngine's kernels for the same work, Llama set, by world size."""


def markdown(report: dict) -> str:
    """The report as a page."""
    memory = report["memory"]
    lines = [
        f"# CUDA kernels on {report['gpu']}",
        "",
        f"torch {report['torch']}, CUDA {report['cuda']}, driver {report['driver']}; "
        f"{report['rounds']} rounds, medians. `python scripts/bench_cuda.py`.",
        "",
        "Memory in this run: read {read:.0f} GB/s, write {write:.0f} GB/s, copy {copy:.0f} GB/s "
        "(read plus written).".format(**{k: v / 1e9 for k, v in memory.items()}),
        "",
        "The bound of a step is the time that the memory takes for the bytes that must move; "
        "*read* and *copy* hold their rate against that of reading alone and of a copy. "
        "*moved / must* counts the tables in; it is a count, not a hardware counter. *one by one* "
        "is amax and cast by our own kernels, a launch a weight: a re-enactment.",
        "",
        "| set | recipe | ranks | step | ms | of bound | read | copy | moved / must | launches |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        for name, step in row["steps"].items():
            rate = step["bytes"] / step["seconds"]
            lines.append(
                f"| {row['set']} | {row['recipe']} | {row['world_size']} | {name} | "
                f"{ms(step['seconds'])} | {step['of_bound']:.0%} | "
                f"{rate / memory['read']:.0%} | {rate / memory['copy']:.0%} | "
                f"{step['moved_over_must']:.4f} | {step['launches']} |"
            )
    lines += [
        "",
        "| set | recipe | ranks | reading steps, ms | of 1 rank's | one by one, ms | host, us |",
        "|---|---|---|---|---|---|---|",
    ]
    alone: dict[tuple[str, str], float] = {}
    for row in report["rows"]:
        both = amax_and_cast(row)
        first = alone.setdefault((row["set"], row["recipe"]), both)
        lines.append(
            f"| {row['set']} | {row['recipe']} | {row['world_size']} | {both * 1e3:.3f} | "
            f"1/{first / both:.1f} | {row['one_by_one_seconds'] * 1e3:.3f} | "
            f"{row['host_seconds'] * 1e6:.0f} |"
        )
    lines += ["", "| on the largest weight | recipe | Gelement/s |", "|---|---|---|"]
    for recipe, speeds in report["others"].items():
        lines += [f"| {name} | {recipe} | {v / 1e9:.1f} |" for name, v in speeds.items()]
    for row, found in report.get("peers", {}).items():
        lines += ["", f"{row}: " + "; ".join(
            why if name == "skipped" else f"{name} {why / memory['copy']:.0%} of a copy"
            for name, why in found.items()
        )]  # fmt: skip
    lines += [
        "",
        *transformer_engine(report),
        "",
        *failures(report),
        *verdicts(report),
        *host_lines(report["host"]),
        "",
    ]
    return "\n".join(lines)


def transformer_engine(report: dict) -> list[str]:
    """The section on that project's kernels: a table, and of all that did not run the reason."""
    found = report.get("transformer_engine")
    if found is None:
        return ["TransformerEngine: not measured, no checkout was given."]
    name = f"TransformerEngine {found['version']}"
    if "reason" in found:
        return [f"{name}: not measured: {found['reason']}."]
    lines = [
        f"## {name}",
        "",
        "Its own kernels, compiled from a checkout, on the same tensors. *FP32*: they read the "
        "masters. *BF16*: as its users call it, torch rounds each master first; that is the same "
        "work as ours, and *amax + cast* counts it in. *times as fast*: its time by ours.",
        "",
        "| set | recipe | ranks | step | ours, ms | FP32, ms | BF16, ms | times as fast | differ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in found["rows"]:
        place = f"{row['set']} | {row['recipe']} | {row['world_size']}"
        where = f"{row['set']}, {row['recipe']}, rank 0 of {row['world_size']}"
        if "reason" in row:
            notes.append(f"- {where}: not measured: {row['reason']}.")
            continue
        for step, (ours, fp32, bf16) in steps_beside(row).items():
            times = " / ".join(f"{t / ours:.1f}" for t in (fp32, bf16) if math.isfinite(t / ours))
            lines.append(
                f"| {place} | {step} | {ms(ours)} | {ms(fp32)} | {ms(bf16)} | {times or '-'} | "
                f"{row['differing'].get(step, '')} |"
            )
        notes += [f"- {where}: {step} not run: {why}." for step, why in row["not_run"].items()]
    return [*lines, "", *notes] if notes else lines


def host_lines(rows: list[dict]) -> list[str]:
    """Host time of ``plan.cast()`` of a flat plan, and its launches, and whether their goals were
    met.
    """
    lines = []
    for row in rows:
        # Two recipes share one memset, which the launcher does not see.
        launches = row["launches"] / 2 + 1
        in_time = "met" if row["seconds"] <= HOST_GOAL else "MISSED"
        as_few = "met" if launches <= LAUNCHES else "MISSED"
        lines.append(
            f"- plan.cast() of {row['weights']} weights, two recipes: "
            f"{row['seconds'] * 1e6:.0f} us of the host, {HOST_GOAL * 1e6:.0f} {in_time} "
            f"({row['looking'] * 1e6:.0f} where the tensors are a caller's); "
            f"{launches:.0f} launches a recipe with the memset, {LAUNCHES} {as_few}"
        )
    return lines


def amax_and_cast(row: dict) -> float:
    """Seconds of the steps of a cast that read the masters."""
    steps = row["steps"]
    reads = ["one pass"] if "one pass" in steps else READS
    return sum(steps[step]["seconds"] for step in reads if step in steps)


def failures(report: dict) -> list[str]:
    """The rows that have no result, and why."""
    failed = report.get("failed", {})
    return (
        ["Failed:", "", *(f"- {row}: {why}" for row, why in failed.items()), ""] if failed else []
    )


def ms(seconds: float) -> str:
    """In milliseconds; a dash for NaN, which stands for what was not measured."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.3f}"


def steps_beside(row: dict) -> dict[str, tuple[float, float, float]]:
    """By step, seconds of ours, and of TransformerEngine reading FP32 and BF16; NaN where not
    measured. Their BF16 sum begins with the rounding.
    """
    ways = (row["ours"], row["FP32"], row["BF16"])
    steps: dict[str, tuple[float, float, float]] = {}
    for step in ("round", "amax", "scale", "cast", "transpose"):
        ours, fp32, bf16 = (way.get(step, math.nan) for way in ways)
        steps[step] = (ours, fp32, bf16)
    amax, cast = steps["amax"], steps["cast"]
    ours, fp32, bf16 = (a + c for a, c in zip(amax, cast, strict=True))
    steps["amax + cast"] = (ours, fp32, bf16 + row["BF16"]["round"])
    return steps


def verdicts(report: dict) -> list[str]:
    """The goals for the Llama set, and whether they were met."""
    lines = []
    for row in report["rows"]:
        if (row["set"], row["world_size"]) != ("llama", 1):
            continue
        for step, goal in GOALS.items():
            if step not in row["steps"]:
                continue
            share = row["steps"][step]["of_bound"]
            met = "met" if share >= goal else "MISSED"
            lines.append(f"- {row['recipe']} {step}: {share:.0%} of its bound, {goal:.0%} {met}")
    first = {
        (row["set"], row["recipe"], row["world_size"]): amax_and_cast(row) for row in report["rows"]
    }
    for (name, recipe, world_size), seconds in first.items():
        if name == "llama" and world_size == 64 and (name, recipe, 1) in first:
            share = first[name, recipe, 1] / seconds
            met = "met" if share >= SHARE_OF_64 else "MISSED"
            lines.append(
                f"- {recipe} amax + cast at rank 0 of 64: 1/{share:.1f} of 1 rank's, "
                f"1/{SHARE_OF_64} {met}"
            )
    for row in report.get("transformer_engine", {}).get("rows", ()):
        goal = TIMES_AS_FAST.get(row["world_size"])
        if row["set"] != "llama" or goal is None:
            continue
        where = f"{row['recipe']} beside TransformerEngine at rank 0 of {row['world_size']}"
        ours, _, bf16 = (math.nan,) * 3 if "reason" in row else steps_beside(row)["amax + cast"]
        if math.isnan(bf16):
            lines.append(f"- {where}: amax + cast not measured, {goal} OPEN")
        else:
            met = "met" if bf16 / ours >= goal else "MISSED"
            lines.append(f"- {where}: amax + cast {bf16 / ours:.1f} times as fast, {goal} {met}")
    return lines


# --- what has run ---


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Return by row what a GPU has found, or why it failed; a later file's stands."""
    found: dict[str, dict[str, Any]] = {}
    for rows in map(Rows, sorted(folder.glob("rows*.jsonl"))):
        found |= {row: {"failed": why} for row, why in rows.failures().items()}
        for row, result in rows.results().items():
            seen = result.pop("seen", result)
            if not seen["on"].startswith("no GPU"):
                found[row] = {"seen": seen, **result}
    return found


def ran(folder: Path) -> str:
    """Return a table of every stage, and of every row of the queue: when, on what, by what."""
    found = recorded(folder)
    lines = ["| what | when | on | by | found |", "|---|---|---|---|---|"]
    for stage in ORDER:
        rows = [row for row in (f"stage {stage}", *ROWS.get(stage, ())) if row in found]
        for row in rows or [f"stage {stage}"]:
            result = found.get(row, {"failed": "never tried"})
            at, on, torch, by = (
                result.get("seen", {}).get(key, "-") for key in ("at", "on", "torch", "command")
            )
            lines.append(f"| {row} | {at} | {on}, torch {torch} | `{by}` | {in_words(result)} |")
    return "\n".join(lines).replace("-, torch -", "-").replace("`-`", "-")


def in_words(result: dict[str, Any]) -> str:
    """Return what a row has found, in a few words."""
    if "summary" in result:
        return f"{result['ended']}: {result['summary']}"
    for kind in ("failed", "skipped"):
        if kind in result:
            return str(result[kind])
    steps = {name: f"{step['seconds'] * 1e3:.3g} ms ({step['of_copy']:.0%} of a copy)"
             for name, step in result.pop("steps", {}).items()}  # fmt: skip
    told = {**result, **steps}.items()
    return ", ".join(f"{name} {value}".replace("_", " ") for name, value in told
                     if name not in ("seen", "losses", "hash", "copy", "text"))  # fmt: skip


def never_tried(folder: Path) -> str:
    """Return README's line on what no row has shown."""
    good = {
        row for row, found in recorded(folder).items() if not {"failed", "skipped"} & set(found)
    }
    left = [what for stage, what in NEVER_TRIED.items() if not good & set(ROWS[stage])]
    return f"| Never tried | {', '.join([*left, 'several machines'])} |"


def pages(folder: Path) -> dict[Path, str]:
    """Return the pages, with what the rows in ``folder`` say."""
    docs, readme = ROOT / "docs" / "cuda.md", ROOT / "README.md"
    head, rest = docs.read_text().split(BEGIN)
    table = f"{head}{BEGIN}\n{ran(folder)}\n{END}{rest.split(END)[1]}"
    line = re.sub(r"\| Never tried \|.*\|", never_tried(folder), readme.read_text())
    return {docs: table, readme: line}


if __name__ == "__main__":
    for page, text in pages(RECORDS).items():
        page.write_text(text)
