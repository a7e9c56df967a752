"""Names of equal things in few lines: ``layers.{0..31}.mlp.{up,down}`` for those of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Said = TypeVar("Said", bound=Hashable)


def grouped(said: Iterable[tuple[str, Said]]) -> Iterator[tuple[str, int, Said]]:
    """Patterns of names of modules or parameters of which the same is said: the pattern, for how
    many names it stands, and what is said; in the order of the first of each.
    """
    names: dict[Said, list[str]] = {}
    for name, what in said:
        names.setdefault(what, []).append(name)
    for what, alike in names.items():
        for pattern, count in grouped_names(alike):
            yield pattern, count, what


def grouped_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Patterns that stand for ``names``, each with how many it stands for: names that differ in one
    part only are one, with the parts in braces. Numbers are put together first.
    """
    groups = {tuple(name.split(".")): 1 for name in names}
    places = range(max(map(len, groups), default=0))
    for is_kind in (str.isdecimal, str.isidentifier):
        for place in reversed(places):
            alike: dict[tuple[str | None, ...], list[tuple[str, int]]] = {}
            for parts, count in groups.items():
                part = parts[place] if place < len(parts) else ""
                key = (*parts[:place], None, *parts[place + 1 :]) if is_kind(part) else parts
                alike.setdefault(key, []).append((part, count))
            groups = {
                tuple(_braces([p for p, _ in found]) if part is None else part for part in parts):
                sum(count for _, count in found)
                for parts, found in alike.items()
            }  # fmt: skip
    return [(".".join(parts), count) for parts, count in groups.items()]


def _braces(parts: Sequence[str]) -> str:
    """``{0..3,7}`` or ``{up,down}``, or the part where it is one."""
    if len(parts) == 1:
        return parts[0]
    if not parts[0].isdecimal():
        return f"{{{','.join(parts)}}}"
    runs: list[list[int]] = []
    for number in sorted(map(int, parts)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{{{','.join(str(r[0]) if len(r) == 1 else f'{r[0]}..{r[-1]}' for r in runs)}}}"
