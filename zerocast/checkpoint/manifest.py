"""The manifest of a checkpoint: its contents, where they are, and digests that show damage.

A checkpoint is a directory of safetensors files and a manifest, ``checkpoint.json``, which is put
in place last, by one rename. Each save gives its files new names. So if a save is killed at any
moment, the previous manifest and all files that it names are still there. A checkpoint in one file
has its manifest in the metadata of that file, which is renamed as a whole.

    zerocast_checkpoint   the version of this format
    digest                SHA-256 of the content, in JSON without spaces and with sorted keys
    content               saved       the id of the save
                          run         the run that saved it (:mod:`zerocast.checkpoint.runs`)
                          ranks       the number of ranks that saved it
                          versions    zerocast, its numerics, torch
                          files       name, bytes, first byte of the first block, digest of each
                          tensors     name -> dtype, shape, chunks: [file, first byte, offsets,
                                      sizes]
                          training    what was saved (:mod:`zerocast.optim.training_state`)
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerocast.checkpoint.files import BLOCK, DTYPES, FileInfo, remove_files
from zerocast.errors import InputError
from zerocast.optim.boxes import Box, are_whole
from zerocast.safe_files import MOST_DIMENSIONS, open_regular, read_header, read_text

FORMAT = 2
NAME = "checkpoint.json"
SUFFIX = ".safetensors"
KEY = "zerocast_checkpoint"
"""The key of the format version in a manifest, and of the manifest in the metadata of a file."""

OWN_FILES = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}(-rank\d{5,})?\.(safetensors|json|draft)")
"""Matches the names that saves give to their files: run, save and rank."""

DAMAGED = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
"""The errors that reading a damaged manifest raises."""

_NAMED = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, the file of its elements, and their first byte there."""

    box: Box
    file: FileInfo
    start: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, as boxes in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        saved: the id of the save.
        run: the run that saved it.
        ranks: the number of ranks that saved it.
        versions: the versions of zerocast, its numerics and torch.
        tensors: the tensors by name.
        training: the description of the training, in JSON values.
        digest: the digest in the manifest, by which ranks compare what they have read.
    """

    saved: str
    run: str
    ranks: int
    versions: dict[str, Any]
    tensors: dict[str, SavedTensor]
    training: dict[str, Any]
    digest: str = ""

    @property
    def files(self) -> dict[str, FileInfo]:
        """The files that its tensors are in, by name."""
        return {c.file.name: c.file for tensor in self.tensors.values() for c in tensor.chunks}

    def to_text(self) -> str:
        """Return the manifest as JSON."""
        numbers: dict[str, int] = {}
        files: list[dict[str, Any]] = []
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                if chunk.file.name not in numbers:
                    numbers[chunk.file.name] = len(files)
                    files.append(asdict(chunk.file))
        tensors = {
            name: {
                "dtype": DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "chunks": [[numbers[c.file.name], c.start, *c.box] for c in tensor.chunks],
            }
            for name, tensor in self.tensors.items()
        }
        content = {
            "saved": self.saved, "run": self.run, "ranks": self.ranks, "versions": self.versions,
            "files": files, "tensors": tensors, "training": self.training,
        }  # fmt: skip
        return json.dumps({KEY: FORMAT, "digest": _digest(content), "content": content})


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``.

    Raises:
        InputError: if there is no checkpoint, or it is damaged, of another program or another
            format.
    """
    try:
        if path.is_dir() or not path.exists():
            text = read_text(path / NAME)
        else:
            with open_regular(path) as file:
                text = read_header(file)[0].get("__metadata__", {}).get(KEY)
        given = json.loads(text)
        version = given[KEY]
    except FileNotFoundError:
        raise InputError(
            f"{path} holds no checkpoint: {path / NAME} does not exist. It is missing if a save "
            "was killed before its end."
        ) from None
    except (OSError, *DAMAGED) as error:
        raise InputError(
            f"{path} is not a checkpoint of zerocast, or its manifest is damaged "
            f"({type(error).__name__}: {error}); load an earlier checkpoint."
        ) from None
    if version != FORMAT:
        raise InputError(
            f"{path} is a checkpoint of format {version!r}, and this version of zerocast reads "
            f"format {FORMAT}; install the version that saved it."
        )
    try:
        content = given["content"]
        if given["digest"] != _digest(content):
            raise ValueError("its digest differs")
        if text != json.dumps(given):  # 1E-8 has the digest of 1e-8
            raise ValueError("its text differs from what was saved")
        return _parsed(content, given["digest"])
    except DAMAGED as error:
        raise InputError(
            f"the manifest of {path} is damaged ({type(error).__name__}: {error}); load an earlier "
            f"checkpoint."
        ) from None


def remove_saved(directory: Path, text: str, manifest: Manifest | None = None) -> None:
    """Remove the files of saves that have ``text`` in their names, except those that ``manifest``
    names; ignore files that cannot be removed.
    """
    named = manifest.files if manifest else {}
    with suppress(OSError):
        found = [each for each in directory.iterdir() if OWN_FILES.fullmatch(each.name)]
        remove_files(each for each in found if text in each.name and each.name not in named)


def check_place(path: Path) -> None:
    """Raise :class:`InputError` if ``path`` has other files, or exists and is not a directory."""
    if path.is_dir():
        foreign = [
            each.name for each in path.iterdir()
            if each.name != NAME and not OWN_FILES.fullmatch(each.name)
        ]  # fmt: skip
        if foreign:
            raise InputError(
                f"a checkpoint needs a separate directory, and {path} holds {foreign[0]!r}, which "
                "zerocast did not save; choose another directory."
            )
    elif path.exists():
        raise InputError(f"{path} must be a directory for a checkpoint; choose another path.")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parsed(content: Mapping[str, Any], digest: str) -> Manifest:
    files = [FileInfo(**each) for each in content["files"]]
    for file in files:
        begin, end = _counts([file.begin, file.num_bytes])
        if Path(file.name).name != file.name or file.name in ("", ".."):
            raise ValueError(f"{file.name!r} is not a file in its directory")
        if begin > end or len(file.digests) != math.ceil((end - begin) / BLOCK):
            raise ValueError(f"it does not have a digest for each block of {file.name}")
    tensors = {}
    for name, given in content["tensors"].items():
        dtype, shape = _NAMED[given["dtype"]], _counts(given["shape"])
        chunks = []
        for number, start, offsets, sizes in given["chunks"]:
            chunk = Chunk(Box(_counts(offsets), _counts(sizes)), files[number], *_counts([start]))
            end = start + math.prod(chunk.box.sizes) * dtype.itemsize
            if start < chunk.file.begin or end > chunk.file.num_bytes:
                raise ValueError(f"{name} is outside of its file")
            chunks.append(chunk)
        if not are_whole(shape, [chunk.box for chunk in chunks]):
            raise ValueError(f"the pieces of {name} do not cover each of its elements once")
        tensors[name] = SavedTensor(dtype, shape, chunks)
    ranks, training = _counts([content["ranks"]])[0], dict(content["training"])
    saved, run = str(content["saved"]), str(content["run"])
    return Manifest(saved, run, ranks, content["versions"], tensors, training, digest)


def _counts(values: Any) -> tuple[int, ...]:
    """Return ``values`` as a tuple; raise ``ValueError`` unless all are integers in [0, 2**63)."""
    if len(values) > MOST_DIMENSIONS:
        raise ValueError(f"it has a shape of {len(values)} dimensions")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{value!r} is not a count")
    return tuple(values)
