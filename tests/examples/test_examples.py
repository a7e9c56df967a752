"""The examples run as their documentation says, and would say so if weights were wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import on_mpi_ranks, on_torchrun_ranks, output_of, run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRAIN, CAST_ONLY = EXAMPLES / "train_gpt.py", EXAMPLES / "cast_only.py"
WITH_WRONG_SCALE = ROOT / "scripts" / "with_wrong_scale.py"

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4-4over6")

pytest.importorskip("matplotlib", reason="the training example needs the extra [examples]")


def test_cast_only_is_short_and_right_on_mpi_ranks() -> None:
    """On 3 ranks every rank finds every byte equal to the unsharded cast; and it is an example of
    at most 60 lines.
    """
    said = output_of(on_mpi_ranks(3, CAST_ONLY))
    for rank in range(3):
        assert f"rank {rank} of 3: every byte equals the unsharded cast" in said
    assert len(CAST_ONLY.read_text().splitlines()) <= 60


def test_training_on_one_rank_leaves_table_record_and_picture(tmp_path: Path) -> None:
    """Two recipes, three steps, one process: the table names every phase, the record holds every
    loss, the picture is a PNG, and the weights are right.
    """
    options = ["--compare", "bf16,nvfp4", "--steps", 3, "--check", "--out", tmp_path]
    said = output_of([sys.executable, TRAIN, *options])
    for row in (
        "training loss",
        "validation loss",
        "sent a step, all-to-all",
        "sent a step, all-gather",
        "held, weights",
        "held, masters",
        "held, optimizer state",
        "time a step, forward and backward",
        "time a step, gradients and clipping",
        "time a step, optimizer",
        "time a step, amax",
        "time a step, all-reduce",
        "time a step, cast",
        "time a step, all-gather",
        "time a step, post-processing",
    ):
        assert row in said
    assert "nvfp4: NVFP4, one scale a 16x16 block" in said
    for recipe in ("bf16", "nvfp4"):
        assert f"{recipe}: The sharded weights equal the unsharded cast" in said
    record = json.loads((tmp_path / "record.json").read_text())
    assert [run["recipe"] for run in record["runs"]] == ["bf16", "nvfp4"]
    for trained in record["runs"]:
        assert len(trained["losses"]) == 3
        assert trained["losses"][0] == pytest.approx(5.55, abs=0.2)  # ln 256, and what is random
        assert trained["losses"][2] < trained["losses"][0]
        assert trained["verdict"][0] is True
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_training_continues_after_a_kill(tmp_path: Path) -> None:
    """Killed after its first checkpoint and started again, a run ends with the losses, to the bit,
    of one that was not.
    """
    records = []
    for name in ("killed", "not killed"):
        options = ["--steps", 24, "--autocast", "--recipe", "delayed", "--out", tmp_path / name]
        command = [sys.executable, TRAIN, *options, "--checkpoint", tmp_path / name / "saved"]
        if name == "killed":
            # As many threads as output_of gives it: with others products round otherwise.
            threads = os.environ | {"OMP_NUM_THREADS": "1"}
            first = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, env=threads)
            while not (tmp_path / name / "saved" / "delayed" / "checkpoint.json").exists():
                assert first.poll() is None
                time.sleep(0.01)
            first.kill()
            first.wait()
        output_of(command)
        (trained,) = json.loads((tmp_path / name / "record.json").read_text())["runs"]
        records.append((trained["losses"], trained["validation_losses"]))
    assert records[0] == records[1]


@pytest.mark.slow
def test_training_on_mpi_ranks_shards_what_it_holds(tmp_path: Path) -> None:
    """On 4 ranks each holds a quarter of masters and state, sends less for NVFP4 codes than for
    BF16 weights, and holds the right weights.
    """
    options = ["--compare", "bf16,nvfp4", "--steps", 2, "--check", "--out", tmp_path]
    output_of(on_mpi_ranks(4, TRAIN, *options))
    bf16, nvfp4 = json.loads((tmp_path / "record.json").read_text())["runs"]
    for trained in (bf16, nvfp4):
        assert trained["verdict"][0] is True
        held = trained["held_bytes"]
        assert held["masters"] == pytest.approx(4 * 3314176 / 4, rel=0.01)
        assert held["optimizer_state"] == pytest.approx(8 * 3314176 / 4, rel=0.01)
    assert nvfp4["sent_bytes"]["all_gather"] < 0.3 * bf16["sent_bytes"]["all_gather"]
    assert nvfp4["held_bytes"]["weights"] < 0.6 * bf16["held_bytes"]["weights"]


@pytest.mark.slow
def test_torchrun_starts_the_same_training(tmp_path: Path) -> None:
    """Under torchrun the ranks are found through torch.distributed, which gathers beside the
    forward, too; and verify finds nothing.
    """
    options = [
        "--recipe", "current", "--overlap", "--verify", "full", "--steps", 2, "--check",
        "--out", tmp_path,
    ]  # fmt: skip
    said = output_of(on_torchrun_ranks(2, TRAIN, *options))
    assert "2 ranks, 2 steps" in said
    assert "equal the unsharded cast on every rank" in said


@pytest.mark.nightly
def test_every_recipe_trains_on_ranks(tmp_path: Path) -> None:
    """Two steps on 2 ranks under each recipe, weights only, whose gathers overlap the forward, and
    with ``--autocast``: the loss falls, every byte is that of the unsharded cast, what recipes
    remember included. Quantized activations give other losses, and only delayed scaling sends
    amaxes of theirs.
    """
    runs = {}
    for mode in ("--overlap", "--autocast"):
        options = ["--compare", ",".join(RECIPES), "--steps", 2, "--check", mode, "--out", tmp_path]
        said = output_of(on_mpi_ranks(2, TRAIN, *options))
        for recipe in RECIPES:
            assert f"{recipe}: The sharded weights equal the unsharded cast on every rank" in said
        runs[mode] = json.loads((tmp_path / "record.json").read_text())["runs"]
    for weights_only, all_operands in zip(*runs.values(), strict=True):
        for trained in (weights_only, all_operands):
            assert trained["losses"][1] < trained["losses"][0], trained["recipe"]
        assert weights_only["losses"] != all_operands["losses"], weights_only["recipe"]
        sends_more = (
            weights_only["sent_bytes"]["all_reduce"] < all_operands["sent_bytes"]["all_reduce"]
        )
        assert sends_more == (weights_only["recipe"] == "delayed"), weights_only["recipe"]


@pytest.mark.parametrize(
    "recipes",
    [("delayed", "nvfp4"), pytest.param(RECIPES, marks=pytest.mark.nightly, id="every")],
)
def test_a_wrong_scale_is_found(tmp_path: Path, recipes: tuple[str, ...]) -> None:
    """With a wrong scale planted the check names weight, element and both values, under every
    recipe; exit code 1. Delayed scaling's codes are wrong from the second step on, and the scale
    for them is after the first; of blocks that were cast as they were measured scales are.
    """
    one_pass = dict.fromkeys(("block", "mxfp8", "mxfp4"), "rowwise_scale_inv")
    wrong = {"delayed": "scale", **one_pass}
    options = ["--compare", ",".join(recipes), "--steps", 1, "--check", "--out", tmp_path]
    said = output_of([sys.executable, WITH_WRONG_SCALE, TRAIN, *options], code=1)
    for recipe in recipes:
        buffer = wrong.get(recipe, "rowwise_data")
        assert f"{recipe}: WRONG: on rank 0 blocks.0.attention_in.weight.{buffer}[0" in said
    assert said.count("and the unsharded cast gives") == len(recipes)


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    """2 ranks cannot share 7 sequences: every rank says so and ends."""
    finished = run(on_mpi_ranks(2, TRAIN, "--steps", 1, "--batch", 7, "--out", tmp_path))
    assert finished.returncode == 1
    assert "--batch 7 must divide over 2 ranks" in finished.stderr
