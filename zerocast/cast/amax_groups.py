"""Amax groups: weights that share one tensor amax, and so one tensor scale.

A server that fuses projections (query, key and value; gate and up) into one GEMM needs one tensor
scale for them. Weights that share their amax from the start of training have one, and are cast as
if they were one weight, concatenated by rows. Schemes without a tensor scale (blockwise, row-wise,
MXFP8) can be fused as they are; a group does not change their bytes.

Which weights servers fuse is known for the models of two packages, :data:`FAMILIES`, and for
checkpoints of the first, by the names in :data:`FUSED`, which are vLLM's
``packed_modules_mapping``. Other classes are not considered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from zerocast.errors import InputError
from zerocast.tensors.wrapped_names import named_modules

Patterns: TypeAlias = Sequence[Sequence[str]]
"""For each group the patterns of its members' names, such as ``["*.wq", "*.wk", "*.wv"]``."""

Groups: TypeAlias = Patterns | Literal["auto"]
"""Those patterns, or :data:`AUTO`."""

AUTO: Literal["auto"] = "auto"
"""The weights that servers are known to fuse: :func:`fused_weights`."""

FAMILIES = ("transformers.models.", "torchtitan.models.", "zerocast.export.stored_model")
"""Prefixes of the modules that define the classes, or base classes, whose weights servers fuse."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("w1_EFD", "w3_EFD"),
)
"""The names of layers, or stacks of experts, of one module that servers fuse. If a module has some
of the names of a row, these are fused."""


def fused_weights(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return the sets of weights that servers fuse, by their fully qualified names.

    Each set has two or more weights of one module with equal numbers of columns.
    """
    found: list[dict[str, torch.Tensor]] = []
    for fqn, module in named_modules(model):
        if not any(each.__module__.startswith(FAMILIES) for each in type(module).__mro__):
            continue
        for names in FUSED:
            by_columns: dict[int, dict[str, torch.Tensor]] = {}
            for name, weight in (_weight(module, name) for name in names):
                if weight is not None:
                    of_columns = by_columns.setdefault(weight.shape[-1], {})
                    of_columns[f"{fqn}.{name}".lstrip(".")] = weight
            found += [weights for weights in by_columns.values() if len(weights) > 1]
    return found


def _weight(module: torch.nn.Module, name: str) -> tuple[str, torch.Tensor | None]:
    """Return the name and the weight of the linear layer, or of the stack, ``name`` of a module.

    The weight is None if the module has none. An adapter of peft has the layer as ``base_layer``.
    """
    layer: object = module._modules.get(name)
    if hasattr(layer, "base_layer"):
        layer, name = layer.base_layer, f"{name}.base_layer"
    if isinstance(layer, torch.nn.Linear):
        return f"{name}.weight", layer._parameters.get("weight")
    stack = module._parameters.get(name)
    return name, stack if stack is not None and stack.dim() > 2 else None


def by_first_names(labels: Sequence[str | None], names: Sequence[str]) -> list[str | None]:
    """Return the label of each weight's group that ranks compare: the name of its first weight.

    Labels from a conversion only distinguish the groups of one process.
    """
    first: dict[str | None, str] = {}
    taken = set[str]()
    for label, name in zip(labels, names, strict=True):
        if label is None or label in first:
            continue
        while name in taken:  # weights of several models
            name += "'"
        taken.add(name)
        first[label] = name
    return [first.get(label) for label in labels]


def is_auto(amax_groups: object) -> bool:
    """Return whether ``amax_groups`` is :data:`AUTO`."""
    return isinstance(amax_groups, str) and amax_groups == AUTO


def check_patterns(patterns: object) -> None:
    """Raise :class:`InputError` if ``patterns`` is not a list; its entries are not checked."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InputError(
            "amax_groups must be a list of lists of patterns such as [['*.wq', '*.wk']], got "
            f"{patterns!r}."
        )


def amax_group_labels(patterns: Patterns, names: Sequence[str]) -> list[str | None]:
    """Return for each name the label of its group, or None.

    The members of a group are the names that match its patterns with the same text in place of the
    wildcards: ``["*.wq", "*.wk"]`` makes one group of ``layers.0.wq`` and ``layers.0.wk``, another
    of those of layer 1. Wildcards are ``*`` (any text) and ``?`` (one character). A name also
    matches without its ending ``.weight``.

    Raises:
        InputError: for an invalid pattern or one that matches no name, or a name in two groups.
    """
    check_patterns(patterns)
    labels: list[str | None] = [None] * len(names)
    for g, group in enumerate(patterns):
        is_list = isinstance(group, Sequence) and not isinstance(group, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in group):
            raise InputError(
                f"amax_groups[{g}] must be a list of patterns such as ['*.wq', '*.wk'], got "
                f"{group!r}."
            )
        for pattern in group:
            found = False
            for i, name in enumerate(names):
                wildcards = _match(pattern, name)
                if wildcards is None:
                    continue
                found = True
                label = f"{g}:{'|'.join(wildcards)}"
                if labels[i] not in (None, label):
                    raise InputError(
                        f"a weight must be in one amax group only, got {name} in two of them: "
                        f"{pattern!r} of amax_groups[{g}], and {labels[i]}."
                    )
                labels[i] = label
            if not found:
                raise InputError(
                    f"each pattern of amax_groups must match a weight, got {pattern!r}, which "
                    f"matches none of {', '.join(names[:4]) or 'no names'}"
                    f"{', ...' if len(names) > 4 else ''}."
                )
    return labels


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the text matched by each wildcard, or None if the name does not match."""
    # Every wildcard becomes a group of a regular expression.
    wildcards = {"*": "(.*)", "?": "(.)"}
    pieces = re.split(r"([*?])", pattern)
    text = "".join(wildcards.get(piece) or re.escape(piece) for piece in pieces)
    for given in (name, name.removesuffix(".weight")):
        match = re.fullmatch(text, given, re.DOTALL)
        if match:
            return match.groups()
    return None
