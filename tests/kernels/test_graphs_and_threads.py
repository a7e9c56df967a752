"""What CUDA graphs, threads and streams ask of the backend's host side, shown without a GPU: on the
emulation, and on a launcher whose driver, streams and events only take notes.
"""

import gc
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import Emulator, needs_emulation
from tests.kernels.conftest import Stream
from tests.support.recipes import RECIPES, VARIANTS
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.backends.cuda import CudaBackend, Kernel, KernelArguments, prepared
from zerocast.backends.cuda.cuts import Cuts
from zerocast.backends.cuda.device import WORDS
from zerocast.backends.cuda.tiling import shard_tiles
from zerocast.cast import prepared_cast
from zerocast.cast.exchange import Exchange
from zerocast.comm import run_in_process
from zerocast.layout import BlockGrid, Extent

LARGE = (1024, 1024)
KERNEL = Kernel("transpose", 256, ("8",))


class Idle(Emulator):
    """Runs nothing; a launch checks that its tables are still what was sent."""

    def prepare(self, kernel: Kernel) -> int:
        return 0

    def launch(self, kernel: Kernel, handle: int, grid: int, arguments: KernelArguments) -> None:
        assert all(table.numel() for table in arguments.tables)


# --- graphs ---


@needs_emulation
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_capture_of_large_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of one shape of many tiles, quantized and decoded once outside, can be captured;
    the tables that the capture used are alive afterwards, whatever is cast next.
    """
    monkeypatch.setattr(prepared, "KEPT_TILES", 3)
    emulator, recipe = Emulator(), RECIPES[name]
    tensors = [draw_values("normal", 1024 * 1024, seed).view(LARGE) for seed in range(2)]

    def run() -> list[torch.Tensor]:
        made = [zerocast.quantize(t, recipe, dtype=torch.bfloat16) for t in tensors]
        return made + [each.dequantize() for each in made]

    def kept() -> list[torch.Tensor]:
        gc.collect()
        tables = [reference() for reference in emulator.tables]
        return [table for table in tables if table is not None and table.numel() > WORDS]

    with zerocast.use_backend(CudaBackend(emulator)):
        run()
        tables = kept()
        assert tables
        before = [table.clone() for table in tables]
        addresses = {table.data_ptr() for table in tables}
        del tables
        emulator.capturing = True
        first, second, *values = run()
        emulator.capturing = False
        for rows in (32, 64):
            zerocast.quantize(torch.ones(rows, 64), recipe, dtype=torch.bfloat16)
        alive = [table for table in kept() if table.data_ptr() in addresses]
        assert len(alive) == len(addresses)
        assert all(map(torch.equal, alive, before))
    with zerocast.use_backend("reference"):
        for tensor, made, decoded in zip(tensors, (first, second), values, strict=True):
            expected = zerocast.quantize(tensor, recipe, dtype=torch.bfloat16)
            assert_same_storage(made, expected, name)
            assert_same_bytes(decoded, expected.dequantize(), f"{name} decoded")


@needs_emulation
def test_launches_in_a_graph_live_as_long_as_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that moves after a capture gets new launches; those of the graph keep their tables
    and the memory that they write.
    """
    emulator, captured = Idle(), False
    monkeypatch.setattr(prepared_cast, "is_captured", lambda device: captured)

    def count() -> int:
        gc.collect()
        return sum(reference() is not None for reference in emulator.tables)

    def move() -> None:
        zerocast.replace_raw_data(weight, torch.empty(48 * 16, dtype=torch.uint8))
        plan.cast()

    with zerocast.use_backend(CudaBackend(emulator)):
        weight = zerocast.empty((48, 32), "nvfp4")
        plan = zerocast.CastPlan([weight], [draw_values("normal", 48 * 32, 1)], [0])
        tables = count()
        captured = True
        plan.cast()
        captured = False
        move()
        with_graph = count()
        assert with_graph > tables
        move()
        assert count() == with_graph


def test_amax_and_cast_share_their_tiles() -> None:
    """What visits the same tiles of many weights is sent one table of them, as long as a plan has
    it.
    """
    emulator = Idle()
    with zerocast.use_backend(CudaBackend(emulator)):

        def plan() -> zerocast.CastPlan:
            weights = [zerocast.empty((16, 16), "nvfp4") for _ in range(10)]
            return zerocast.CastPlan(weights, [torch.ones(256)] * 10, [0] * 10)

        first = plan()
        tables = len(emulator.sent)
        # Masters; rows and tiles of amax, scale, cast and transpose, of which amax and cast share.
        assert tables == 1 + 4 + 3
        second = plan()
        assert len(emulator.sent) - tables == 1 + 4
        del first, second
        gc.collect()
        plan()
        assert len(emulator.sent) == 2 * tables + 1 + 4


# --- threads ---


