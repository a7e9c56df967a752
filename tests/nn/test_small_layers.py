"""auto_filter_small_kn leaves out what a table calls too small, and says whose table."""

import json
from pathlib import Path

import pytest
import torch

from zerocast.nn import convert, small_layers
from zerocast.nn.small_layers import AUTO_FILTER, Bounds, smallest_gains, table_for
from zerocast.recipes import Float8CurrentScaling, Float8RowwiseScaling, NVFP4BlockScaling, Recipe
from zerocast.tensors import QuantizedTensor

CURRENT, ROWWISE = Float8CurrentScaling(), Float8RowwiseScaling()
CPU = torch.device("cpu")


def linear(k: int, n: int) -> torch.nn.Linear:
    """[N, K], without drawing numbers."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(torch.empty(n, k))
    return layer


@pytest.mark.parametrize(
    ("recipe", "k", "n", "small"),
    [
        (CURRENT, 4096, 1024, True),
        (CURRENT, 4112, 1024, False),
        (CURRENT, 4096, 1040, False),
        (CURRENT, 16, 16, True),
        (ROWWISE, 8192, 2048, True),
        (ROWWISE, 1024, 8192, True),
        (ROWWISE, 2048, 4096, True),
        (ROWWISE, 2064, 4096, False),
        (ROWWISE, 2048, 4112, False),
        (ROWWISE, 1040, 4112, False),
    ],
)
def test_the_published_bounds(recipe: Recipe, k: int, n: int, small: bool) -> None:
    """torchao's: tensorwise K <= 4096 and N <= 1024; rowwise N <= 2048, K <= 1024, or K <= 2048 and
    N <= 4096.
    """
    weight = torch.empty(n, k, device="meta")
    assert (small_layers.why_small(recipe, weight) is not None) == small


def test_convert_leaves_small_layers_and_says_by_which_table() -> None:
    """A device that was never measured is named; other filters work beside it."""
    model = torch.nn.ModuleDict(
        {"small": linear(64, 32), "large": linear(16, 1040), "head": linear(16, 1040)}
    )
    report = convert(model, CURRENT, filter_fqns=["head", AUTO_FILTER])
    assert report.converted == ("large",)
    assert isinstance(model["large"].weight, QuantizedTensor)
    reason = report.left["small"]
    assert reason == (
        "too small to gain by quantized products: K = 64 and N = 32, and the published H100 table "
        "of torchao has no gain where K <= 4096 and N <= 1024 (Float8CurrentScaling was never "
        "measured on cpu)"
    )
    assert "head" in report.left
    assert reason in str(report)


def test_a_layer_called_after_the_filter_is_not_left_by_its_name() -> None:
    """The word is an instruction and not a part of names."""
    model = torch.nn.ModuleDict({AUTO_FILTER: linear(16, 1040)})
    assert convert(model, CURRENT, filter_fqns=[AUTO_FILTER]).converted == (AUTO_FILTER,)


def test_a_measurement_of_the_device_counts_before_the_published_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By recipe; the other recipes go on with the published one."""
    bounds = [{"k": 128, "n": None}, {"k": None, "n": 64}]
    devices = {"cpu": {"NVFP4BlockScaling": {"bounds": bounds}}}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"devices": devices}))
    monkeypatch.setattr(small_layers, "MEASUREMENTS", file)
    small_layers._measured.cache_clear()
    try:
        table, stands_in = table_for(NVFP4BlockScaling(), CPU)
        assert stands_in is None
        assert table.bounds == (Bounds(128, None), Bounds(None, 64))
        reason = small_layers.why_small(NVFP4BlockScaling(), torch.empty(256, 128))
        assert reason is not None
        assert reason.endswith("the measurement of cpu has no gain where K <= 128")
        assert small_layers.why_small(NVFP4BlockScaling(), torch.empty(80, 144)) is None
        assert table_for(CURRENT, CPU)[1] is not None
    finally:
        small_layers._measured.cache_clear()


def test_a_weight_that_will_move_is_judged_by_where_it_will_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is a GPU, a model on the CPU is on its way there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A New GPU")
    reason = small_layers.why_small(CURRENT, torch.empty(16, 16))
    assert reason is not None
    assert "never measured on A New GPU" in reason


@pytest.mark.parametrize(
    ("speedups", "bounds"),
    [
        ({}, ()),
        ({(64, 64): 1.2}, ()),
        ({(64, 64): 0.9, (128, 128): 0.8}, (Bounds(None, None),)),
        ({(64, 64): 0.9, (64, 128): 1.1, (128, 64): 0.8, (128, 128): 1.5}, (Bounds(128, 64),)),
        # Two that do not hold each other, and one inside.
        (
            {(64, 64): 0.5, (64, 256): 0.9, (256, 64): 0.7, (256, 256): 1.3},
            (Bounds(64, 256), Bounds(256, 64)),
        ),
        # A loss above a gain is no bound: it would leave the gaining layer out.
        ({(64, 64): 1.1, (128, 128): 0.9}, ()),
    ],
)
def test_bounds_from_measurements(
    speedups: dict[tuple[int, int], float], bounds: tuple[Bounds, ...]
) -> None:
    """They hold for no pair that gains, and for as many as possible that do not."""
    assert smallest_gains(speedups) == bounds


def test_what_ships_is_readable_and_of_known_schemes() -> None:
    """The file beside the module, as the bench writes it."""
    for schemes in json.loads(small_layers.MEASUREMENTS.read_text())["devices"].values():
        for entry in schemes.values():
            assert all(set(bound) == {"k", "n"} for bound in entry["bounds"])
