"""Digests: every backend gives the sum that docs/numerics.md defines, for any range of bytes."""

import math

import pytest
import torch

from tests.support.compiled import COMPILED, on_every_backend
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Backend, DigestedBytes
from zerocast.tensors.digest import digest

MOD = 2**64
RANGES = [(0, 0), (0, 1), (3, 2), (1, 70), (4092, 9), (4095, 4098), (64, 4096), (12_289, 5000),
          (2**40 + 5, 333), (0, 40_000)]  # fmt: skip


def mixed(number: int) -> int:
    """As defined, on integers without a size."""

    def shifted(bits: int, by: int) -> int:
        return (bits - MOD * (bits >= MOD // 2)) >> by  # arithmetic

    bits = (number + 1) * 0x9E3779B97F4A7C15 % MOD
    bits = (bits ^ shifted(bits, 32)) % MOD * 0xBF58476D1CE4E5B9 % MOD
    return (bits ^ shifted(bits, 29)) % MOD | 1


def plain(lane: int) -> int:
    """The upper 31 bits, odd."""
    return mixed(lane - 16) >> 33 | 1


def weighted(lane: int) -> int:
    """The upper 31 bits, even."""
    return mixed(lane - 32) >> 33 & ~1


def weight(number: int) -> int:
    """Of a halfword of a row."""
    in_lane = number // 32 * 2 + number % 2
    return in_lane * (2 * in_lane + 1) % 128 - 64


def factor(number: int) -> int:
    """Of a halfword of a row."""
    lane = number % 32 // 2
    return plain(lane) + weight(number) * weighted(lane)


def defined(data: bytes, first: int) -> int:
    """The digest, byte by byte."""
    total = 0
    for i, byte in enumerate(data, first):
        row, number = divmod(i // 2, 2048)
        value = (byte - 256 * (byte >= 128)) * 256 if i % 2 else byte
        total += value * mixed(row) * factor(number)
    return total % MOD


def test_small_changes_of_a_row_do_not_cancel() -> None:
    """Factors are odd, and no two the same but for a sign: so changes of a bit each add up to no 0.
    Nor do any changes of two halfwords of a lane. These have weights of their own, so they change
    the plain sum, by less than 2^17, or the weighted one; and for the first to make up for the
    second, it would have to be a multiple of the lane's weighted factor without what both have in
    common.
    """
    factors = [abs(factor(number)) for number in range(2048)]
    assert len(set(factors)) == 2048
    assert all(each % 2 and each < 2**38 for each in factors)
    for lane in range(16):
        weights = {weight(32 * line + 2 * lane + i) for line in range(64) for i in (0, 1)}
        assert weights == set(range(-64, 64))
        assert weighted(lane) // math.gcd(plain(lane), weighted(lane)) > 2**17


def drawn(count: int) -> torch.Tensor:
    """Bytes."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1)).byte()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Of RANGES, every one from another address on."""
    data = drawn(41_000)
    return [defined(bytes(data[i : i + n].tolist()), at) for i, (at, n) in enumerate(RANGES)]


def digests_on(backend: Backend) -> list[int]:
    """Added to what the sums hold."""
    data, sums = drawn(41_000), torch.full((len(RANGES),), -5)
    ranges = [DigestedBytes(data[i : i + n], at) for i, (at, n) in enumerate(RANGES)]
    backend.digest(ranges, sums)()
    return [(each + 5) % MOD for each in sums.tolist()]


@on_every_backend
def test_as_defined(name: str, expected: list[int]) -> None:
    """Ranges that begin and end anywhere, at any address."""
    assert digests_on(COMPILED[name]) == expected


def test_the_reference_and_many_threads(expected: list[int]) -> None:
    """The same sums."""
    assert digests_on(ReferenceBackend()) == expected
    data = drawn(1_000_003)
    sums = torch.zeros(2, 2, dtype=torch.int64)
    for each, threads in zip(sums, (1, 3), strict=True):
        ranges = [DigestedBytes(data, 0), DigestedBytes(data[1:], 4093)]
        CpuBackend(threads=threads).digest(ranges, each)()
    assert torch.equal(*sums)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn]
)
def test_moved_and_changed_bytes_show(dtype: torch.dtype) -> None:
    """Every single bit, every exchange of two elements or of two rows of keys, any rotation."""
    values = drawn(8 * 2200).view(dtype).clone()
    data, seen = values.view(torch.uint8), {int(digest(values))}
    for bit in range(0, 8 * len(data), 37):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(int(digest(values)))
        data[bit // 8] ^= 1 << bit % 8
    for other in (1, 2, 5, 1023):
        data[[0, other]] = data[[other, 0]]
        seen.add(int(digest(values)))
        data[[0, other]] = data[[other, 0]]
    exchanged = torch.cat([data[4096:8192], data[:4096], data[8192:]])
    for moved in (exchanged, torch.roll(data, 8), torch.roll(data, 4096)):
        seen.add(int(digest(moved)))
    pairs = [other for other in (1, 2, 5, 1023) if int(data[0]) != int(data[other])]
    assert len(seen) == 1 + len(range(0, 8 * len(data), 37)) + len(pairs) + 3
