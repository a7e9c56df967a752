"""What of scripts/bench_layers.py is not a time: its sweep, its bounds, what it keeps."""

import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_layers

    return bench_layers


def test_a_small_sweep(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every size that the recipe holds is timed, printed and written, for every recipe asked for;
    the device's bounds are kept and those of others stay.
    """
    kept = tmp_path / "measured.json"
    kept.write_text(json.dumps({"devices": {"other": {"X": {"bounds": []}}}}))
    sizes = ["--m", "32", "--k", "32", "64", "--n", "40", "64", "--rounds", "1"]
    files = ["--update", "--measurements", str(kept), "--json", str(tmp_path / "all.json")]
    report = bench.main(["--recipe", "current", "mxfp8", *sizes, "--device", "cpu", *files])
    assert json.loads((tmp_path / "all.json").read_text()) == report
    timed = {
        name: [(f["m"], f["k"], f["n"]) for f in figures]
        for name, figures in report["recipes"].items()
    }
    assert timed == {
        "current": [(32, 32, 40), (32, 32, 64), (32, 64, 40), (32, 64, 64)],
        "mxfp8": [(32, 32, 64), (32, 64, 64)],
    }
    assert all(f["high"] > 0 < f["quantized"] for f in report["recipes"]["current"])
    devices = json.loads(kept.read_text())["devices"]
    assert set(devices["cpu"]) == {"Float8CurrentScaling", "MXFP8BlockScaling"}
    assert set(devices) == {"cpu", "other"}
    printed = capsys.readouterr().out
    assert "decoded operands" in printed.replace("\n", " ")


def test_bounds_take_the_best_m(bench: ModuleType) -> None:
    """A layer that gains for some M is not too small."""
    figures = [
        {"m": 16, "k": 64, "n": 64, "high": 1.0, "quantized": 2.0},
        {"m": 32, "k": 64, "n": 64, "high": 1.0, "quantized": 1.5},
        {"m": 16, "k": 128, "n": 64, "high": 1.0, "quantized": 1.5},
        {"m": 32, "k": 128, "n": 64, "high": 1.0, "quantized": 0.5},
    ]
    assert bench.bounds(figures) == [{"k": 64, "n": 64}]
