"""The kernels that do nothing to what they move, and so have no twin on the CPU: write_words, which
writes tables in a CUDA graph, and probe_read, which a benchmark takes for the memory's limit. CI
plants one mistake in each.
"""

import pytest
import torch

from tests.cuda_emulation.emulator import ORDERS, Emulator, KernelFault, Mistake, needs_emulation
from tests.support.child_process import in_child
from tests.support.nightly import nightly
from zerocast.backends.cuda import Kernel, KernelArguments
from zerocast.backends.cuda.device import WORDS, WRITE

pytestmark = needs_emulation

PIECE = 32768  # elements of FP32
SIGNAL = 0x7F800001  # what probe_read looks for
PROBE = Kernel("probe_read", 256)


def writes_wrong(mistake: Mistake | None = None) -> bool:
    """Whether write_words leaves anything else than the words that were sent, and what followed
    them.
    """
    for order in ORDERS:
        launcher = Emulator(order, mistake=mistake)
        for count in (1, 6, WORDS):
            words = [(-1) ** i * (2**40 + i) for i in range(WORDS)]
            memory = torch.full((WORDS + 8,), 77)
            arguments = KernelArguments([memory.data_ptr(), count], words)
            launcher.launch(WRITE, launcher.prepare(WRITE), 1, arguments)
            if memory.tolist() != words[:count] + [77] * (WORDS + 8 - count):
                return True
    return False


def reads_wrong(mistake: Mistake | None = None) -> bool:
    """Whether probe_read misses a value of its pieces, or sees one behind them."""
    pieces = 3
    end = pieces * PIECE
    places = [0, 1, 2, 3, 4, 1022, 1023, 1024, 7 * 1024, 8 * 1024, PIECE - 1, PIECE, end - 1]
    launcher = Emulator("random", mistake=mistake)
    handle = launcher.prepare(PROBE)
    try:
        for place in [*places, end]:
            source = torch.zeros(end + PIECE, dtype=torch.int32)
            source[place] = SIGNAL
            source[end] = SIGNAL  # which is never read
            found = torch.zeros(1, dtype=torch.int32)
            arguments = KernelArguments([source.data_ptr(), found.data_ptr(), pieces])
            launcher.launch(PROBE, handle, 2, arguments)
            if int(found) != (place < end):
                return True
    except KernelFault:
        return True
    return False


def test_words_are_written() -> None:
    """So many words as were sent, and none behind them."""
    assert not writes_wrong()


def test_all_memory_is_read() -> None:
    """Every piece, by fewer blocks than there are pieces: a value that stands at its begin, its
    end, or where the next load begins is seen.
    """
    assert not reads_wrong()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("threadIdx.x < count", "threadIdx.x <= count"),
        nightly("threadIdx.x < count", "threadIdx.x + 1 < count"),
        nightly("words.word[threadIdx.x]", "words.word[threadIdx.x / 2]"),
        nightly("to[threadIdx.x]", "to[threadIdx.x ^ 1]"),
    ],
)
def test_a_mistake_in_writing(right: str, wrong: str) -> None:
    """Each of these shows."""
    assert in_child(writes_wrong, Mistake("write_words", "cuda/write_words.cu", right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong", "nth"),
    [
        ("piece < count", "piece <= count", 0),
        nightly("piece < count", "piece + 1 < count", 0),
        nightly("piece += gridDim.x", "piece += gridDim.x + 1", 0),
        nightly("piece * 32768", "piece * 32764", 0),
        nightly("threadIdx.x * 4", "threadIdx.x % 128 * 4", 0),
        nightly("first < 32", "first < 24", 0),
        nightly("(first + k) * 1024", "first * 1024", 0),
        nightly("k < IN_FLIGHT", "k < IN_FLIGHT - 1", 1),
        nightly("j < 4", "j < 3", 0),
        nightly("distance < smallest", "distance > smallest", 0),
        nightly("0x7F800001u", "0x7F800000u", 0),
        nightly("smallest == 0", "smallest == 1", 0),
    ],
)
def test_a_mistake_in_reading(right: str, wrong: str, nth: int) -> None:
    """So does each of these."""
    assert in_child(reads_wrong, Mistake("probe_read", "cuda/probe_read.cu", right, wrong, nth))
