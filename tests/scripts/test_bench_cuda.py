"""What of scripts/bench_cuda.py runs without a GPU: its sets, its counts, its reports."""

import os
from pathlib import Path

import bench_cuda
import bench_host
import cuda_report
import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import BUILDS, Emulator, needs_emulation
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.cuda import CudaBackend

STEPS = ("memset", "amax", "scale", "cast", "transpose")


def test_the_sets():
    """Llama-3-8B has 224 linear weights of 6.98 G elements; the experts are thousands."""
    llama = bench_cuda.SETS["llama"]
    assert len(llama) == 224
    assert sum(rows * cols for rows, cols in llama) == 6_979_321_856
    assert len(bench_cuda.SETS["experts"]) == 5568
    for shapes in bench_cuda.SETS.values():
        total = sum(rows * cols for rows, cols in shapes)
        for world_size in bench_cuda.WORLD_SIZES:
            owned = sum(extent.size for extent in bench_cuda.rank_0(shapes, world_size))
            assert total / world_size <= owned <= total / world_size + 128


def test_a_rehearsal_outside_of_the_tests_has_a_folder_for_kernels(monkeypatch):
    """By hand, nobody else has made the one that the emulation compiles into."""
    monkeypatch.delenv(BUILDS)
    bench_cuda.emulation()
    assert Path(os.environ[BUILDS]).is_dir()


@needs_emulation
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "fp8_blockwise"])
def test_what_is_timed_is_the_cast(recipe, world_size):
    """The steps of the benchmark write what one by one they write, and their bytes are counted."""
    backend = CudaBackend(Emulator())
    work = bench_cuda.prepare_rank_0(
        backend, bench_cuda.RECIPES[recipe], [(48, 64), (17, 96), (33, 32)], world_size, "cpu"
    )
    reads_once = recipe == "fp8_blockwise" and world_size == 1  # one rank holds all blocks whole
    assert tuple(work.steps) == (*STEPS[:2], *["one pass"][: int(reads_once)], *STEPS[2:])
    for step in work.steps.values():
        step()
    codes = [storage.buffers["rowwise_data"].clone() for storage in work.storages]
    for storage in work.storages:
        storage.buffers["rowwise_data"].zero_()
    bench_cuda.one_by_one(backend, bench_cuda.RECIPES[recipe], work)()
    for storage, expected in zip(work.storages, codes, strict=True):
        assert_same_bytes(storage.buffers["rowwise_data"], expected, "codes")
    owned = sum(shard.extent.size for shard in work.shards)
    assert work.read["amax"] == work.read["cast"] == 4 * owned
    assert work.written["cast"] == owned * (4 if recipe == "nvfp4" else 8) // 8
    assert all(work.tables[step] > 0 for step in ("amax", "scale", "cast", "transpose"))
    scales = [s.buffers.get("columnwise_scale_inv") for s in work.storages]
    repeats = {"nvfp4": 16, "fp8": 1, "fp8_blockwise": 1}[recipe]
    must = sum(s.buffers["rowwise_data"].nbytes for s in work.storages)
    must += sum(s.nbytes for s in scales if s is not None) // repeats
    assert work.read["transpose"] == must


def test_the_bound():
    """The bound of a read is the read rate's, that of a copy the copy rate's where it is
    shorter.
    """
    memory = bench_cuda.Memory(read=4.0, write=2.0, copy=4.0)
    assert memory.seconds(8, 0) == 2.0
    assert memory.seconds(8, 8) == 4.0
    assert bench_cuda.Memory(read=4.0, write=2.0, copy=1.0).seconds(8, 8) == 6.0


def test_the_report():
    """The page holds every row, and says of each goal whether it was met."""
    step = {"seconds": 1e-3, "bytes": 8e8, "moved_over_must": 1.01, "of_bound": 0.87, "launches": 1}
    row = {
        "set": "llama", "recipe": "nvfp4", "world_size": 1, "weights": 224, "owned": 1,
        "steps": dict.fromkeys(STEPS, step), "host_seconds": 2e-5,
        "one_by_one_seconds": 1.0,
    }  # fmt: skip
    report = {
        "gpu": "a GPU", "torch": "2", "cuda": "13", "driver": "13", "rounds": 3,
        "memory": {"read": 1e12, "write": 3e12, "copy": 2e12}, "rows": [row],
        "others": {"nvfp4": {"torch eager": 1e9}},
        "host": [{"weights": 224, "seconds": 2e-4, "looking": 3e-4, "launches": 6}],
    }  # fmt: skip
    page = bench_cuda.markdown(report)
    assert "TransformerEngine: not measured, no checkout was given." in page
    assert "read 1000 GB/s" in page
    assert "| llama | nvfp4 | 1 | transpose | 1.000 | 87% | 80% | 40% | 1.0100 | 1 |" in page
    assert "224 weights, two recipes: 200 us of the host, 150 MISSED (300 where the" in page
    assert "nvfp4 amax: 87% of its bound, 90% MISSED" in page
    assert "nvfp4 cast: 87% of its bound, 85% met" in page


def test_the_goal_of_64_ranks():
    """Amax and cast at rank 0 of 64 are held against those of 1 rank: 1/50 of them or less."""

    def row(world_size, seconds):
        step = {"seconds": seconds, "of_bound": 1}
        return {
            "set": "llama", "recipe": "fp8", "world_size": world_size,
            "steps": dict.fromkeys(STEPS, step),
        }  # fmt: skip

    verdict = "- fp8 amax + cast at rank 0 of 64: 1/40.0 of 1 rank's, 1/50 MISSED"
    assert verdict in cuda_report.verdicts({"rows": [row(1, 1.0), row(64, 0.025)]})


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "fp8_blockwise"])
def test_torch_does_the_same_maths(recipe):
    """What torch is timed at gives the codes of our recipe, on normal data."""
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(3))
    codes = bench_cuda.PLAIN[recipe](x)[0].view(torch.uint8)
    with zerocast.use_backend("reference"):
        expected = zerocast.quantize(
            x, bench_cuda.RECIPES[recipe], dtype=torch.bfloat16, columnwise=False
        )
    assert_same_bytes(codes, expected.quantized_storage.buffers["rowwise_data"], "codes")


@pytest.mark.parametrize("weights", [224, 5000])
def test_a_step_is_six_launches_of_two_recipes(weights):
    """With launches that do nothing, plan.cast() of two recipes still makes 6 of them."""
    stubbed = CudaBackend(bench_host.NoLauncher())
    assert bench_host.host_time(stubbed, weights, 3)["launches"] == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys, monkeypatch):
    """It says what it needs, and what it can do without."""
    monkeypatch.setattr(bench_host, "PLANS", (24, 224))
    assert bench_cuda.main([]) == 1
    assert "--host" in capsys.readouterr().out
    assert bench_cuda.main(["--host", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("us of the host") == 2
    assert "- all_gather, staged: " in out
