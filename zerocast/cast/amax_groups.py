"""Amax groups: weights that share one tensor amax, and so one tensor scale.

A server that fuses projections (query, key and value; gate and up) into one GEMM needs one tensor
scale for them. Weights that share their amax from the start of training have it, and are cast as if
they were one weight, rows upon rows. Schemes without a scale for the tensor (blockwise, row-wise,
MXFP8) fuse as they are; there a group changes no byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zerocast.errors import InputError

Patterns = Sequence[Sequence[str]]
"""For each group the patterns of its members' names, such as ``["*.wq", "*.wk", "*.wv"]``."""


def check_patterns(patterns: Patterns) -> None:
    """Raise :class:`InputError` where ``patterns`` is no list, of whatever."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InputError(
            "amax_groups must be a list of lists of patterns such as [['*.wq', '*.wk']], got "
            f"{patterns!r}."
        )


def amax_group_labels(patterns: Patterns, names: Sequence[str]) -> list[str | None]:
    """Give each name the label of its group, or None: the members of a group are the names that
    match its patterns with the same text in the place of the wildcards.

    So ``["*.wq", "*.wk"]`` makes one group of ``layers.0.wq`` and ``layers.0.wk``, another of those
    of layer 1. Wildcards are ``*`` (any text) and ``?`` (one character); a name also matches
    without its ending ``.weight``.

    Raises:
        InputError: for a pattern that is none or matches no name, or a name in two groups.
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
                        f"a weight can be in one amax group only, got {name} in two of them: "
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
    """What stands for the wildcards, or None where the name does not match."""
    # Every wildcard becomes a group of a regular expression.
    wildcards = {"*": "(.*)", "?": "(.)"}
    pieces = re.split(r"([*?])", pattern)
    text = "".join(wildcards.get(piece) or re.escape(piece) for piece in pieces)
    for given in (name, name.removesuffix(".weight")):
        match = re.fullmatch(text, given, re.DOTALL)
        if match:
            return match.groups()
    return None
