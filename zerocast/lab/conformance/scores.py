"""Scores: how many bytes of a pack a package gives, which are others, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zerocast.lab.conformance.case_packs import DECODED, Case, Pack, differing, raw
from zerocast.lab.conformance.causes import causes
from zerocast.lab.conformance.packages import Package


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
    """What the package makes of a case: on each rank the tensors that are expected; nothing where
    it offers nothing for such.
    """
    values = package.decodes if case.name == DECODED else package.encodes
    tables = {"values": values, "partitions": package.gathers}
    table = tables.get(pack.level, package.writes)
    if pack.subject not in table:
        return []
    dtype = torch.uint8 if case.name == DECODED else torch.float32
    given = case.input.to(dtype, copy=True)  # which the package may write to
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
