"""The tables of docs/benchmarks.md, made from what the benchmarks recorded.

    python scripts/bench_page.py            prints the page
    python scripts/bench_page.py --write    writes it

A table stands behind its mark, such as ``<!-- bench_cast.json -->``, up to the next empty line.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "scripts/results"

CPU_ROWS = {
    "NVFP4": "NVFP4",
    "FP8": "FP8, current scaling",
    "FP8 delayed": "FP8, delayed scaling",
    "FP8 rowwise": "FP8, row-wise, two planes",
    "FP8 128x128": "FP8, blocks of 128x128",
    "MXFP8": "MXFP8, two planes",
    "MXFP8 32x32": "MXFP8, 32x32",
    "MXFP4": "MXFP4, two planes",
    "MXFP4 32x32": "MXFP4, 32x32",
    "NVFP4 4-over-6": "NVFP4, 4-over-6",
    "NVFP4 4-over-6, 1x16": "NVFP4, 4-over-6, 1x16",
    "NVFP4 stochastic": "NVFP4, stochastic rounding",
}
"""By the name in bench_cast.py, the name on the page."""
H200_ROWS = {
    "nvfp4": CPU_ROWS["NVFP4"],
    "nvfp4_4over6": CPU_ROWS["NVFP4 4-over-6"],
    "nvfp4_stochastic": CPU_ROWS["NVFP4 stochastic"],
    "fp8": CPU_ROWS["FP8"],
    "fp8_delayed": CPU_ROWS["FP8 delayed"],
    "fp8_rowwise": CPU_ROWS["FP8 rowwise"],
    "fp8_blockwise": CPU_ROWS["FP8 128x128"],
    "mxfp8": CPU_ROWS["MXFP8"],
}
STEP = re.compile(r"llama +(\S+) +(.*?) +([\d.]+) ms +[\d.]+ GB +([\d.]+) %")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; an empty cell holds a dash."""
    ruled = [heads, ["---"] * len(heads), *([cell or "-" for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)


def cpu_table(record: dict[str, Any]) -> str:
    """Of the first configuration of bench_cast.json: all threads, the widest vectors."""
    casts, others = record["casts"][0], record["others_seconds"]
    rows = []
    for name, shown in ((n, s) for n, s in CPU_ROWS.items() if n in casts):
        seconds, shares = casts[name]["seconds"], casts[name]["shares"]
        slower = {who: value / seconds["sum"] for who, value in others.get(name, {}).items()}
        compiled = next((v for who, v in slower.items() if who == "torch, compiled"), None)
        torchao = next((v for who, v in slower.items() if re.match("torchao.*compiled", who)), None)
        copied = shares.get("transpose")
        rows.append([
            shown + (", one read" if "one pass" in seconds else ""),
            f"{seconds['sum'] * 1e3:.1f}",
            f"{shares['sum']:.0%}",
            f"{copied:.0%}" if copied else "",
            *(f"{value:.2g} x" if value else "" for value in (compiled, torchao)),
        ])  # fmt: skip
    heads = ["recipe", "cast, ms", "of bound", "columnwise copy, of a copy's rate",
             "torch.compile", "torchao, compiled"]  # fmt: skip
    return table(heads, rows)


def h200_table(text: str, queue: dict[str, Any]) -> str:
    """Of steps_h200.txt; in italics what only bench_cuda_h200.jsonl has."""
    newest = {(name, step): (float(ms), float(share))
              for name, step, ms, share in STEP.findall(text)}  # fmt: skip
    copy = queue["memory"]["copy"]

    def cell(name: str, *wanted: str) -> str:
        earlier = queue[f"speed llama 1 {name}"]["steps"]
        of = "nvfp4" if name == "nvfp4_stochastic" else name  # but for its cast, the same kernels
        for step in wanted:
            for key in ((name, step), (of, step)):
                if key in newest:
                    ms, share = newest[key]
                    return f"{ms:.2f}" + (f" ({share:.0f} %)" if step != "scale" else "")
        for step in wanted:
            if step in earlier:
                s = earlier[step]["seconds"]
                moved = (earlier[step]["read"] + earlier[step]["written"]) / s / copy
                return f"*{s * 1e3:.2f}" + (f" ({moved:.0%})*" if step != "scale" else "*")
        return ""

    rows = []
    for name, shown in H200_ROWS.items():
        once = (name, "one pass") in newest
        ours = queue.get(f"others {name}")
        beside = ""
        if te := queue.get(f"transformer_engine llama 1 {name}"):
            # Its NVFP4 cast needs another device.
            steps = ("amax",) if "cast" in te["not_run"] else ("amax", "scale", "cast")
            theirs = te["BF16"]["round"] + sum(te["BF16"][step] for step in steps)
            own = newest[name, "one pass"][0] / 1e3 if once else sum(te["ours"][s] for s in steps)
            beside = f"{theirs / own:.1f} x" + (" for the amax" if len(steps) == 1 else "")
        rows.append([
            shown + (", one read" if once else ""),
            "" if once else cell(name, "amax"),
            cell(name, "scale"),
            cell(name, "one pass", "select and cast", "cast"),
            cell("fp8" if name in ("fp8_delayed", "fp8_blockwise") else name, "transpose"),
            f"{ours['zerocast'] / ours['torch, compiled']:.2f} x" if ours else "",
            beside,
        ])  # fmt: skip
    return table(["recipe", "amax, ms", "scale", "cast", "columnwise copy", "torch.compile",
                  "TransformerEngine 2.20"], rows)  # fmt: skip


def page() -> str:
    """docs/benchmarks.md with its tables made again."""
    lines = (RESULTS / "bench_cuda_h200.jsonl").read_text().splitlines()
    queue = {row["row"]: row["result"] for row in map(json.loads, lines)}
    made = {
        "bench_cast.json": cpu_table(json.loads((RESULTS / "bench_cast.json").read_text())),
        "steps_h200.txt": h200_table((RESULTS / "steps_h200.txt").read_text(), queue),
    }
    text = PAGE.read_text()
    for mark, rows in made.items():
        text, n = re.subn(rf"(<!-- {re.escape(mark)} -->\n)(?:\|.*\n)*",
                          lambda found, rows=rows: found[1] + rows, text)  # fmt: skip
        if n != 1:
            raise SystemExit(f"docs/benchmarks.md must hold one mark <!-- {mark} -->, not {n}.")
    return text


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
