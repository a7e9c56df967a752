"""The CUDA backend around its kernels: which tiles, which cache, which errors. Needs no GPU."""

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerocast
from tests.kernels.conftest import Event, Stream
from zerocast.backends.cuda import Kernel, KernelArguments, compiler, kernel_cache
from zerocast.backends.cuda.cuts import tiled
from zerocast.backends.cuda.device import WORDS
from zerocast.backends.cuda.kernel_sources import cuda_sources
from zerocast.backends.cuda.tiling import (
    shard_tiles,
)
from zerocast.errors import BackendError, InputError
from zerocast.layout import BlockGrid, Extent

# --- tiles ---


def test_tiles_follow_the_shard() -> None:
    """A 64th of a weight, and a piece of one row, are visited by their own tiles only."""
    grid = BlockGrid(4096, 4096, 16, 16)
    whole = len(shard_tiles([0], [grid], [Extent(0, grid.numel)]))
    assert whole == 4096 // 16 * 4096 // 512
    assert len(shard_tiles([0], [grid], [Extent(0, grid.numel // 64)])) == whole // 64
    assert len(shard_tiles([0], [grid], [Extent(4096 * 7 + 600, 4096 * 7 + 1200)])) == 2
    wraps = Extent(
        4096 * 7 + 4000, 4096 * 8 + 10
    )  # the last columns of a row, the first of the next
    assert len(shard_tiles([0], [grid], [wraps])) == 2


def test_indices_have_64_bits() -> None:
    """Tiles beyond 2^31 elements and blocks keep their numbers."""
    grid = BlockGrid(2**22, 2**14, 16, 16)
    tiles = shard_tiles([0], [grid], [Extent(2**36 - 5, 2**36)])
    assert tiles.shape == (1, 4)
    row, col = divmod(int(tiles[0, 2]), grid.cols)
    assert (row, col) == (2**22 - 16, 2**14 - 512)
    assert int(tiles[0, 3]) == grid.num_blocks - 32


# --- sources and the cache of compiled kernels ---


BYTES = Kernel("transpose", 256, ("8",))
SCALE = Kernel("compute_scale", 128, ("MXNumerics<E4M3>",))


@pytest.fixture
def nvrtc() -> object:
    """NVRTC, where it is installed."""
    try:
        return compiler.import_nvrtc()
    except BackendError as error:
        pytest.skip(str(error))


def test_the_key_holds_everything(nvrtc: object, tmp_path: Path, monkeypatch) -> None:
    """Another source, instance, included header, flag, architecture or compiler is another file."""
    import shutil

    root = Path(shutil.copytree(cuda_sources(), tmp_path / "cuda_src"))
    monkeypatch.setattr(compiler, "cuda_sources", lambda: root)
    keys = [compiler.cache_key(BYTES, "sm_90")]

    def changed() -> bool:
        keys.append(compiler.cache_key(BYTES, "sm_90"))
        return len(set(keys)) == len(keys)

    for file in ("cuda/transpose.cu", "cuda/vec4.h", "arithmetic/lanes.h"):
        with (root / file).open("a") as f:
            f.write("// more\n")
        assert changed(), file
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "--restrict"))
    assert changed()
    keys.append(compiler.cache_key(BYTES, "sm_80"))
    keys.append(compiler.cache_key(Kernel("transpose", 256, ("4",)), "sm_90"))
    assert len(set(keys)) == len(keys)
    version = compiler.import_nvrtc().getVersion()
    fake = type("Nvrtc", (), {"getVersion": staticmethod(lambda: (version[0], version[1] + 1))})
    monkeypatch.setattr(compiler, "import_nvrtc", lambda: fake)
    assert changed()


def test_ranks_compile_at_once(nvrtc: object, tmp_path: Path) -> None:
    """Processes that start together on an empty cache all get the kernel, and leave one file."""
    code = (
        "import hashlib, sys; from pathlib import Path\n"
        "from zerocast.backends.cuda import Kernel\n"
        "from zerocast.backends.cuda.compiler import compiled\n"
        "kernel = Kernel('compute_scale', 128, ('MXNumerics<E4M3>',))\n"
        "name, cubin = compiled(kernel, 'sm_90', Path(sys.argv[1]))\n"
        "print(hashlib.sha256(name.encode() + b'\\0' + cubin).hexdigest())"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    digests = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    (file,) = tmp_path.iterdir()
    kernel = kernel_cache.kept(file)
    assert kernel is not None
    # Names of constants in a cubin hold the number of the process that compiled it.
    assert hashlib.sha256(kernel).hexdigest() in digests


def test_a_cache_that_cannot_be_written(nvrtc: object, tmp_path: Path) -> None:
    """Without a place to keep them kernels are compiled all the same."""
    (tmp_path / "file").write_text("not a folder")
    _, cubin = compiler.compiled(SCALE, "sm_90", tmp_path / "file")
    assert cubin.startswith(b"\x7fELF")


def test_sources_that_are_nowhere(monkeypatch) -> None:
    """Where the sources are not shipped the error says where they were looked for."""
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    with pytest.raises(BackendError, match=r"zerocast/cuda_src.*install zerocast again"):
        cuda_sources()


# --- the launcher of a GPU that is not there ---


KERNEL = Kernel("partial_cast", 128, ("NVFP4Numerics", "StochasticVec4", "Tile"))


def test_a_launch_is_one_call_on_the_current_stream(gpu) -> None:
    """The driver gets the kernel, grid, block, torch's stream and the argument table."""
    gpu.use(Stream(0xABC))
    arguments = KernelArguments([1, 2])
    gpu.launcher.launch(KERNEL, 77, 1000, arguments)
    expected = (77, 1000, 1, 1, 128, 1, 1, 0, 0xABC, arguments.address, 0)
    assert gpu.calls == [expected]
    assert gpu.launcher.launches == 1


def test_a_launch_waits_for_tables_sent_on_another_stream(gpu, monkeypatch) -> None:
    """On the stream of the upload nothing is waited for, on another one the upload's event until it
    is over, in a capture nothing.
    """
    launcher, stream = gpu.launcher, Stream(5)
    gpu.use(stream)
    launcher._uploads[5] = Event()
    launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    assert stream.waited == []
    others = launcher._uploads[6], launcher._uploads[7] = Event(), Event()
    launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    assert stream.waited == [*others]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for event in others:
        event.over = True
    launcher.launch(KERNEL, 1, 1, KernelArguments([]))
    assert stream.waited == [*others]
    assert list(launcher._uploads) == [5]


def test_a_driver_error_names_the_kernel(gpu, monkeypatch) -> None:
    """What the driver refuses reaches the user with the kernel's name and what to do."""

    def fail(*_: int) -> None:
        raise gpu.launcher._driver.CUDADriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(gpu.launcher._driver, "launchKernel", fail)
    message = rf"{KERNEL} on 9 blocks.*ILLEGAL.*CUDA_LAUNCH_BLOCKING=1"
    with pytest.raises(BackendError, match=message):
        gpu.launcher.launch(KERNEL, 1, 9, KernelArguments([]))


def test_a_small_table_goes_with_a_launch(gpu, monkeypatch) -> None:
    """Also in a capture: the words are arguments of a kernel, in the order of its parameters."""
    made = torch.zeros(2, 3, dtype=torch.int64)
    monkeypatch.setattr("torch.empty_like", lambda table, device: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    given: list[list[int]] = []

    def launch_kernel(handle, *numbers) -> None:
        pointers = ctypes.cast(numbers[-2], ctypes.POINTER(ctypes.c_void_p))
        sizes = {0: 1, 1: 1, 2: WORDS}  # to, count, words
        for at, size in sizes.items():
            words = ctypes.cast(pointers[at], ctypes.POINTER(ctypes.c_int64 * size))
            given.append(list(words.contents))

    monkeypatch.setattr(gpu.launcher._driver, "launchKernel", launch_kernel)
    assert gpu.launcher.upload(torch.tensor([[1, 2, 3], [-4, 5, 2**62]])) is made
    assert given[:2] == [[made.data_ptr()], [6]]
    assert given[2] == [1, 2, 3, -4, 5, 2**62] + [0] * (WORDS - 6)
    source = (cuda_sources() / "cuda" / "write_words.cu").read_text()
    assert f"constexpr int WORDS = {WORDS};" in source


def test_tables_are_not_sent_in_a_capture(gpu, monkeypatch) -> None:
    """Making a plan, and binding masters, inside of a capture is refused with the other way."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table = torch.zeros(WORDS + 1, dtype=torch.int64)
    with pytest.raises(BackendError, match="launches for a new shape, must be prepared"):
        gpu.launcher.upload(table)
    with pytest.raises(BackendError, match="masters must be given before a CUDA graph"):
        gpu.launcher.refresh(table, table)


# --- the choice ---


def test_rows_that_no_thread_steps_over_are_refused():
    """Four rows of 2^28 elements are as many bytes as 32 bits count."""
    for block in ((16, 16), (1, 32)):
        grid = BlockGrid(64, 2**28, *block)
        with pytest.raises(BackendError, match=r"rows of fewer than 268435456 .*got BlockGrid"):
            tiled([(grid, None, [Extent(0, 5)])])
    grid = BlockGrid(64, 2**28 - 16, 16, 16)
    assert tiled([(grid, None, [Extent(0, 5)])])[0] == "Tile"


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
DRIVER = r"needs a GPU that torch can use.*install the driver"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        pytest.param("cuda", BackendError, DRIVER, marks=NO_GPU),
        ("gpu", InputError, "takes 'reference', 'cpu' or 'cuda', got 'gpu'"),
    ],
)
def test_what_is_not_here_says_so(name: str, error: type[Exception], said: str) -> None:
    """use_backend("cuda") on a machine without a GPU raises at once, with the remedy; a misspelt
    backend is refused with those that exist.
    """
    with pytest.raises(error, match=said), zerocast.use_backend(name):
        pass


def test_importing_the_backend_imports_no_cupy() -> None:
    """CuPy is imported when a GPU is used, not before."""
    code = "import sys, zerocast.backends.cuda.device; sys.exit('cupy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
