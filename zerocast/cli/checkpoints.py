"""Reading checkpoints: one tensor at a time, in every format; nothing in a file is executed.

It reads files of ``torch.save``, with ``weights_only=True``; ``.safetensors`` files, where the
package safetensors is installed; directories of ``torch.distributed.checkpoint``; and directories
that hold files of the first two kinds.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from zerocast.errors import InputError

Entry = tuple[str, torch.Tensor | None]
"""A name and its tensor; None for other values."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""The files of a directory that are read."""


def entries(path: Path) -> Iterator[Entry]:
    """Yield everything that the checkpoint at ``path`` holds, on the CPU.

    Raises:
        InputError: where it does not exist, or cannot be read without executing what it says.
    """
    if path.is_dir():
        yield from _directory(path)
    elif path.suffix == ".safetensors":
        yield from _safetensors(path)
    elif path.is_file():
        yield from _flat("", _load(path, path))
    else:
        raise InputError(f"inspect needs a file or a directory, and there is no {path}.")


def sources(path: Path) -> list[Path]:
    """Return the files of which a checkpoint at ``path`` may consist."""
    files = path.rglob("*") if path.is_dir() else [path]
    suffixes = (*SUFFIXES, ".distcp", ".metadata")
    return [file for file in files if file == path or file.name.endswith(suffixes)]


def _directory(path: Path) -> Iterator[Entry]:
    if (path / ".metadata").is_file():
        yield from _distributed(path)
        return
    files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
    if not files:
        raise InputError(
            f"inspect needs a directory of torch.distributed.checkpoint, which has a file "
            f".metadata, or one with files that end in {', '.join(SUFFIXES)}; {path} has neither."
        )
    for file in files:
        for name, value in entries(file):
            yield (f"{file.name}: {name}" if len(files) > 1 else name), value


def _safetensors(path: Path) -> Iterator[Entry]:
    if find_spec("safetensors") is None:
        raise InputError(
            f"{path} needs the package safetensors, which is not installed; pip install "
            "safetensors (transformers brings it, too)."
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable .safetensors file: {error}") from error


def _load(source: Path | io.BytesIO, path: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file makes torch's unpickler raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{path} cannot be read as tensors alone (torch.load with weights_only=True): {reason} "
            "Save a state dict rather than a whole object."
        ) from error


def _flat(prefix: str, value: Any) -> Iterator[Entry]:
    """Yield the leaves of nested dictionaries and sequences, by names joined with dots."""
    children = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if isinstance(children, Mapping):
        for key, child in children.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), child)
    else:
        yield prefix or "(the file)", value if isinstance(value, torch.Tensor) else None


# --- torch.distributed.checkpoint ---


class _Metadata(pickle.Unpickler):
    """Unpickles the types that the metadata of a checkpoint consist of, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = (
            super().find_class(module, name) if module.startswith(("torch", "pathlib")) else None
        )
        plain = {("torch", "Size"), ("torch.serialization", "_get_layout")}
        stored = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        if (
            (module, name) in plain | {stored}
            or isinstance(found, torch.dtype)
            or (module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"))
            or (module == metadata.__name__ and getattr(found, "__module__", "") == module)
        ):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}.")


def _distributed(path: Path) -> Iterator[Entry]:
    try:
        found = _Metadata(io.BytesIO((path / ".metadata").read_bytes())).load()
        pieces: dict[str, list[Any]] = {}
        for index, info in found.storage_data.items():
            pieces.setdefault(index.fqn, []).append((index.offset, info))
        whole = found.state_dict_metadata.items()
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise InputError(
            f"{path / '.metadata'} is not that of torch.distributed.checkpoint: {error}"
        ) from error
    for name, described in whole:
        if not isinstance(described, metadata.TensorStorageMetadata):
            yield name, None
            continue
        tensors = [(offset, _piece(path, info)) for offset, info in pieces.get(name, ())]
        if len(tensors) == 1 and tensors[0][1].shape == described.size:
            yield name, tensors[0][1]
            continue
        value = torch.zeros(described.size, dtype=described.properties.dtype, device="cpu")
        try:
            for offset, tensor in tensors:
                place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                value[place] = tensor
        except (RuntimeError, ValueError, TypeError) as error:
            raise InputError(f"the pieces of {name} in {path} do not fit: {error}") from error
        yield name, value


def _piece(path: Path, info: Any) -> torch.Tensor:
    """Return what one rank stored of one tensor."""
    file = (path / info.relative_path).resolve()
    if not file.is_relative_to(path.resolve()) or getattr(info, "transform_descriptors", None):
        raise InputError(
            f"inspect reads files of a checkpoint's own directory that are stored as they are, got "
            f"{info.relative_path} with transformations {info.transform_descriptors}."
        )
    with file.open("rb") as stream:
        stream.seek(info.offset)
        value = _load(io.BytesIO(stream.read(info.length)), file)
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{file} holds a {type(value).__name__} where a tensor should be.")
    return value.detach()
