"""The directory of an export: what it needs, files it must not hold, tokenizer files to copy."""

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerocast.errors import InputError
from zerocast.safe_files import DRAFTS

MODEL_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json",
    "hf_quant_config.json",
)  # fmt: skip
"""Files that would be read as part of the model, or instead of it; a directory with any is refused.
"""

NOT_COPIED = (
    *MODEL_FILES, "generation_config.json", ".*", "*.index.json", "*.bin", "*.pt", "*.pth",
    "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
)  # fmt: skip
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
        source = Path(tokenizer)
        for file in (*source.glob("*"), *source.glob("additional_chat_templates/*")):
            if file.is_file() and not _is_any_of(file.name, NOT_COPIED):
                draft = drafts / file.relative_to(source)
                draft.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, draft)  # follows links, which the hub's cache consists of
    names = os.listdir(drafts)
    if not any(_is_any_of(name, TOKENIZER_FILES) for name in names) or "config.json" in names:
        raise InputError(
            f"tokenizer must have a method save_pretrained, which writes a tokenizer and no model, "
            f"or be a directory with tokenizer files, got {tokenizer!r:.200}."
        )


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
