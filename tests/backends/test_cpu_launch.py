"""A native launch: what it looks up when it runs, what it refuses, where its library lies."""

import gc
import platform
import sys

import pytest
import torch

from tests.support.instruction_sets import ISAS
from tests.support.operations import masters_of, nvfp4, per_tensor
from tests.support.programs import run
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.errors import BackendError
from zerocast.numerics import E4M3, Float8Numerics, Masters, NVFP4Numerics

FP8 = Float8Numerics(E4M3)


def test_a_launch_reads_the_masters_that_are_bound_when_it_runs():
    """Re-binding needs no new launch: the second run casts the second master."""
    scheme, masters = per_tensor(3, 5, FP8), Masters(1)
    shard = scheme.operand(scheme.codes(), scheme.whole)
    amax = CpuBackend().partial_amax([shard], masters)
    cast = CpuBackend().partial_cast(FP8, [shard], masters)
    for value, code in ((448.0, 0x7E), (1.0, 0x38)):
        shard.planes[0].block_amax.fill_(torch.tensor(448.0).view(torch.int32))
        masters.bind([torch.full((15,), value)])
        amax()
        cast()
        assert_same_bytes(
            shard.planes[0].codes, torch.full((15,), code, dtype=torch.uint8), "codes"
        )


def test_a_launch_keeps_alive_what_it_points_to():
    """The caller may drop every operand but the ones it reads afterwards."""
    scheme, backend, launches = nvfp4(64, 64), CpuBackend(), []
    codes, masters = scheme.codes(), masters_of(torch.ones(64 * 64))
    for _ in range(2):
        shard = scheme.operand(codes, scheme.whole)
        launches.append(backend.partial_amax([shard], masters))
        launches.append(backend.partial_cast(scheme.numerics, [shard], masters))
    del shard, masters
    gc.collect()
    filler = [torch.full((64 * 64,), 7.0) for _ in range(50)]  # would take the freed memory
    for launch in launches:
        launch()
    assert_same_bytes(codes, torch.full_like(codes, 0x77), "codes of ones: the largest everywhere")
    assert len(filler) == 50


def test_the_number_of_threads_is_torchs_unless_given():
    """None follows torch.get_num_threads(); a number below 1 is refused."""
    assert CpuBackend().threads is None
    assert CpuBackend(threads=3).threads == 3
    with pytest.raises(BackendError, match="threads must be 1 or more, got 0"):
        CpuBackend(threads=0)


def test_an_instruction_set_that_is_not_there_is_refused():
    """The message lists those that are; one that every processor of this kind has always is."""
    every = "neon" if platform.machine() in ("aarch64", "arm64") else "baseline"
    with pytest.raises(BackendError, match=rf"{every}.*got 'neon2'; leave it out"):
        CpuBackend("neon2")
    assert CpuBackend(every).isa == every == ISAS[-1]


def test_a_law_without_code_is_refused_when_it_is_prepared():
    """Before any launch, and with the backend that does have it."""
    unknown = NVFP4Numerics(scale_fmt=NVFP4Numerics().fmt)
    with pytest.raises(BackendError, match=r"cpu backend.*use_backend\('reference'\)"):
        CpuBackend().partial_cast(unknown, [], Masters(0))


def test_a_tensor_that_is_not_contiguous_is_refused_when_it_is_prepared():
    """Nothing has been read or written then."""
    scheme = per_tensor(4, 4, FP8)
    shard = scheme.operand(torch.zeros(32, dtype=torch.uint8)[::2], scheme.whole)
    with pytest.raises(BackendError, match=r"contiguous CPU tensors, got .*strides \(2,\)"):
        CpuBackend().partial_cast(FP8, [shard], Masters(1))


def test_a_missing_library_names_the_place_and_the_remedy(monkeypatch):
    """Where it was looked for, and the commands that put it there."""
    monkeypatch.setattr(native_library, "LIBRARY", "libzerocast_absent.so")
    with pytest.raises(BackendError, match=r"_native.libzerocast_absent\.so.*cmake --build"):
        native_library.find_library()


def test_a_file_that_is_no_library_is_refused(tmp_path):
    """The loader's own reason is in the message."""
    path = tmp_path / native_library.LIBRARY
    path.write_bytes(b"not a library")
    with pytest.raises(BackendError, match=r"cannot be loaded \(.*To build it again"):
        native_library.open_library(path)


def test_a_stale_library_is_refused(monkeypatch):
    """Both interface numbers appear."""
    monkeypatch.setattr(native_library, "INTERFACE", 10_000)
    with pytest.raises(BackendError, match=r"must have interface 10000, and .* has \d+: it was"):
        native_library.open_library(native_library.find_library())


FORKS = """
import os, signal, torch, zerocast
torch.set_num_threads(2)
weight = zerocast.empty((512, 512), "nvfp4")
plan = zerocast.CastPlan([weight], [torch.linspace(-3, 3, 512 * 512)], [0])
plan.cast()
codes = weight.rowwise_data.tolist()
large = torch.ones(4096, 1024)
torch.equal(large, large.clone())
child = os.fork()
if child == 0:
    signal.alarm(60)
    for recipe in ("mxfp8", "nvfp4", "current", "block", "delayed"):
        zerocast.empty(large.shape, recipe)
        zerocast.quantize(large, recipe)
    weight.rowwise_data[0, 0] = 0
    plan.cast()
    os._exit(weight.rowwise_data.tolist() != codes)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_casts():
    """It allocates, quantizes and casts, and does not wait for threads that its parent had."""
    done = run([sys.executable, "-c", FORKS])
    assert done.returncode == 0, done.stderr
