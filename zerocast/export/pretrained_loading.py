"""load_pretrained: reads the quantized checkpoints that servers load."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.folder import require_safetensors
from zerocast.export.known_dialects import DIALECTS, MIXED_DIALECTS, as_dialect
from zerocast.export.stages import NamedTensors
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.safe_files import open_regular, read_text


def load_pretrained(
    directory: str | os.PathLike[str],
    *,
    dialect: Dialect | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> NamedTensors:
    """Load a checkpoint that :func:`save_pretrained`, or another program, saved in a dialect.

    Args:
        directory: a directory of safetensors files, with their index if there are several.
        dialect: the dialect of the files; by default the one whose ``quantization_config`` is in
            ``config.json``, as after :func:`save_pretrained`.
        dtype: the nominal dtype of quantized weights; by default that of ``config.json``, or BF16.
        device: the device of the returned tensors.

    Returns:
        The model's parameters and buffers by name: quantized weights as
        :class:`zerocast.QuantizedTensor` of the dialect's recipe, without columnwise copies; all
        others as they are stored.

    Raises:
        InputError: if the directory is unfinished or damaged, or its tensors do not match the
            dialect.
    """
    require_safetensors()
    folder = Path(directory)
    configuration = _read_configuration(folder)
    stored = _read(folder, torch.device(device))
    found = _dialect_of(configuration, folder, stored) if dialect is None else as_dialect(dialect)
    dtype = _nominal_dtype(configuration) if dtype is None else dtype
    try:
        return decode_tensors(stored, found, dtype)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error


def decode_tensors(
    stored: Mapping[str, torch.Tensor], dialect: Dialect | str, dtype: torch.dtype = torch.bfloat16
) -> NamedTensors:
    """Decode the tensors of a checkpoint, or of a :class:`zerocast.refit.Receiver`.

    Args:
        stored: the tensors by their names in the checkpoint.
        dialect: the dialect of the checkpoint, or its name.
        dtype: the nominal dtype of quantized weights.

    Returns:
        The parameters and buffers, as :func:`load_pretrained` returns them.

    Raises:
        InputError: if a tensor is missing or does not match the dialect.
    """
    given, loaded = as_dialect(dialect), NamedTensors()
    for name, tensor in stored.items():
        found = given.of_stored(name, stored)
        parameter, part = found.parameter_of(name) or ("", "")
        if not part or stored_name(parameter, found.scales) not in stored:
            loaded[name] = tensor
        elif part == found.codes:
            names = {part: stored_name(parameter, part) for part in found.names}
            parts = {part: stored[name] for part, name in names.items() if name in stored}
            try:
                loaded[parameter] = found.decode(parts, dtype)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
    return loaded


# --- files ---


def _read(folder: Path, device: torch.device) -> NamedTensors:
    """Return the tensors of all files."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    tensors: NamedTensors = {}
    try:
        places = dict(json.loads(read_text(index))["weight_map"]) if index.is_file() else {}
        for file in sorted(set(places.values())) or ["model.safetensors"]:
            if Path(file).name != file:
                raise ValueError(f"its index names {file!r}, which is not one of its files")
            open_regular(folder / file).close()
            with safe_open(folder / file, framework="pt", device=str(device)) as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (
        OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError, SafetensorError,
    ) as error:  # fmt: skip
        raise InputError(f"{folder} has a file that cannot be read: {error}") from error
    missing = places.keys() - tensors.keys()
    if missing:
        raise InputError(f"{folder} lacks {min(missing)}, which its index names.")
    return tensors


def _read_configuration(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"load_pretrained needs a directory with a config.json, which is written last, and "
            f"{folder} has none."
        )
    try:
        configuration = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(configuration, dict):
        raise InputError(f"{path} must hold an object, got {type(configuration).__name__}.")
    return configuration


def _dialect_of(configuration: dict[str, Any], folder: Path, stored: NamedTensors) -> Dialect:
    """Return the dialect whose section is in ``configuration``. If several have that section,
    return the one that matches the names, and dtypes of codes, of ``stored``.
    """
    given = configuration.get("quantization_config")
    found = [
        dialect
        for dialect in (*DIALECTS.values(), *MIXED_DIALECTS.values())
        if isinstance(given, dict) and dialect.has_section(given)
    ]
    named = [
        dialect
        for dialect in found
        if any(name.rpartition(".")[2] == dialect.scales for name in stored)
    ]
    for dialect in named:
        if all(_is_of(dialect.of(name), name, stored) for name in stored):
            return dialect
    if found:
        return (named or found)[0]
    raise InputError(
        f"load_pretrained needs dialect=, because the quantization_config in {folder} matches none "
        f"of {', '.join([*DIALECTS, *MIXED_DIALECTS])}."
    )


def _is_of(dialect: Dialect, name: str, stored: NamedTensors) -> bool:
    """Return False if a tensor holds codes, with scales stored, of another dtype than the
    dialect's.
    """
    parameter, part = dialect.parameter_of(name) or ("", "")
    is_codes = part == dialect.codes and stored_name(parameter, dialect.scales) in stored
    return not is_codes or stored[name].dtype == dialect.code_dtype


def _nominal_dtype(configuration: dict[str, Any]) -> torch.dtype:
    """Return the dtype that ``configuration`` names; BF16 if it names no nominal dtype."""
    name = str(configuration.get("dtype", configuration.get("torch_dtype")))
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in NOMINAL_DTYPES}
    return dtypes.get(name.removeprefix("torch."), torch.bfloat16)
