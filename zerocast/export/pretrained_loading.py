"""load_pretrained: reads the quantized checkpoints that servers load."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.known_dialects import KNOWN_DIALECTS, as_dialect
from zerocast.export.stages import NamedTensors
from zerocast.export.stored_files import UNREADABLE, StoredFiles, read_json
from zerocast.recipes import NOMINAL_DTYPES


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
    folder = Path(directory)
    configuration = read_configuration(folder)
    files = StoredFiles(folder)
    try:
        stored = {name: each.whole().to(device) for name, each in files.tensors.items()}
    except UNREADABLE as error:
        raise InputError(f"{folder} has a file that cannot be read: {error}") from error
    found = dialect_of(configuration, folder, stored) if dialect is None else as_dialect(dialect)
    dtype = nominal_dtype(configuration) if dtype is None else dtype
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


def read_configuration(folder: Path) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of a checkpoint.

    Raises:
        InputError: if there is none, or it cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"a checkpoint is a directory with a config.json, which is written last, and "
            f"{folder} has none."
        )
    return read_json(path)


def dialect_of(configuration: dict[str, Any], folder: Path, stored: NamedTensors) -> Dialect:
    """Return the dialect whose section is in ``configuration``. If several have that section,
    return the one that matches the names, and dtypes of codes, of ``stored``.
    """
    given = configuration.get("quantization_config")
    found = [
        dialect
        for dialect in KNOWN_DIALECTS.values()
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
        f"of {', '.join(KNOWN_DIALECTS)}."
    )


def _is_of(dialect: Dialect, name: str, stored: NamedTensors) -> bool:
    """Return False if a tensor holds codes, with scales stored, of another dtype than the
    dialect's.
    """
    parameter, part = dialect.parameter_of(name) or ("", "")
    is_codes = part == dialect.codes and stored_name(parameter, dialect.scales) in stored
    return not is_codes or stored[name].dtype == dialect.code_dtype


def nominal_dtype(configuration: dict[str, Any]) -> torch.dtype:
    """Return the dtype that ``configuration`` names; BF16 if it names no nominal dtype."""
    name = str(configuration.get("dtype", configuration.get("torch_dtype")))
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in NOMINAL_DTYPES}
    return dtypes.get(name.removeprefix("torch."), torch.bfloat16)
