"""Static input scales of layers, measured by the caller and stored as numbers beside the codes."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.arguments import shown
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Entry
from zerocast.safe_files import open_regular
from zerocast.sharded.placement import to_local

InputScales: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | None"
"""Scales by the names of modules in the checkpoint, or a safetensors file that holds them."""


def with_input_scales(
    dialect: Dialect, entries: Sequence[Entry], given: InputScales
) -> list[Entry]:
    """Return ``entries``, with the input scale of its layer after each quantized weight whose
    dialect has input scales.

    Raises:
        InputError: if a layer has no scale, a scale has no layer or is not a positive finite
            number, or ``dialect``, that of the checkpoint, has no input scales.
    """
    static = [entry for entry in entries if entry.recipe and entry.dialect.input_scale]
    part = next((entry.dialect.input_scale for entry in static), None)
    if part is None and given is not None:
        raise InputError(
            "input_scales are for dialects with static scales of inputs, and servers of "
            f"{dialect.name} compute the scales of inputs; leave input_scales out."
        )
    if part is None:
        return list(entries)
    if given is None:
        raise InputError(
            f"{dialect.name} has static scales of inputs, which servers need; give input_scales=, "
            f"a mapping from names of modules to numbers or a safetensors file with X.{part}, or "
            "choose a dialect that needs none, such as modelopt/fp8-channel."
        )
    scales = dict(given) if isinstance(given, Mapping) else _read(given, part)
    names = {entry.module for entry in static}
    stored = {entry.stored for entry in entries}
    wrong = (names ^ scales.keys()) | {name for name in names if f"{name}.{part}" in stored}
    if wrong:
        raise InputError(
            "input_scales must have one of each quantized module, by its name in the checkpoint, "
            f"and no other, got {len(scales)} for {len(names)} modules; wrong are "
            f"{', '.join(sorted(map(str, wrong))[:8])}."
        )
    found: list[Entry] = []
    for entry in entries:
        found.append(entry)
        if entry.recipe is not None and entry.dialect.input_scale is not None:
            scale = _scale(entry.module, scales[entry.module]).to(to_local(entry.tensor).device)
            if entry.dialect.tensor_scale is not None:
                scale = scale.reshape(entry.dialect.tensor_scale.shape)
            name = f"{entry.module}.{part}"
            found.append(Entry(name, scale, torch.float32, entry.dialect, exported_as=name))
    return found


def _scale(module: str, value: Any) -> torch.Tensor:
    """Return ``value`` rounded to FP32, as it is stored."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = 0.0
    scale = torch.tensor(number, dtype=torch.float32, device="cpu")
    if not 0 < scale.item() < math.inf:
        raise InputError(
            f"input_scales must be positive finite numbers, got {shown(value)} for {module}."
        )
    return scale


def _read(path: Any, part: str) -> dict[str, Any]:
    """Return the scales in a safetensors file, without its other tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(f".{part}")]  # noqa: SIM118
            return {name.removesuffix(f".{part}"): file.get_tensor(name) for name in names}
    except (OSError, ValueError, TypeError, MemoryError, SafetensorError) as error:
        raise InputError(
            f"input_scales must be a mapping or a safetensors file, got {shown(path)}, which "
            f"cannot be read: {error}"
        ) from error
