"""Static scales of the inputs of layers, which a caller has measured: scalars beside the codes."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.arguments import shown
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Entry
from zerocast.sharded.placement import to_local

InputScales: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | None"
"""The scales by the names of modules in the checkpoint, or a file of safetensors that has them."""


def with_input_scales(
    dialect: Dialect, entries: Sequence[Entry], given: InputScales
) -> list[Entry]:
    """Return ``entries``, behind each quantized weight the scale of its layer's inputs where
    ``dialect`` has such.

    Raises:
        InputError: where a layer has none, one is left over, or one is no positive finite number.
    """
    part = dialect.input_scale
    if part is None:
        if given is not None:
            raise InputError(
                f"input_scales are for dialects with static scales of inputs, and servers of "
                f"{dialect.name} scale inputs as they come; leave input_scales out."
            )
        return list(entries)
    if given is None:
        raise InputError(
            f"{dialect.name} has static scales of inputs, without which servers compute nonsense; "
            f"give input_scales=, a mapping from names of modules to numbers or a safetensors file "
            f"with X.{part}, or choose a dialect that needs none, such as modelopt/fp8-channel."
        )
    scales = dict(given) if isinstance(given, Mapping) else _read(given, part)
    found: list[Entry] = []
    for entry in entries:
        found.append(entry)
        module = entry.stored.rpartition(".")[0]
        if entry.recipe is not None:
            if module not in scales:
                raise InputError(
                    f"input_scales must have one of each quantized module, and {module} has none."
                )
            device = to_local(entry.tensor).device
            scale = torch.tensor(_number(module, scales.pop(module)), device=device)
            name = f"{module}.{part}"
            found.append(Entry(name, scale, torch.float32, exported_as=name))
    taken = [entry.stored for entry in found]
    if scales or len(set(taken)) < len(taken):
        raise InputError(
            f"input_scales must be of quantized modules, by their names in the checkpoint, each "
            f"once, got {', '.join([*map(str, scales)][:4]) or 'some that the model has, too'}."
        )
    return found


def _number(module: str, value: Any) -> float:
    """Return a scale as it is stored: the nearest FP32 number."""
    try:
        number = torch.as_tensor(value, dtype=torch.float32).item()
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(
            f"input_scales must be positive finite numbers, got {shown(value)} for {module}."
        )
    return number


def _read(path: Any, part: str) -> dict[str, torch.Tensor]:
    """Return the scales that a file has, and nothing else of it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(f".{part}")]  # noqa: SIM118
            return {name.removesuffix(f".{part}"): file.get_tensor(name) for name in names}
    except (OSError, TypeError, SafetensorError) as error:
        raise InputError(
            f"input_scales must be a mapping or a safetensors file, got {shown(path)}, which "
            f"cannot be read: {error}"
        ) from error
