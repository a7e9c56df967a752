"""Philox 4x32-10 against the known answers that its authors publish, and its use of an index."""

import pytest
import torch

from tests.oracles import scalar_nvfp4
from zerocast.backends.reference.philox import element_words, philox

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


def test_the_word_of_an_element():
    """Number index % 4 of counter (index / 4 in two halves, name, step), key the seed's halves.

    Here the three answers come from an index of zero, and of one so large that both halves count.
    """
    first, _, third = (words(answer) for _, _, answer in KNOWN_ANSWERS)
    assert element_words(torch.arange(4), 0, 0, 0).tolist() == list(first)
    # A counter in 64 bits does not fit an index of 63 bits; the answer for pi has its high bit
    # clear after two bits are taken from the top, so shift the words down by hand.
    low, high, name_hash, step = words(KNOWN_ANSWERS[2][0])
    seed = words(KNOWN_ANSWERS[2][1])[0] | words(KNOWN_ANSWERS[2][1])[1] << 32
    group = low | high << 32
    assert group >= 2**61
    assert [scalar_nvfp4.word(4 * group + i, seed, name_hash, step) for i in range(4)] == [*third]
    index = 4 * (group & 2**61 - 1) + torch.arange(4)
    expected = [scalar_nvfp4.word(i, seed, name_hash, step) for i in index.tolist()]
    assert element_words(index, seed, name_hash, step).tolist() == expected


def test_only_32_bits_of_the_step_count():
    """2^32 casts later the words come again."""
    index = torch.arange(8)
    assert torch.equal(element_words(index, 5, 6, 7), element_words(index, 5, 6, 7 + 2**32))


def test_every_argument_changes_the_words():
    """Seed (both halves), name, step and index: no two of the 6 sets of 1,000 words share 3."""
    index = torch.arange(1000)
    sets = [
        element_words(index, 5, 6, 7), element_words(index, 4, 6, 7),
        element_words(index, 5 + 2**32, 6, 7), element_words(index, 5, 7, 7),
        element_words(index, 5, 6, 8), element_words(index + 2**40, 5, 6, 7),
    ]  # fmt: skip
    for i, one in enumerate(sets):
        assert len(one.unique()) > 998
        for other in sets[:i]:
            assert torch.isin(one, other).sum() < 3
