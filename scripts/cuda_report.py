"""The page that scripts/bench_cuda.py writes."""

from __future__ import annotations

GOALS = {"amax": 0.90, "cast": 0.85, "transpose": 0.80}
"""Shares of the bound to be reached on an H200, Llama set, 1 rank."""


def markdown(report: dict) -> str:
    """The report as a page."""
    lines = [
        f"# CUDA kernels on {report['gpu']}",
        "",
        f"torch {report['torch']}, CUDA {report['cuda']}, driver {report['driver']}; "
        f"{report['rounds']} rounds, medians. `python scripts/bench_cuda.py`.",
        "",
        "Memory in this run: read {read:.0f} GB/s, write {write:.0f} GB/s, copy {copy:.0f} GB/s "
        "(read plus written).".format(**{k: v / 1e9 for k, v in report["memory"].items()}),
        "",
        "The bound of a step is the time that the memory takes for the bytes that must move. "
        "*moved / must* counts the tables in; it is a count, not a hardware counter. *one by one* "
        "is amax and cast by our own kernels, a launch a weight: a re-enactment.",
        "",
        "| set | recipe | ranks | step | ms | of bound | moved / must | launches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        for name, step in row["steps"].items():
            lines.append(
                f"| {row['set']} | {row['recipe']} | {row['world_size']} | {name} | "
                f"{step['seconds'] * 1e3:.3f} | {step['of_bound']:.0%} | "
                f"{step['moved_over_must']:.4f} | {step['launches']} |"
            )
    lines += [
        "",
        "| set | recipe | ranks | amax + cast, ms | of 1 rank's | one by one, ms | host, us |",
        "|---|---|---|---|---|---|---|",
    ]
    alone: dict[tuple[str, str], float] = {}
    for row in report["rows"]:
        both = row["steps"]["amax"]["seconds"] + row["steps"]["cast"]["seconds"]
        first = alone.setdefault((row["set"], row["recipe"]), both)
        lines.append(
            f"| {row['set']} | {row['recipe']} | {row['world_size']} | {both * 1e3:.3f} | "
            f"1/{first / both:.1f} | {row['one_by_one_seconds'] * 1e3:.3f} | "
            f"{row['host_seconds'] * 1e6:.0f} |"
        )
    lines += ["", "| on the largest weight | recipe | Gelement/s |", "|---|---|---|"]
    for recipe, speeds in report["others"].items():
        lines += [f"| {name} | {recipe} | {v / 1e9:.1f} |" for name, v in speeds.items()]
    lines += ["", "TransformerEngine: not measured by this script.", "", *verdicts(report), ""]
    return "\n".join(lines)


def verdicts(report: dict) -> list[str]:
    """The goals for the Llama set at 1 rank, and whether they were met."""
    lines = []
    for row in report["rows"]:
        if (row["set"], row["world_size"]) != ("llama", 1):
            continue
        for step, goal in GOALS.items():
            share = row["steps"][step]["of_bound"]
            met = "met" if share >= goal else "MISSED"
            lines.append(f"- {row['recipe']} {step}: {share:.0%} of its bound, {goal:.0%} {met}")
    return lines
