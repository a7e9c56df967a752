"""Megatron-Core as it is installed trains weights of zerocast on CPU ranks."""

import re
from pathlib import Path

import pytest

from tests.support.programs import on_torchrun_ranks, output_of

pytest.importorskip("megatron.core", reason="needs Megatron-Core; pip install '.[megatron]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]

PROGRAM = Path(__file__).with_name("train_by_megatron.py")


def train(ranks: int, *arguments: object) -> list[float]:
    """The loss of each step, once every byte of every step was right."""
    out = output_of(on_torchrun_ranks(ranks, PROGRAM, *arguments), timeout=900)
    rows = re.findall(r"step \d+: loss ([\d.]+), (\d+) weights, (\d+) bytes", out)
    assert len(rows) == 20
    assert all(wrong == "0" for _, _, wrong in rows), rows
    if "bf16" not in arguments:
        assert all(weights == "8" for _, weights, _ in rows), rows
    return [float(loss) for loss, _, _ in rows]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["block"]),
        (3, ["block", "--hidden", 80]),
        (2, ["current"]),
        (3, ["mxfp8"]),
        (2, ["mxfp8-2d"]),
        (4, ["block", "--tp", 2]),
        (2, ["block", "--overlap"]),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(map(str, value)),
)
def test_every_byte_is_the_cast_of_the_gathered_masters(ranks, arguments):
    """Twenty steps of an unmodified GPTModel and DistributedOptimizer; every byte after each."""
    losses = train(ranks, *arguments)
    assert losses[-1] < losses[0]


def test_the_loss_follows_bf16():
    """Twenty steps end within two percent of the loss that BF16 weights end at."""
    assert train(2, "block")[-1] == pytest.approx(train(2, "bf16")[-1], rel=0.02)
