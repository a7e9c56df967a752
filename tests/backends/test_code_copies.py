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
from zerocast.backends.reference import ReferenceBackend
from zerocast.backends.reference.digest_formula import digest
from zerocast.comm import Communicator, run_in_process
from zerocast.numerics import Backend, CodeCopy, LaunchOn, SharedByte
from zerocast.peer_memory import PeerBuffer, draw_token

COPIED = SUBJECTS["copied codes"]


class Bytewise:
    """The oracle: one byte after the other."""

    def stage_codes(self, copies: list[CodeCopy], sums: torch.Tensor) -> LaunchOn:
        def launch(buffer: torch.Tensor) -> None:
            for copy in copies:
                for i in range(len(copy.codes)):
                    buffer[copy.staged + i] = int(copy.codes[i])
            add_digests(copies, sums)

        return launch

    def store_codes(
        self, copies: list[CodeCopy], shared: list[SharedByte], sums: torch.Tensor
    ) -> LaunchOn:
        def launch(buffer: torch.Tensor) -> None:
            for copy in copies:
                for i in range(len(copy.codes)):
                    copy.codes[i] = int(buffer[copy.staged + i])
            add_digests(copies, sums)
            for byte in shared:
                own = int(byte.codes)
                low = own if byte.low is None else int(buffer[byte.low])
                high = own if byte.high is None else int(buffer[byte.high])
                byte.codes[0] = high // 16 * 16 + low % 16

        return launch


def add_digests(copies: list[CodeCopy], sums: torch.Tensor) -> None:
    """Those that are wanted."""
    for i, copy in enumerate(copies):
        if copy.first is not None:
            sums[i] += digest(copy.codes, copy.first)


@pytest.mark.parametrize("isa", ISAS)
def test_many_bytes(isa: str) -> None:
    """What is written past the caches, of aligned and of other addresses, on more threads."""
    data = draw_values("normal", 3 << 19, 5).view(torch.uint8)
    for at, first, threads in ((0, 0, 1), (0, 4096, 3), (3, 64, 1), (64, None, 2), (5, None, 1)):
        codes, buffer = data[at:].clone(), torch.zeros(len(data) + 64, dtype=torch.uint8)
        copies = [CodeCopy(codes, at, first)]
        sums, backend = torch.zeros(2, 1, dtype=torch.int64), CpuBackend(isa, threads)
        backend.stage_codes(copies, sums[0])(buffer)
        assert torch.equal(buffer[at : at + len(codes)], codes)
        assert not buffer[:at].any()
        assert not buffer[at + len(codes) :].any()
        codes.zero_()
        backend.store_codes(copies, [], sums[1])(buffer)
        assert torch.equal(codes, data[at:])
        expected = 0 if first is None else int(digest(codes, first))
        assert sums.tolist() == [[expected]] * 2


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_codes_are_read_from_another_process(isa: str) -> None:
    """By the reference, and by every instruction set on three threads."""
    check_reads(ReferenceBackend() if isa == "reference" else CpuBackend(isa, 3))


def check_reads(backend: Backend) -> None:
    """It reads codes from any place to any other, and their digests; of a process that is not the
    one that is meant, or has no such memory, an error. It is this process, which is read as another
    one is.
    """
    theirs = draw_values("normal", 5 << 17, 5).view(torch.uint8)
    peer = PeerBuffer.of(theirs, token := draw_token(0))
    assert token.value == peer.token  # and held until all is read
    sizes = [0, 1, 63, 64, 4096, 5000, 1 << 18, (1 << 18) + 1, (1 << 19) + 4099]
    memory = torch.zeros(sum(sizes) + 64 * len(sizes), dtype=torch.uint8)
    copies, at = [], 1
    for i, size in enumerate(sizes):
        staged = min(37 * i, len(theirs) - size)
        copies.append(CodeCopy(memory[at : at + size], staged, None if i == 5 else 4093 * i))
        at += size + i
    for sums in (None, torch.zeros(len(sizes), dtype=torch.int64)):
        memory.zero_()
        launch = backend.read_codes(copies, *([] if sums is None else [sums]))
        launch(peer)
        expected = torch.zeros_like(memory)
        for copy in copies:
            begin = copy.codes.data_ptr() - memory.data_ptr()
            size = len(copy.codes)
            expected[begin : begin + size] = theirs[copy.staged : copy.staged + size]
        assert torch.equal(memory, expected)
    wanted = [0 if c.first is None else int(digest(c.codes, c.first)) for c in copies]
    assert sums is not None
    assert sums.tolist() == wanted
    for wrong in (peer._replace(token=peer.token ^ 1), peer._replace(address=1)):
        with pytest.raises(OSError):
            launch(wrong)
    launch(peer)


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
