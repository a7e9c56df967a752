"""Philox 4x32-10 against the known answers that its authors publish, and its use of an index."""

import pytest
import torch

from tests.oracles import scalar_nvfp4
from zerocast.backends.reference.philox import element_draws, philox

# Counter, key and output, from the file tests/kat_vectors of Random123 (D. E. Shaw Research), lines
# "philox4x32 10": zeros, ones, and digits of pi.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> tuple[int, ...]:
    """Hexadecimal words of 32 bits."""
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_known_answers(counter, key, expected):
    """Both ours and the restatement that the tests judge it by."""
    tensors = tuple(torch.tensor([c]) for c in words(counter))
    assert [int(w) for w in philox(tensors, words(key))] == list(words(expected))
    assert scalar_nvfp4.philox(words(counter), words(key)) == words(expected)


def halves(words: tuple[int, ...]) -> list[int]:
    """Of each word the low 16 bits, then the high ones."""
    return [half for word in words for half in (word & 0xFFFF, word >> 16)]


def test_the_draw_of_an_element():
    """Half number index % 8 of counter (index / 8 in two words, name, step), key the seed's words.

    Here the three answers come from an index of zero, and of one so large that both words count.
    """
    first, _, third = (words(answer) for _, _, answer in KNOWN_ANSWERS)
    assert element_draws(torch.arange(8), 0, 0, 0).tolist() == halves(first)
    # A counter in 64 bits does not fit an index of 63 bits; the answer for pi has its high bit
    # clear after three bits are taken from the top, so shift the words down by hand.
    low, high, name_hash, step = words(KNOWN_ANSWERS[2][0])
    seed = words(KNOWN_ANSWERS[2][1])[0] | words(KNOWN_ANSWERS[2][1])[1] << 32
    group = low | high << 32
    assert group >= 2**60
    drawn = [scalar_nvfp4.draw(8 * group + i, seed, name_hash, step) for i in range(8)]
    assert drawn == halves(third)
    index = 8 * (group & 2**60 - 1) + torch.arange(8)
    expected = [scalar_nvfp4.draw(i, seed, name_hash, step) for i in index.tolist()]
    assert element_draws(index, seed, name_hash, step).tolist() == expected


def test_only_32_bits_of_the_step_count():
    """2^32 casts later the draws come again."""
    index = torch.arange(8)
    assert torch.equal(element_draws(index, 5, 6, 7), element_draws(index, 5, 6, 7 + 2**32))


def test_every_argument_changes_the_draws():
    """Seed (both halves), name, step and index: any two of the 6 sets of 1,000 draws agree in at
    most 3 places.
    """
    index = torch.arange(1000)
    sets = [
        element_draws(index, 5, 6, 7), element_draws(index, 4, 6, 7),
        element_draws(index, 5 + 2**32, 6, 7), element_draws(index, 5, 7, 7),
        element_draws(index, 5, 6, 8), element_draws(index + 2**40, 5, 6, 7),
    ]  # fmt: skip
    for i, one in enumerate(sets):
        assert len(one.unique()) > 980
        for other in sets[:i]:
            assert (one == other).sum() <= 3
