"""Which linear layers are too small to gain by quantized products: by device, and by measurement.

What a low-precision GEMM saves grows with M x K x N, and what quantizing its operands costs only
with their sizes, so below some K and N a layer is faster as it is. Where that is, is a property of
a device and a scheme, and is measured: ``scripts/bench_layers.py`` times ``layernorm -> linear ->
sigmoid``, forward and backward, over M, K and N, and writes what it finds to
``small_layers.json`` beside this module.

For a device that nobody has measured, the table that torchao publishes for NVIDIA's H100 stands in.
Source: torchao, ``torchao/float8/README.md`` ("Performance") and the thresholds that its
``_auto_filter_for_recipe`` draws from it, for its recipes "tensorwise" and "rowwise".

K is the layer's input width, N its output width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zerocast.recipes import Float8RowwiseScaling, Recipe

AUTO_FILTER = "auto_filter_small_kn"
"""Among ``filter_fqns``: leave out the layers that these tables call too small."""

MEASUREMENTS = Path(__file__).with_name("small_layers.json")
"""What was measured, by device."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Layers that do not gain: K at most ``k`` and N at most ``n``; None for any."""

    k: int | None
    n: int | None

    def hold(self, k: int, n: int) -> bool:
        """Whether a layer of these widths is one of them."""
        return (self.k is None or k <= self.k) and (self.n is None or n <= self.n)

    def __str__(self) -> str:
        parts = [f"{name} <= {value}" for name, value in (("K", self.k), ("N", self.n)) if value]
        return " and ".join(parts) or "any K and N"


@dataclass(frozen=True, slots=True)
class Table:
    """The layers that do not gain on one device under one scheme.

    Attributes:
        source: who measured, in words for a report.
        bounds: a layer is too small where any of them holds.
    """

    source: str
    bounds: tuple[Bounds, ...]


_H100 = "the published H100 table of torchao"
PUBLISHED = {
    "tensorwise": Table(_H100, (Bounds(4096, 1024),)),
    "rowwise": Table(_H100, (Bounds(None, 2048), Bounds(1024, None), Bounds(2048, 4096))),
}
"""By torchao's names for its recipes."""


def table_for(recipe: Recipe, device: torch.device) -> tuple[Table, str | None]:
    """The table of this device and scheme, and why it is not the device's own: None where it is."""
    name = device_name(device)
    measured = _measured().get(name, {}).get(type(recipe).__name__)
    if measured is not None:
        bounds = tuple(Bounds(entry["k"], entry["n"]) for entry in measured["bounds"])
        return Table(f"the measurement of {name}", bounds), None
    per_row = isinstance(recipe, Float8RowwiseScaling)
    table = PUBLISHED["rowwise" if per_row else "tensorwise"]
    return table, f"{type(recipe).__name__} was never measured on {name}"


def why_small(recipe: Recipe, weight: torch.Tensor) -> str | None:
    """Why a layer of this weight [N, K] does not gain; None where it may."""
    n, k = weight.shape
    table, stands_in = table_for(recipe, running_device(weight))
    for bounds in table.bounds:
        if bounds.hold(k, n):
            because = f" ({stands_in})" if stands_in else ""
            return (
                f"too small to gain by quantized products: K = {k} and N = {n}, and {table.source} "
                f"has no gain where {bounds}{because}"
            )
    return None


def running_device(weight: torch.Tensor) -> torch.device:
    """Where a layer will run: where its weight is, or the CUDA device that it will be moved to."""
    if weight.device.type in ("cpu", "meta") and torch.cuda.is_available():
        return torch.device("cuda")
    return weight.device


def device_name(device: torch.device) -> str:
    """By which measurements are kept: a GPU's own name, and else the type of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def smallest_gains(speedups: Mapping[tuple[int, int], float]) -> tuple[Bounds, ...]:
    """Bounds that hold for the measured (K, N) without gain, and for none with one.

    Args:
        speedups: of each measured pair, over the same layer in high precision, the largest over M.

    Returns:
        No bound within another.
    """
    losing = [pair for pair, speedup in speedups.items() if speedup <= 1]
    gaining = [pair for pair, speedup in speedups.items() if speedup > 1]
    if not gaining:
        return (Bounds(None, None),) if losing else ()
    safe = [pair for pair in losing if not any(Bounds(*pair).hold(*gain) for gain in gaining)]
    return tuple(
        Bounds(*pair)
        for pair in safe
        if not any(other != pair and Bounds(*other).hold(*pair) for other in safe)
    )


@cache
def _measured() -> Mapping[str, Any]:
    """By device and by recipe."""
    return json.loads(MEASUREMENTS.read_text())["devices"]


def read_filter(filter_fqns: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The parts of names to leave out, and whether small layers are, too."""
    return tuple(p for p in filter_fqns if p != AUTO_FILTER), AUTO_FILTER in filter_fqns
