"""From which size on is a linear layer faster with quantized products, here?

It times ``layernorm -> linear -> sigmoid``, forward and backward, for every M (rows of the input),
K (input width) and N (output width) of a sweep: in high precision by torch's layers, and by
``zerocast.nn.LayerNormLinear`` under autocast. Rounds of both are interleaved, and medians of the
rounds are compared. What a GEMM of the library computes and what is decoded is printed, too
(``zerocast.nn.explain``).

    python scripts/bench_layers.py --recipe current rowwise          # print
    python scripts/bench_layers.py --recipe current --update         # and keep for convert

``--update`` writes the K and N without gain to ``zerocast/nn/small_layers.json``, by device and
recipe, where ``filter_fqns=["auto_filter_small_kn"]`` finds them. The device should be idle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zerocast.context import autocast
from zerocast.nn import LayerNormLinear, explain
from zerocast.nn.small_layers import MEASUREMENTS, device_name, smallest_gains
from zerocast.recipes import RECIPES, Recipe

SIZES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024)}
console = Console()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the sweep; returns what ``--json`` writes."""
    options = parse(arguments)
    device = torch.device(options.device)
    report: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__}
    report |= {"dtype": options.dtype, "weights": options.weights, "recipes": {}}
    for name in options.recipe:
        recipe = RECIPES[name]()
        report["recipes"][name] = sweep(recipe, options, device)
        show(name, recipe, report["recipes"][name], options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.update:
        keep(report, options.measurements)
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["current", "rowwise"])
    for name in ("m", "k", "n"):
        sizes = "1024 to 16384 on a GPU, 256 to 1024 on a CPU"
        parser.add_argument(f"--{name}", nargs="+", type=int, help=f"by default {sizes}")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--weights", choices=["quantized", "high_precision"], default="quantized")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--update", action="store_true", help="keep the bounds for convert")
    parser.add_argument(
        "--measurements", type=Path, default=MEASUREMENTS, help="where --update writes"
    )
    options = parser.parse_args(arguments)
    for name in ("m", "k", "n"):
        if getattr(options, name) is None:
            setattr(options, name, SIZES[torch.device(options.device).type])
    return options


# --- measuring ---


def sweep(
    recipe: Recipe, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Milliseconds of both, for every size; sizes that the recipe does not hold are left out."""
    figures = []
    for m, k, n in product(options.m, options.k, options.n):
        if not all(_holds(recipe, shape) for shape in ((n, k), (m, k), (m, n))):
            continue
        plain, quantized = works(recipe, (m, k, n), options, device)
        high, low = interleaved((plain, quantized), options.rounds, device)
        figures.append({"m": m, "k": k, "n": n, "high": 1e3 * high, "quantized": 1e3 * low})
    return figures


def works(
    recipe: Recipe, size: tuple[int, int, int], options: argparse.Namespace, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The forward and backward in high precision, and with quantized products."""
    m, k, n = size
    dtype = getattr(torch, options.dtype)
    plain = torch.nn.Sequential(
        torch.nn.LayerNorm(k, device=device, dtype=dtype),
        torch.nn.Linear(k, n, device=device, dtype=dtype),
    )
    layer = LayerNormLinear(
        k,
        n,
        params_dtype=dtype,
        device=device,
        recipe=recipe if options.weights == "quantized" else None,
    )
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(m, n, device=device, dtype=dtype)

    def high() -> None:
        torch.sigmoid(plain(x)).backward(grad)

    def quantized() -> None:
        with autocast(recipe=recipe):
            y = torch.sigmoid(layer(x))
        y.backward(grad)

    return high, quantized


def interleaved(
    works: Sequence[Callable[[], None]], rounds: int, device: torch.device
) -> list[float]:
    """Median seconds of each; every round runs all in turn, after one that is not counted."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, times in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    return [median(times[1:]) for times in seconds]


def _holds(recipe: Recipe, shape: tuple[int, int]) -> bool:
    """Whether all tensors of this shape can be quantized."""
    try:
        recipe.check_shape(shape)
    except ValueError:
        return False
    return True


# --- what is made of it ---


def bounds(figures: list[dict[str, Any]]) -> list[dict[str, int | None]]:
    """The K and N below which no M gains."""
    best: dict[tuple[int, int], float] = {}
    for figure in figures:
        pair = figure["k"], figure["n"]
        best[pair] = max(best.get(pair, 0.0), figure["high"] / figure["quantized"])
    return [{"k": bound.k, "n": bound.n} for bound in smallest_gains(best)]


def keep(report: dict[str, Any], file: Path) -> None:
    """Enter the bounds of this device and these recipes; others stay."""
    kept = json.loads(file.read_text())
    schemes = kept["devices"].setdefault(report["device"], {})
    for name, figures in report["recipes"].items():
        schemes[RECIPES[name].__name__] = {
            "bounds": bounds(figures),
            "torch": report["torch"],
            "dtype": report["dtype"],
            "weights": report["weights"],
        }
    file.write_text(json.dumps(kept, indent=2) + "\n")
    console.print(f"kept in {file}")


def show(
    name: str, recipe: Recipe, figures: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    """The figures as a table, and who computed the products."""
    device = torch.device(options.device)
    table = Table(title=f"{name} on {device_name(device)}, {options.dtype}, milliseconds")
    for column in ("M", "K", "N", "high precision", "quantized", "speed-up"):
        table.add_column(column, justify="right")
    for figure in figures:
        high, low = figure["high"], figure["quantized"]
        sizes = (str(figure[key]) for key in ("m", "k", "n"))
        table.add_row(*sizes, f"{high:.3f}", f"{low:.3f}", f"{high / low:.2f}")
    console.print(table)
    if figures:
        last = figures[-1]
        dtype = getattr(torch, options.dtype)
        layer = LayerNormLinear(last["k"], last["n"], device="meta", params_dtype=dtype)
        console.print(str(explain(layer, recipe, tokens=last["m"], device=device)))


if __name__ == "__main__":
    main()
