"""Who owns which elements of which weight."""

import random
from itertools import combinations_with_replacement, islice, product

import torch

from tests.support.partitions import draw_partition
from zerocast.layout import Extent, Owners, check_partition


def owners_of(by_weight: list[list[Extent]]) -> Owners:
    """Of weights, each with the extent of every rank."""
    pairs = [[[e.start, e.end] for e in by_rank] for by_rank in zip(*by_weight, strict=True)]
    return Owners.of_extents(torch.tensor(pairs))


def test_first_wrong_is_the_first_that_check_partition_finds():
    """Of a partition, every fifth of the 2,197 choices of three extents within 4 as those of 3
    elements, and a wrong one behind.
    """
    right, wrong = [Extent(0, 2), Extent(2, 2), Extent(2, 3)], [Extent(1, 3)] * 3
    extents = [Extent(a, b) for a, b in combinations_with_replacement(range(5), 2)]
    for chosen in islice(product(extents, repeat=3), 0, None, 5):
        found = owners_of([right, list(chosen), wrong]).first_wrong([3, 3, 3])
        assert found == (2 if check_partition(3, chosen) is None else 1), [str(e) for e in chosen]


def test_weights_without_elements_are_right_and_those_without_owners_wrong():
    """Whichever they are."""
    nobody = owners_of([[Extent(7, 7)] * 2] * 3)
    assert nobody.first_wrong([0, 0, 0]) is None
    assert nobody.first_wrong([0, 1, 1]) == 1
    assert Owners.of(0, torch.zeros(0, 4, dtype=torch.int64)).first_wrong([]) is None


def test_shards_are_found_by_weight_and_by_rank():
    """Of 50 drawn partitions of three weights, none of them empty, each once."""
    rng = random.Random(0)
    for _ in range(50):
        size = rng.randint(1, 6)
        drawn = [draw_partition(rng.randint(1, 40), size, rng) for _ in range(3)]
        owners = owners_of(drawn)
        for weight, extents in enumerate(drawn):
            held = sorted((rank, e) for rank, e in enumerate(extents) if e)
            assert sorted(owners.of_weight(weight)) == held
            assert [e for _, e in owners.of_weight(weight)] == sorted(e for _, e in held)
        expected = [
            (weight, rank, e.start, e.end)
            for rank, by_weight in enumerate(zip(*drawn, strict=True))
            for weight, e in enumerate(by_weight)
            if e
        ]
        assert owners.by_rank() == expected
        assert len(owners) == len(expected)
