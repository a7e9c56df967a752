"""Stochastic rounding has no bias, and repeats itself on demand. That it draws nothing but
neighbours, saturates and keeps a NaN loud, test_scalar_schemes.py shows.
"""

import zlib

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.numerics import E2M1, decode, unpack_nibbles
from zerocast.recipes import NVFP4BlockScaling, QParams
from zerocast.tensors import quantize_into

pytestmark = pytest.mark.usefixtures("backend")

DRAWN = QParams(fp4_2d_quantization=True, stochastic_rounding=True)
RECIPE = NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN, seed=20)
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# 0 to 6 in 63 steps, with both signs: 128 values, in 9 blocks, each with a 6 for its amax; among
# them all eight that E2M1 has, and their midpoints.
GRID = torch.cat([torch.arange(64) / 63 * 6, torch.arange(0, 6.125, 0.125), VALUES, -VALUES])
GRID = torch.cat([GRID, -GRID])[: 9 * 15].view(9, 15)


def repeated(rows: int) -> torch.Tensor:
    """[rows, 160] FP32, every row the same but for 2688 in the first: S_enc is 1, every multiplier
    is 1, and columns 16 and up are the grid's values, the last of each block 6.
    """
    x = torch.zeros(rows, 160)
    x[:, 16:] = torch.cat([GRID, torch.full((9, 1), 6.0)], dim=1).flatten()
    x[0, 0] = 2688.0
    return x


def draw(steps: int, rows: int) -> torch.Tensor:
    """[steps * rows, 144] codes."""
    weight = zerocast.empty((rows, 160), RECIPE, dtype=torch.float32, columnwise=False)
    x, codes = repeated(rows), []
    for _ in range(steps):
        quantize_into(weight.quantized_storage, x)
        codes.append(unpack_nibbles(weight.rowwise_data, 160)[:, 16:].clone())
    used = weight.rowwise_scale_inv[:rows, 1:10]
    assert used.eq(0x38).all(), "the multipliers are not 1"
    return torch.cat(codes)


@pytest.mark.parametrize(("steps", "rows"), [(1, 10_000), (100, 100)])
def test_the_mean_of_ten_thousand_draws(steps, rows):
    """Of every value of the grid it lies within 5 standard errors, over elements and over steps.

    A value at p between neighbours that are d apart has a standard error of d * sqrt(p (1-p) / n).
    """
    x = repeated(1)[0, 16:].double()
    codes = draw(steps, rows)
    mean = decode(codes, E2M1).double().mean(dim=0)
    values = VALUES.double()
    lower = (torch.searchsorted(values, x.abs(), right=True) - 1).clamp(max=6)
    gap = values[lower + 1] - values[lower]
    p = (x.abs() - values[lower]) / gap
    error = gap * (p * (1 - p) / len(codes)).sqrt()
    wrong = ((mean - x).abs() > 5 * error).nonzero().flatten()
    assert not len(wrong), [(x[i].item(), mean[i].item(), error[i].item()) for i in wrong]
    # It is no accident of an all too regular sequence either: the deviations are those of chance.
    deviation = ((mean - x) / error)[error > 0]
    assert 0.8 < deviation.std() < 1.2


def test_the_step_advances_and_can_be_taken_back():
    """A second cast draws anew; rewound, it draws the same again."""
    weight = zerocast.empty((48, 160), RECIPE, dtype=torch.float32)
    counter = weight.quantized_storage.buffers["rounding_counter"]
    quantize_into(weight.quantized_storage, repeated(48))
    first, after_first = weight.rowwise_data.clone(), counter.tolist()
    quantize_into(weight.quantized_storage, repeated(48))
    second = weight.rowwise_data.clone()
    assert counter[1] == after_first[1] + 1
    assert (first != second).sum() > 1000
    RECIPE.rewind(weight.quantized_storage.buffers)
    quantize_into(weight.quantized_storage, repeated(48))
    assert_same_bytes(weight.rowwise_data, second, "codes")


def test_the_name_and_the_seed_choose_the_draws():
    """The same name and seed give the same codes, another one others; the hash is the CRC-32."""

    def cast(name: str, seed: int) -> torch.Tensor:
        recipe = NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN, seed=seed)
        weight = zerocast.empty((48, 160), recipe, dtype=torch.float32, name=name)
        quantize_into(weight.quantized_storage, repeated(48))
        assert int(weight.quantized_storage.buffers["rounding_counter"][0]) == zlib.crc32(
            name.encode()
        )
        return weight.rowwise_data

    assert_same_bytes(cast("layers.0.ä", 5), cast("layers.0.ä", 5), "codes")
    for other in (cast("layers.1.ä", 5), cast("layers.0.ä", 6), cast("layers.0.ä", 5 + 2**32)):
        assert (other != cast("layers.0.ä", 5)).sum() > 1000
