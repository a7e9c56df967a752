"""scripts/bench_step.py times the steps that it says, and says what they move."""

from pathlib import Path

import bench_step
import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes


def test_what_is_timed_is_a_step_and_its_cast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every work updates the master once; one pass and two leave the cast of it; the record has
    all of them, and the bytes of one pass are fewer.
    """
    step = bench_step.Step((96, 160))
    recipes = {name: recipe for name, (recipe, _) in bench_step.RECIPES.items()}
    works = step.works(recipes)
    assert len(works) >= 2 + 2 * len(recipes)
    plans = {name: works[f"{name}: one pass"].args[0] for name in recipes}
    for name, work in works.items():
        before = step.master.detach().clone()
        work()
        assert not torch.equal(step.master, before), name
        if name.endswith(" pass"):
            recipe = name.partition(":")[0]
            ((spec, *_),) = plans[recipe].shards()
            plans[recipe].all_gather()
            expected = zerocast.quantize(
                step.master.detach().view(96, 160), recipes[recipe], dtype=torch.bfloat16
            )
            for buffer, bytes_ in expected.quantized_storage.buffers.items():
                assert_same_bytes(spec.storage.buffers[buffer], bytes_, f"{name}, {buffer}")
    arguments = ["--rows", "64", "--cols", "64", "--rounds", "1", "--json", str(tmp_path / "j")]
    monkeypatch.setattr("sys.argv", ["bench_step.py", *arguments])
    assert bench_step.main() in (0, 1)
    assert (tmp_path / "j").exists()
    moved = [
        sum(bench_step.moved(f"FP8 128x128: {way}", 64, recipes))
        for way in ("one pass", "two passes")
    ]
    assert moved == [29 * 64, 33 * 64]
    assert sum(bench_step.moved("NVFP4: one pass", 64, recipes)) == 28 * 64 + 32 + 256
