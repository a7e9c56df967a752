"""Scores: how many bytes of a pack a package gets right, which differ, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zerocast.lab.conformance.case_packs import DECODED, Case, Pack, differing, raw
from zerocast.lab.conformance.causes import causes
from zerocast.lab.conformance.packages import Package


@dataclass(frozen=True)
class Score:
    """The result of a package for one pack.

    Attributes:
        level, subject: those of the pack.
        compared: the number of compared bytes; for partitions on all ranks.
        different: the number of bytes that differ from the pack.
        first: the first difference: its case, tensor and place, and both values.
        causes: the changes that explain all differences, with the number of bytes that would differ
            without each; None if no changes do.
        refused: by the names of cases that the package does not quantize, its error.
    """

    level: str
    subject: str
    compared: int
    different: int
    first: str
    causes: Mapping[str, int] | None
    refused: Mapping[str, str]


def score(package: Package, packs: Iterable[Pack]) -> list[Score]:
    """Return the scores of ``package`` for those of ``packs`` that it has functions for."""
    with torch.device("cpu"):
        return [found for pack in packs if (found := _score(package, pack)) is not None]


def _score(package: Package, pack: Pack) -> Score | None:
    first, refused, compared, different = "", {}, 0, 0
    encoded: dict[str, list[torch.Tensor]] = {}
    explained = pack.level != "partitions"
    for case in pack.cases:
        try:
            ranks = _made(package, pack, case)
        except Exception as error:  # whatever a package raises
            refused[case.name] = f"{type(error).__name__}: {error}"
            continue
        for rank, tensors in enumerate(ranks):
            of_rank = f" of rank {rank}" if pack.level == "partitions" else ""
            for (part, expected), given in zip(case.expected.items(), tensors, strict=True):
                wrong = differing(given, expected)
                compared, different = compared + expected.nbytes, different + int(wrong.sum())
                if wrong.any():
                    first = first or f"{case.name}: {part}{of_rank}{_at(wrong, given, expected)}"
                    explained &= case.name != DECODED
            if case.name != DECODED:
                encoded[case.name] = tensors
    if not compared and not refused:
        return None
    why = causes(pack, encoded) if first and explained else None if first else {}
    return Score(pack.level, pack.subject, compared, different, first, why, refused)


def _made(package: Package, pack: Pack, case: Case) -> list[list[torch.Tensor]]:
    """Return the package's results for a case: for each rank, the expected tensors; an empty list
    if the package has no function for it.
    """
    values = package.decodes if case.name == DECODED else package.encodes
    tables = {"values": values, "partitions": package.gathers}
    table = tables.get(pack.level, package.writes)
    if pack.subject not in table:
        return []
    dtype = torch.uint8 if case.name == DECODED else torch.float32
    given = case.input.to(dtype, copy=True)  # the package may write to it
    made = table[pack.subject](given, *([case.cuts] if case.cuts else []))
    ranks = made if pack.level == "partitions" else [(made,) if pack.level == "values" else made]
    named = (dict(zip(case.expected, held, strict=True)) if isinstance(held, tuple) else held
             for held in ranks)  # fmt: skip
    return [[held[part] for part in case.expected] for held in named]


def _at(wrong: torch.Tensor, given: torch.Tensor, expected: torch.Tensor) -> str:
    if raw(given).numel() != raw(expected).numel():
        found, required = (f"{each.dtype} {list(each.shape)}" for each in (given, expected))
        return f" is {found}, required {required}"
    size = expected.element_size()
    place = int(wrong.nonzero()[0]) // size
    index = wrong.view(*expected.shape, size).any(-1).nonzero()[0].tolist()

    def shown(tensor: torch.Tensor) -> str:
        number = bytes(raw(tensor)[place * size : (place + 1) * size].tolist())[::-1].hex()
        value = f" ({tensor.reshape(-1)[place].item():g})"
        return f"0x{number}{value * expected.dtype.is_floating_point}"

    return f"{index} is {shown(given)}, required {shown(expected)}"
