"""Reads checkpoints of several formats, one tensor at a time, without executing code in a file.

It reads files of ``torch.save``, which are zip archives, with ``weights_only=True``;
``.safetensors`` files, if the package safetensors is installed; directories of
``torch.distributed.checkpoint``; and directories with files of the first two kinds. It does not
take much more memory than a file has bytes, whatever the file contains.
"""

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from zerocast.arguments import why_no_memory
from zerocast.errors import InputError
from zerocast.optim.boxes import Box, are_whole
from zerocast.safe_files import open_regular

NamedTensor = tuple[str, torch.Tensor | None]
"""A name and its tensor; None for other values."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of the files in a directory that are read."""

STANDS_FOR = (
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
    "torch.serialization", "pathlib", "pathlib._local",
)  # fmt: skip
"""The modules of the objects in metadata of torch.distributed.checkpoint, except dtypes and sizes.
"""

DEEPEST = 1000
"""The greatest depth of nested tuples in a pickle: Python cannot save deeper ones, and its stack
overflows when it compares tuples 100,000 deep.
"""

FILLING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")
"""The operations of pickles that put values into the object below them on the stack."""

CALLS = ("REDUCE", "NEWOBJ", "BUILD")
"""The operations of pickles that can copy their arguments."""

END, LOCATOR, END_OF_LARGE = 22, 20, 56
"""The sizes in bytes of the records at the end of an archive: the last one, and the two of archives
above 4 GiB.
"""

MOST_FIELDS = 64
"""The most dimensions of a shape in metadata, and attributes of an object."""


def entries(path: Path) -> Iterator[NamedTensor]:
    """Yield every entry of the checkpoint at ``path``, with tensors on the CPU.

    Raises:
        InputError: if it does not exist, or cannot be read without executing code in it.
    """
    if path.is_dir():
        yield from _directory(path)
    elif path.suffix == ".safetensors":
        yield from _safetensors(path)
    elif path.exists():
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for name, value in _flat("", _load(file, path), iter(range(size))):
                if value is not None:
                    _check_bytes(value, size)
                yield name, value
    else:
        raise InputError(f"inspect needs a file or a directory, and there is no {path}.")


def sources(path: Path) -> list[Path]:
    """Return the files that may belong to a checkpoint at ``path``."""
    files = path.rglob("*") if path.is_dir() else [path]
    suffixes = (*SUFFIXES, ".distcp", ".metadata")
    return [file for file in files if file == path or file.name.endswith(suffixes)]


def _directory(path: Path) -> Iterator[NamedTensor]:
    if (path / ".metadata").is_file():
        yield from _distributed(path)
        return
    files = [each for each in sorted(path.iterdir()) if each.suffix in SUFFIXES]
    files = [each for each in files if not each.is_dir()]  # links could multiply directories
    if not files:
        raise InputError(
            f"inspect needs a directory of torch.distributed.checkpoint, which has a file "
            f".metadata, or one with files that end in {', '.join(SUFFIXES)}; {path} has neither."
        )
    for file in files:
        for name, value in entries(file):
            yield (f"{file.name}: {name}" if len(files) > 1 else name), value


def _safetensors(path: Path) -> Iterator[NamedTensor]:
    if find_spec("safetensors") is None:
        raise InputError(
            f"{path} needs the package safetensors, which is not installed; pip install "
            "safetensors (transformers installs it as well)."
        )
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a dictionary)
                yield name, file.get_tensor(name)
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        raise InputError(f"{path} is not a readable .safetensors file: {error}") from error