def at_once(work: Callable[[int], None], threads: int = 8) -> None:
    """Run ``work(number)`` in so many threads, which take turns as often as Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_in_process(threads, lambda comm: work(comm.rank))
    finally:
        sys.setswitchinterval(interval)


def test_threads_share_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 threads that look for the tiles of more shapes than tables are kept for, 200 times each,
    all get those of the shape that they ask for.
    """
    monkeypatch.setattr(prepared, "KEPT_TILES", 2)
    tables = prepared.Tables(Idle())
    extents = [Extent(0, 8192 * count) for count in range(1, 7)]
    cuts = [(shard_tiles, BlockGrid(1, each.end, 1, each.end), each) for each in extents]

    def work(number: int) -> None:
        for i in range(200):
            at = (number + i // 4) % len(cuts)
            assert len(tables._visited(Cuts.of([(cuts[at],)]))) == at + 1

    at_once(work)
    assert len(tables._tiles) == 2


# --- the launcher of a GPU that is not there ---


class Table:
    """An uploaded table."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream.cuda_stream)


def test_uploads_by_threads(gpu: Any) -> None:
    """8 threads that send tables on streams of their own, 200 times each, and launch what reads
    them, neither fail nor lose a launch.
    """

    def work(number: int) -> None:
        gpu.use(Stream(number))
        for _ in range(200):
            gpu.launcher.upload(torch.ones(3, dtype=torch.int64))
            gpu.launcher.launch(KERNEL, 1, 1, KernelArguments([]))

    at_once(work)
    assert gpu.launcher.launches == 8 * 200 * 2


def test_an_upload_beside_a_launch_is_waited_for(gpu: Any) -> None:
    """A table that another thread sends while a launch finds that stream's earlier ones there is
    still waited for by the next launch.
    """
    sending = Stream(5)

    def send() -> None:
        gpu.use(sending)
        gpu.launcher.upload(torch.ones(3, dtype=torch.int64))

    class Over:
        def query(self) -> bool:
            thread.start()
            thread.join(0.2)
            return True

    thread = threading.Thread(target=send)
    gpu.launcher._uploads[5] = Over()
    stream = Stream(6)
    gpu.use(stream)
    gpu.launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    thread.join()
    gpu.launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    assert len(stream.waited) == 1


def test_every_thread_gets_the_context(gpu: Any) -> None:
    """Before its first launch a thread makes a call of CUDA's runtime, and not again."""
    for _ in range(2):
        gpu.launcher.launch(KERNEL, 1, 1, KernelArguments([]))

    def work(number: int) -> None:
        for _ in range(3):
            gpu.launcher.launch(KERNEL, 1, 1, KernelArguments([]))

    at_once(work, 3)
    assert len(gpu.contexts) == len(set(gpu.contexts)) == 4
    assert {index for _, index in gpu.contexts} == {0}


def test_tables_are_recorded_on_every_stream(gpu: Any) -> None:
    """torch is told once of each stream that a table is read on."""
    table = Table()
    arguments = KernelArguments([], tables=[table])
    for number in (1, 2, 1, 2, 2):
        gpu.use(Stream(number))
        gpu.launcher.launch(KERNEL, 1, 1, arguments)
    assert table.streams == [1, 2]


@needs_emulation
def test_launches_name_their_tables() -> None:
    """Every table of a plan is named by the launches that read it, so that it can be recorded."""
    emulator = Idle()
    named: set[int] = set()
    emulator.launch = lambda kernel, handle, grid, arguments: named.update(  # type: ignore[method-assign]
        table.data_ptr() for table in arguments.tables
    )
    recipes = [VARIANTS["nvfp4-4over6-mse-448"], RECIPES["delayed"]]
    with zerocast.use_backend(CudaBackend(emulator)):
        weights = [zerocast.empty((48, 32), recipe) for recipe in recipes]
        plan = zerocast.CastPlan(weights, [torch.ones(48 * 32)] * 2, [0, 0])
        plan.cast()
        plan.post_all_gather_processing()
        sent = [reference() for reference in emulator.tables]
        assert {table.data_ptr() for table in sent if table is not None} == named


def test_buffers_of_an_exchange_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is told once of each stream that a plan casts on."""
    exchange = object.__new__(Exchange)
    buffers = [Table() for _ in range(4)]
    exchange.buffers = SimpleNamespace(tensors=buffers[:1])  # type: ignore[assignment]
    exchange.candidates, exchange._reduced, exchange._shared = buffers[1:]  # type: ignore[assignment]
    exchange.candidates_of = {}
    buffers[1].is_cuda, buffers[1].device = True, torch.device("cuda", 0)  # type: ignore[attr-defined]
    exchange._streams = set()
    streams = [Stream(number) for number in range(2)]
    for number in (0, 1, 0, 1, 1):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, n=number: streams[n])
        exchange.follow_stream()
    assert [buffer.streams for buffer in buffers] == [[0, 1]] * 4
