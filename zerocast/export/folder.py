"""The directory of an export: what may be in it before, and which files of a tokenizer come in."""

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zerocast.errors import InputError
from zerocast.safe_files import DRAFTS

MODEL_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json",
    "hf_quant_config.json",
)  # fmt: skip
"""What would be read as a part of the model, or in its place: no directory with them is filled."""

NOT_COPIED = (
    *MODEL_FILES, "generation_config.json", ".*", "*.index.json", "*.bin", "*.pt", "*.pth",
    "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
)  # fmt: skip
"""What is left in a tokenizer's directory: the weights and configuration of its model. All else is
copied: the names of tokenizers' files, such as emoji.json or bpe.codes, follow no pattern.
"""

TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.spm", "*processor*")
"""What tells a tokenizer or processor from else; each of transformers has some."""


def add_tokenizer(tokenizer: Any, drafts: Path) -> None:
    """Write the files of a tokenizer or processor to ``drafts``, or copy those of its directory.

    Raises:
        InputError: where it is neither.
    """
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(drafts)
    elif isinstance(tokenizer, str | os.PathLike):
        source = Path(tokenizer)
        for file in (*source.glob("*"), *source.glob("additional_chat_templates/*")):
            if file.is_file() and not _is_any_of(file.name, NOT_COPIED):
                draft = drafts / file.relative_to(source)
                draft.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, draft)  # of a link, which a hub's cache has, its target
    names = os.listdir(drafts)
    if not any(_is_any_of(name, TOKENIZER_FILES) for name in names) or "config.json" in names:
        raise InputError(
            f"tokenizer must have a method save_pretrained, which writes a tokenizer and no model, "
            f"or be a directory with tokenizer files, got {tokenizer!r:.200}."
        )


def check_folder(drafts: Path) -> None:
    """Raise :class:`InputError` where the directory that ``drafts`` is in has files of a model or
    one of the name of a draft, or other drafts.
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