def _load(source: IO[bytes], path: Path) -> Any:
    try:
        with zipfile.ZipFile(source) as archive:
            members, size = archive.infolist(), source.seek(0, io.SEEK_END)
            if sum(member.file_size for member in members) > size:
                raise InputError("it has members that are compressed, or share their bytes.")
            _check_directory(source, archive)
            names = {member.filename.lower() for member in members}  # torch ignores case
            keys = {name.partition("/data/")[2] for name in names}
            for member in members:
                if member.filename.lower().endswith(".pkl"):
                    _check_pickle(archive.read(member), keys)
        source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise InputError(
            f"{path} must be a zip archive, as torch.save writes since torch 1.6, and is not one "
            f"({error}); it is damaged, or of another format."
        ) from error
    except Exception as error:  # torch's unpickler raises many kinds for a damaged file
        text = str(error).rpartition("WeightsUnpickler error: ")[2]  # without torch's advice
        reason = (text.strip().splitlines() or [repr(error)])[0].partition(". ")[0].rstrip(".")
        raise InputError(
            f"{path} must hold tensors and plain containers alone, which torch.load reads with "
            f"weights_only=True: {reason}; save a state dict rather than a whole object."
        ) from error


def _check_directory(source: IO[bytes], archive: zipfile.ZipFile) -> None:
    """Raise :class:`InputError` if torch might read another directory of an archive than zipfile.

    They search for it in different ways.
    """
    source.seek(-END - LOCATOR, io.SEEK_END)
    end = source.read()
    is_large, at = end.startswith(b"PK\6\7"), int.from_bytes(end[8:16], "little")
    source.seek(archive.start_dir + 42)  # the offset of the first member, as stored
    first = int.from_bytes(source.read(4), "little")
    if (
        not end.startswith(b"PK\5\6", LOCATOR)  # a comment follows the last record
        or (is_large and at + END_OF_LARGE + len(end) != source.seek(0, io.SEEK_END))
        or first != archive.infolist()[0].header_offset
    ):
        raise InputError("its directory must be at its end only.")


def _check_pickle(data: bytes, keys: Container[str] = ()) -> None:
    """Raise :class:`InputError` if a pickle would take much more memory or time than its size.

    Also raise it if the pickle refers to one of the records ``keys``, in lower case, by a name in
    another case or with a NUL.
    """
    stack, marks = list[list[int]](), list[int]()  # for each value: depth of its tuples, its size
    memo, copied, most = dict[int, list[int]](), 0, 10 * len(data)
    for opcode, argument, _ in pickletools.genops(data):
        name, before = opcode.name, opcode.stack_before
        is_far = name.endswith("PUT") and int(str(argument)) > len(data)
        if is_far or (name == "GLOBAL" and str(argument).endswith(" bytearray")):
            raise InputError(f"it is not a pickle of tensors: {name} {argument}.")
        text = argument if isinstance(argument, str) else ""
        record = text.partition("\0")[0].lower()
        if record != text and record in keys:
            raise InputError(f"it names the record {record} {text!r}.")
        if name == "MARK":
            marks.append(len(stack))
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        elif name.endswith("PUT") or name == "MEMOIZE":
            memo[len(memo) if argument is None else int(str(argument))] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[int(str(argument))])
        else:
            has_mark = pickletools.markobject in before
            start = marks.pop() if has_mark else len(stack)
            start -= before.index(pickletools.markobject) if has_mark else len(before)
            if start < 0:
                raise InputError("it is not a pickle: its stack is empty.")
            given = stack[start:]
            depth = max((each[0] for each in given), default=0) + name.startswith("TUPLE")
            size = min(sum(each[1] for each in given) + 1 + len(text), most + 1)
            copied += size if name in CALLS else 0
            if depth > DEEPEST or copied > most or (name.startswith("TUPLE") and size > most):
                raise InputError("it has too many tuples in tuples, or copies of one value.")
            if name in FILLING:
                given[0][1] = size
            made = given[0] if name in FILLING else [0 if name in CALLS else depth, size]
            stack[start:] = [made] * len(opcode.stack_after)


def _check_bytes(tensor: torch.Tensor, size: int) -> None:
    """Raise :class:`InputError` if a tensor has more bytes than its file of ``size`` bytes, since
    its elements share memory.
    """
    nbytes = tensor.numel() * tensor.itemsize
    if why_no_memory(tensor) is None and nbytes > size:
        raise InputError(
            f"a tensor must be stored whole, got one of shape {list(tensor.shape)}, {nbytes} "
            f"bytes, of {size} that are stored; save a copy, such as .clone()."
        )


