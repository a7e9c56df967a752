"""The directory of an export: the files that are written, that it must not hold, or are copied."""

import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerocast.errors import InputError
from zerocast.export.stages import NamedTensors
from zerocast.safe_files import DRAFTS, read_tensor_table

INDEX = "model.safetensors.index.json"
"""The file that says which file has a tensor, where there are several."""

MODEL_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json",
    "hf_quant_config.json",
)  # fmt: skip
"""Files that would be read as part of the model, or instead of it; a directory with any is refused.
"""

OTHER_WEIGHTS = (
    ".*", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack",
    "*.onnx", "*.onnx_data", "*.sha256",
)  # fmt: skip
"""Files of weights in other formats, checksums, and hidden files; these are not copied."""

NOT_COPIED = (*MODEL_FILES, *OTHER_WEIGHTS, "generation_config.json")
"""Files of a tokenizer's directory that are not copied: the weights and configuration of its model.
All others are copied, since tokenizer files, such as emoji.json or bpe.codes, follow no pattern.
"""

TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.spm", "*processor*")
"""Files that identify a tokenizer or processor; each one of transformers has at least one."""


def add_tokenizer(tokenizer: Any, drafts: Path) -> None:
    """Write the files of a tokenizer or processor to ``drafts``, or copy those of its directory.

    Raises:
        InputError: if ``tokenizer`` is neither, or writes a ``config.json``.
    """
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(drafts)
    elif isinstance(tokenizer, str | os.PathLike):
        copy_other_files(Path(tokenizer), drafts, NOT_COPIED)
    names = os.listdir(drafts)
    if not any(_is_any_of(name, TOKENIZER_FILES) for name in names) or "config.json" in names:
        raise InputError(
            f"tokenizer must have a method save_pretrained, which writes a tokenizer and no model, "
            f"or be a directory with tokenizer files, got {tokenizer!r:.200}."
        )


def copy_other_files(source: Path, drafts: Path, but: Sequence[str]) -> None:
    """Copy the files of ``source``, and its chat templates, but those that match a pattern."""
    for file in (*source.glob("*"), *source.glob("additional_chat_templates/*")):
        if file.is_file() and not _is_any_of(file.name, but):
            draft = drafts / file.relative_to(source)
            draft.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, draft)  # follows links, which the hub's cache consists of


def file_names(count: int) -> list[str]:
    """Return the names of ``count`` files of tensors."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def write_tensors(tensors: NamedTensors, path: Path) -> None:
    """Write a safetensors file from host memory."""
    from safetensors.torch import save_file

    on_host = NamedTensors()
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.cpu().contiguous()
        memory = stored.untyped_storage()
        # safetensors refuses tensors that share memory or are views of larger storages.
        is_alone = memory.nbytes() == stored.nbytes and memory.data_ptr() not in seen
        on_host[name] = stored if is_alone else stored.clone()
        seen.add(memory.data_ptr())
    save_file(on_host, path, metadata={"format": "pt"})


def write_index(folder: Path, files: Sequence[str]) -> None:
    """Write the index of some files of tensors in ``folder``, if there are several."""
    places, size = dict[str, str](), 0
    for name in files if len(files) > 1 else ():
        with (folder / name).open("rb") as file:
            for each in read_tensor_table(file):
                places[each.name] = name
                size += each.end - each.start
    if places:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        write_json(index, folder / INDEX)


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def check_folder(drafts: Path) -> None:
    """Raise :class:`InputError` if the parent of ``drafts`` has unwanted files.

    These are files of a model, files with the name of a draft, and other drafts.
    """
    folder, unwanted = drafts.parent, (*MODEL_FILES, DRAFTS, *os.listdir(drafts))
    names = {name for name in os.listdir(folder) if _is_any_of(name, unwanted)} - {drafts.name}
    if names:
        raise InputError(
            f"save_pretrained needs a directory without files of a model, such as safetensors, "
            f"their index and config.json, and without the drafts of an export that is under way "
            f"or was killed, got {folder}, which has {', '.join(sorted(names)[:5])}; choose "
            f"another, or remove them."
        )


def _is_any_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def require_safetensors() -> None:
    """Raise :class:`InputError` where the package safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise InputError(
            "a checkpoint that servers load needs the package safetensors, which is not installed; "
            "pip install safetensors (transformers installs it as well)."
        )
