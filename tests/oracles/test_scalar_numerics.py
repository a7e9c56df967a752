"""Every backend against a second opinion: the numerics restated in scalars."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerocast
from tests.oracles import scalar_numerics
from tests.oracles.arbitrary import DTYPES, check, matrices, name_of
from zerocast.recipes import QParams

pytestmark = pytest.mark.usefixtures("backend")

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=150)


@PROPERTY
@given(matrices((16, 48, 80, 96, 112)), DTYPES, st.booleans())
def test_nvfp4_equals_the_scalar_oracle(master, dtype, round_master):
    """Codes, scales, padding, amax, columnwise copies and values of arbitrary bit patterns."""
    recipe = zerocast.NVFP4BlockScaling(round_master=round_master)
    check(
        master,
        recipe,
        dtype,
        scalar_numerics.quantize_nvfp4(master.numpy(), name_of(dtype, recipe)),
    )


@PROPERTY
@given(
    matrices((1, 7, 16, 33)), DTYPES, st.booleans(),
    st.sampled_from(["e4m3", "e5m2"]), st.booleans(),
    st.sampled_from([0.0, 1e-46, 1e-45, 1e-30, 0.7, 3.4e38]),
)  # fmt: skip
def test_float8_equals_the_scalar_oracle(master, dtype, round_master, name, power_2, eps):
    """Codes, scale, columnwise copy and values, over both formats and every option."""
    recipe = zerocast.Float8CurrentScaling(
        fp8_format=name, fp8_quant_fwd_weight=QParams(power_2, eps), round_master=round_master
    )
    rounded = name_of(dtype, recipe)
    expected = scalar_numerics.quantize_float8(master.numpy(), rounded, name, power_2, eps)
    check(master, recipe, dtype, expected)


E4M3_TIES = torch.tensor(scalar_numerics.FLOAT8_VALUES["e4m3"]).unfold(0, 2, 1).mean(dim=1).double()


@settings(PROPERTY, max_examples=12)
@given(st.integers(0x0C800000, 0x7F7FFFFF), st.integers(-2, 2))
def test_nvfp4_block_amaxes_beside_every_tie_of_the_stored_scale(bits, ulps):
    """One block a tie, whose amax is the float32 nearest to tie * g / 448, or one or two away.

    There the association of the formula decides the stored byte. The tensor amax is arbitrary
    above 2^-102, where S_enc is a normal float32 less than FLT_MAX.
    """
    g = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    amax = (E4M3_TIES * g.double() / 448).float().view(torch.int32).add(ulps).view(torch.float32)
    x = torch.zeros(1, 16 * (1 + len(E4M3_TIES)))
    x[0, 0] = g
    x[0, 16::16] = amax
    x[0, 17::16] = amax * -0.4
    expected = scalar_numerics.quantize_nvfp4(x.numpy(), "float32")
    check(x, zerocast.NVFP4BlockScaling(), torch.float32, expected)