def _flat(prefix: str, value: Any, left: Iterator[int]) -> Iterator[NamedTensor]:
    """Yield the leaves of nested dictionaries and sequences, with names joined by dots.

    ``left`` yields once for each leaf and container, and an InputError is raised when it ends.
    """
    if next(left, None) is None:
        raise InputError(f"a file must have fewer values than bytes, and {prefix} has more.")
    children = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if isinstance(children, Mapping):
        for key, child in children.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), child, left)
    else:
        yield prefix or "(the file)", value if isinstance(value, torch.Tensor) else None


# --- torch.distributed.checkpoint ---


class _Record:
    """A stand-in for any object in the metadata, of which only attributes are read."""

    offset: Any = None
    transform_descriptors: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if len(state) > MOST_FIELDS:
            raise pickle.UnpicklingError(f"it has an object of {len(state)} attributes.")
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)


class _Metadata(pickle.Unpickler):
    """An unpickler of metadata that imports nothing, and calls only :class:`_Record` and sizes."""

    def find_class(self, module: str, name: str) -> Any:
        if module in STANDS_FOR:
            return _Record
        found = vars(torch).get(name) if module == "torch" else None
        if found is torch.Size:
            return _size
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}.")


def _size(values: Sequence[int] = ()) -> torch.Size:
    if len(values) > MOST_FIELDS:
        raise pickle.UnpicklingError(f"it has a shape of {len(values)} dimensions.")
    return torch.Size(values)


def _distributed(path: Path) -> Iterator[NamedTensor]:
    try:
        with open_regular(path / ".metadata") as file:
            data = file.read()
        _check_pickle(data)
        found: Any = _Metadata(io.BytesIO(data)).load()
        pieces: dict[str, list[Any]] = {}
        for index, info in found.storage_data.items():
            pieces.setdefault(index.fqn, []).append((index.offset, info))
        whole = found.state_dict_metadata.items()
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(
            f"{path / '.metadata'} is not that of torch.distributed.checkpoint: {error}"
        ) from error
    left = sum(file.stat().st_size for file in path.rglob("*"))
    for name, described in whole:
        if not hasattr(described, "properties"):
            yield str(name), None
            continue
        try:
            given = pieces.get(name, ())
            left -= sum(abs(info.length) for _, info in given)
            if left < 0:
                raise InputError("they have more bytes than the files")
            tensor = _joined(described, [(offset, _piece(path, info)) for offset, info in given])
        except (AttributeError, LookupError, RuntimeError, ValueError, TypeError, OSError) as error:
            raise InputError(f"the pieces of {name} in {path} cannot be read: {error}") from error
        yield str(name), tensor


def _joined(described: Any, pieces: Sequence[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """Return a whole tensor from its pieces, given with the offsets of their first elements."""
    shape, dtype = tuple(described.size), described.properties.state[0]
    boxes = [Box(tuple(offset or ()), tuple(tensor.shape)) for offset, tensor in pieces]
    if not are_whole(shape, boxes):
        raise InputError(f"they must cover it once: of shape {list(shape)}, there are {boxes[:9]}")
    if len(pieces) == 1:
        return pieces[0][1]
    value = torch.empty(shape, dtype=dtype, device="cpu")
    for box, (_, tensor) in zip(boxes, pieces, strict=True):
        if tensor.dtype != dtype:
            raise InputError(f"they must be {dtype}, and one is {tensor.dtype}")
        value[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] = tensor
    return value


def _piece(path: Path, info: Any) -> torch.Tensor:
    """Return one stored piece of a tensor."""
    file = (path / info.relative_path).resolve()
    if not file.is_relative_to(path.resolve()) or info.transform_descriptors:
        raise InputError(
            f"inspect reads files of a checkpoint's own directory that are stored as they are, got "
            f"{info.relative_path} with transformations {info.transform_descriptors}."
        )
    with open_regular(file) as stream:
        stream.seek(info.offset)
        if info.length > os.fstat(stream.fileno()).st_size:
            raise InputError(f"{file} is shorter than its pieces")
        value = _load(io.BytesIO(stream.read(info.length)), file)
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{file} holds a {type(value).__name__} where a tensor should be.")
    _check_bytes(value, info.length)
    return value.detach()
