"""Codes on their way between weights and the buffer in which they travel: every backend moves the
bytes that it is told to, and no other.
"""

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import Emulator, Mistake, needs_emulation
from tests.kernels.subjects import SUBJECTS
from tests.support.claims import assert_same_tensors
from tests.support.compiled import COMPILED, on_every_backend
from tests.support.instruction_sets import ISAS
from tests.support.values import draw_values
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.numerics import CodeCopy, LaunchOn, SharedByte

COPIED = SUBJECTS["copied codes"]


class Bytewise:
    """The oracle: one byte after the other."""

    def stage_codes(self, copies: list[CodeCopy]) -> LaunchOn:
        def launch(buffer: torch.Tensor) -> None:
            for copy in copies:
                for i in range(len(copy.codes)):
                    buffer[copy.staged + i] = int(copy.codes[i])

        return launch

    def store_codes(self, copies: list[CodeCopy], shared: list[SharedByte]) -> LaunchOn:
        def launch(buffer: torch.Tensor) -> None:
            for copy in copies:
                for i in range(len(copy.codes)):
                    copy.codes[i] = int(buffer[copy.staged + i])
            for byte in shared:
                own = int(byte.codes)
                low = own if byte.low is None else int(buffer[byte.low])
                high = own if byte.high is None else int(buffer[byte.high])
                byte.codes[0] = high // 16 * 16 + low % 16

        return launch


@pytest.mark.parametrize("isa", ISAS)
def test_many_bytes(isa: str) -> None:
    """What is written past the caches, of aligned and of other addresses, on more threads."""
    data = draw_values("normal", 3 << 19, 5).view(torch.uint8)
    for at, threads in ((0, 1), (0, 3), (3, 1), (64, 2), (5, 3)):
        codes, buffer = data[at:].clone(), torch.zeros(len(data) + 64, dtype=torch.uint8)
        copies, backend = [CodeCopy(codes, at)], CpuBackend(isa, threads)
        backend.stage_codes(copies)(buffer)
        assert torch.equal(buffer[at : at + len(codes)], codes)
        assert not buffer[:at].any()
        assert not buffer[at + len(codes) :].any()
        codes.zero_()
        backend.store_codes(copies, [])(buffer)
        assert torch.equal(codes, data[at:])


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What the subject writes."""
    return COPIED(Bytewise(), alone=True)


@on_every_backend
def test_every_byte_is_where_it_belongs(name: str, expected: dict[str, torch.Tensor]) -> None:
    """Against the oracle, of every length; and of every alignment against the reference."""
    assert_same_tensors(COPIED(COMPILED[name], alone=True), expected, name)
    with zerocast.use_backend("reference"):
        aligned = COPIED(zerocast.backends.backend_for(torch.device("cpu")))
    assert_same_tensors(COPIED(COMPILED[name]), aligned, name)


@pytest.mark.nightly
@needs_emulation
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row.high < 0", "row.high <= 0"),
        ("(low & 0x0F) | (high & 0xF0)", "(low & 0xF0) | (high & 0x0F)"),
        (">> (8 * shift)", ">> (4 * shift)"),
        ("head + end * UNIT, count", "head + end * UNIT + 1, count"),
        ("at < end) ((int4", "at < end - 1) ((int4"),
    ],
)
def test_a_planted_mistake_is_caught(right: str, wrong: str) -> None:
    """Each of these shows."""
    mistake = Mistake("copy_codes", "cuda/copy_codes.cu", right, wrong)
    reference = COPIED(COMPILED["forward"])
    actual = COPIED(CudaBackend(Emulator(mistake=mistake)))
    with pytest.raises(AssertionError):
        assert_same_tensors(actual, reference, wrong)


@needs_emulation
def test_a_gather_is_two_launches() -> None:
    """Of however many weights, on ranks that share bytes; it sends no table, and where codes have
    moved it follows them.
    """
    shapes = [(33, 48), (16, 32), (17, 16)] * 4
    masters = [draw_values("normal", rows * cols, i) for i, (rows, cols) in enumerate(shapes)]

    def on_rank(comm: Communicator) -> list[torch.Tensor]:
        emulator = Emulator()
        with zerocast.use_backend(CudaBackend(emulator)):
            weights = [zerocast.empty(shape, "nvfp4") for shape in shapes]
            cuts = [[numel * r // 3 for r in range(4)] for numel in (m.numel() for m in masters)]
            starts = [cut[comm.rank] | 1 if comm.rank else 0 for cut in cuts]
            ends = [cut[comm.rank + 1] | 1 if comm.rank < 2 else cut[3] for cut in cuts]
            own = [m[a:b] for m, a, b in zip(masters, starts, ends, strict=True)]
            plan = zerocast.CastPlan(weights, own, starts, comm)
            for step in range(3):
                plan.cast()
                emulator.names.clear()
                tables = len(emulator.sent)
                plan.all_gather()
                gathers = [name for name in emulator.names if name.startswith("copy_codes")]
                assert gathers == ["copy_codes<false>", "copy_codes<true>"]
                if step == 1:
                    assert len(emulator.sent) == tables
                    moved = weights[0].rowwise_data
                    moved.set_(torch.zeros_like(moved))
            return weights

    for weights in run_in_process(3, on_rank):
        for weight, shape, master in zip(weights, shapes, masters, strict=True):
            with zerocast.use_backend("reference"):
                whole = zerocast.quantize(master.view(shape), "nvfp4", dtype=torch.bfloat16)
            buffers = weight.quantized_storage.buffers
            assert_same_tensors(buffers, whole.quantized_storage.buffers, f"{shape}")
