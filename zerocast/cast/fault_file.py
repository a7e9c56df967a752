"""Fault files: all that is needed to repeat a cast on one machine, and the bytes that were found.

A file has the safetensors format: eight bytes with the length of a JSON header, the header, and the
tensors. It is written and read here without that package, and nothing in it is executed::

    master           FP32, of the whole weight, or of its tensor-parallel shard
    amaxes           int32, of the cast by the reference
    before/<name>    the recipe state before the cast
    held/<name>      the buffers that the rank held

The header also describes the fault, under ``__metadata__``, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.safe_files import LENGTH, MOST_DIMENSIONS, open_regular, read_header

FORMAT = "zerocast fault 1"

_DTYPES = {
    "F32": torch.float32, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_fault(path: Path, fault: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new file; ``fault`` must be serializable as JSON.

    Raises:
        OSError: if it cannot be written.
    """
    described: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "fault": json.dumps(dict(fault))}
    }
    data, end = list[bytes](), 0
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        # Not numpy(): memory exported to NumPy cannot be resized, which FSDP2 does.
        data.append(ctypes.string_at(own.data_ptr(), own.nbytes))
        described[name] = {
            "dtype": _NAMES[own.dtype],
            "shape": list(own.shape),
            "data_offsets": [end, end + own.nbytes],
        }
        end += own.nbytes
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:  # new: a symbolic link is not followed
        file.writelines([len(header).to_bytes(LENGTH, "little"), header, *data])


def read_fault(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what :func:`write_fault` was given.

    Raises:
        InputError: for a file of another format, or a damaged one.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        with open_regular(path) as file:
            described, _ = read_header(file)
            data = file.read()
        metadata = described.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}")
        fault: dict[str, Any] = json.loads(metadata["fault"])
        end = 0
        for name, entry in described.items():
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            first, last = entry["data_offsets"]
            if len(shape) > MOST_DIMENSIONS or not all(0 <= size < 2**63 for size in shape):
                raise ValueError(f"{name} has a shape of {len(shape)} dimensions, or none")
            count = math.prod(shape)
            if first != end or not 0 <= count * dtype.itemsize == last - first <= len(data) - end:
                raise ValueError(f"{name} is outside of the file, or overlaps the tensor before it")
            end = last
            flat = torch.empty(0, dtype=dtype, device="cpu")
            if count:
                flat = torch.frombuffer(bytearray(data[first:last]), dtype=dtype)
            tensors[name] = flat.view(shape)
    except Exception as error:  # whatever Python and torch raise for a damaged header
        raise InputError(
            f"{path} must be a file that verify wrote, {FORMAT!r}, and is damaged or of another "
            f"kind: {type(error).__name__}: {error}."
        ) from error
    return fault, tensors
