"""Scores: how many bytes of a pack a package gives, which are others, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.conformance.causes import causes
from zerocast.conformance.packages import Package
from zerocast.conformance.packs import DECODED, Case, Pack, differing, raw

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Score:
    """What became of one pack.

    Attributes:
        level, subject: those of the pack.
        compared: bytes; of partitions those of all ranks.
        different: how many of them are not those of the pack.
        first: the first of these: its case, tensor and place, and both values.
        causes: what explains all of them, and of each how many bytes would be others without it;
            None where nothing does.
        refused: by the names of cases that the package does not quantize, what it says.
    """

    level: str
    subject: str
    compared: int
    different: int
    first: str
    causes: Mapping[str, int] | None
    refused: Mapping[str, str]


def score(package: Package, packs: Iterable[Pack]) -> list[Score]:
    """Measure ``package`` by those of ``packs`` for which it offers something."""
    with torch.device("cpu"):
        return [found for pack in packs if (found := _score(package, pack)) is not None]


def _score(package: Package, pack: Pack) -> Score | None:
    made: dict[str, Tensors] = {}
    refused: dict[str, str] = {}
    for case in pack.cases:
        try:
            given = _made(package, pack, case)
        except Exception as error:  # whatever a package raises
            refused[case.name] = f"{type(error).__name__}: {error}"
            continue
        if given is not None:
            made[case.name] = given
    return _compared(pack, made, refused) if made or refused else None


def _made(package: Package, pack: Pack, case: Case) -> Tensors | None:
    """What the package makes of a case, by the names of what is expected; None where it offers
    nothing for such.
    """
    table: Mapping[str, Callable[..., Any]] = package.writes
    if pack.level == "values":
        table = package.decodes if case.name == DECODED else package.encodes
    elif pack.level == "partitions":
        table = package.gathers
    if pack.subject not in table:
        return None
    dtype = torch.uint8 if case.name == DECODED else torch.float32
    given = case.input.to(dtype, copy=True)  # which the package may write to
    made = table[pack.subject](given, *([case.cuts] if case.cuts else []))
    if pack.level == "values":
        return dict.fromkeys(case.expected, made)
    if pack.level != "partitions":
        return {part: made[part] for part in case.expected}
    return {
        f"{part} of rank {rank}": held[part]
        for rank, held in enumerate(made)
        for part in case.expected
    }


def _compared(pack: Pack, made: Mapping[str, Tensors], refused: Mapping[str, str]) -> Score:
    compared = different = 0
    first, explained = "", pack.level != "partitions"
    for case in pack.cases:
        for name, given in made.get(case.name, {}).items():
            expected = case.expected[name.partition(" of rank")[0]]
            wrong = differing(given, expected)
            compared, different = compared + expected.nbytes, different + int(wrong.sum())
            if wrong.any():
                first = first or f"{case.name}: {name}{_at(wrong, given, expected)}"
                explained &= case.name != DECODED
    why: Mapping[str, int] | None = None if first else {}
    if first and explained:
        encoded = {name: [*made[name].values()] for name in made if name != DECODED}
        why = causes(pack, encoded)
    return Score(pack.level, pack.subject, compared, different, first, why, refused)


def _at(wrong: torch.Tensor, given: torch.Tensor, expected: torch.Tensor) -> str:
    if raw(given).numel() != raw(expected).numel():
        found, required = (f"{each.dtype} {list(each.shape)}" for each in (given, expected))
        return f" is {found}, required {required}"
    size = expected.element_size()
    place = int(wrong.nonzero()[0]) // size
    index = [
        int(i)
        for i in torch.unravel_index(
            torch.tensor(place, dtype=torch.int64, device="cpu"), expected.shape
        )
    ]

    def shown(tensor: torch.Tensor) -> str:
        number = bytes(raw(tensor)[place * size : (place + 1) * size].tolist())[::-1].hex()
        value = tensor.reshape(-1)[place].item() if expected.dtype.is_floating_point else None
        return f"0x{number}" + (f" ({value:g})" if value is not None else "")

    return f"{index} is {shown(given)}, required {shown(expected)}"
