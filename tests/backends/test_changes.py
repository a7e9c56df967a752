"""What changed of a tensor: its digest and the runs that travel, on every backend."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.compiled import COMPILED, on_every_backend
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Comparison
from zerocast.tensors.digest import digest

COUNTS = (0, 1, 63, 64, 65, 1000, 70_000)
SHARES = (0.0, 0.01, 0.5, 1.0)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def drawn(dtype: torch.dtype, count: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, and the same with so many of them changed; two ends and long gaps are among
    those.
    """
    generator = torch.Generator().manual_seed(count)
    old = torch.randint(-(2**62), 2**62, (count,), generator=generator).to(dtype)
    chosen = torch.rand(count, generator=generator) < share
    chosen[count // 2 :] &= share == 1.0
    if share and count:
        chosen[0] = chosen[-1] = True
    return old, torch.where(chosen, ~old, old)


def sparse(dtype: torch.dtype, count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements, and the same with every ``step``-th changed: from one run to as many as can be."""
    old = torch.arange(count).to(dtype)
    return old, torch.where(torch.arange(count) % step == 0, ~old, old)


def defined(values: torch.Tensor, places: list[int]) -> tuple[int, int, bytes]:
    """Entries, elements and data, run by run."""
    runs: list[list[int]] = []
    closed = {1: 4, 2: 2, 4: 1, 8: 1}[values.itemsize]
    for place in places:
        if runs and place - runs[-1][1] < closed:
            runs[-1][1] = place + 1
        else:
            runs.append([place, place + 1])
    gaps, lengths, before = [], [], 0
    for start, end in runs:
        gap, length, before = start - before, end - start, end
        skips, more = gap // 65535, (length - 1) // 255
        gaps += [65535] * skips + [gap % 65535] + [0] * more
        lengths += [0] * skips + [255] * more + [length - 255 * more]
    elements = [values[start:end] for start, end in runs]
    data = b"".join(gap.to_bytes(2, "little") for gap in gaps) + bytes(lengths)
    data += b"".join(bytes(each.view(torch.uint8).tolist()) for each in elements)
    return len(gaps), sum(map(len, elements)), data


@cache
def compared() -> list[tuple[Any, ...]]:
    """What tensors were and are, where the first element of each lies, and what is to be found."""
    pairs = [drawn(dtype, n, share) for dtype in INTEGERS for n in COUNTS for share in SHARES]
    pairs += [sparse(dtype, n, step) for dtype in INTEGERS for n in COUNTS for step in range(2, 7)]
    return [
        (old, new, first := 7 * i + 5, digest(new, first) - digest(old, first),
         defined(new, (old != new).nonzero().view(-1).tolist()))
        for i, (old, new) in enumerate(pairs)
    ]  # fmt: skip


def check(backend) -> None:
    """All cases in one launch, their first elements anywhere in the whole tensor."""
    targets = [Comparison(old.clone(), new, first) for old, new, first, *_ in compared()]
    found = zip(compared(), targets, backend.changed_runs(targets), strict=True)
    for (_, new, _, change, expected), target, (*sizes, data, digest_change) in found:
        where = f"{new.dtype}, {len(new)}"
        assert torch.equal(target.held, new), where
        assert torch.equal(digest_change, change), where
        assert (*sizes, bytes(data.tolist())) == expected, where


@on_every_backend
def test_as_defined(name: str) -> None:
    """Elements of 1 to 8 bytes, none to all of them changed, gaps and runs of many entries."""
    check(COMPILED[name])


def test_the_reference() -> None:
    """The same."""
    check(ReferenceBackend())


@pytest.mark.parametrize("share", SHARES)
def test_many_threads(share: float) -> None:
    """They find what one finds."""
    old, new = drawn(torch.uint8, 1_000_003, share)
    found = []
    for threads in (1, 3):
        target = Comparison(old.clone(), new, 3)
        found += CpuBackend(threads=threads).changed_runs([target])
    (*runs, data, change), (*other_runs, other_data, other_change) = found
    assert torch.equal(change, other_change)
    assert runs == other_runs
    assert torch.equal(data, other_data)
