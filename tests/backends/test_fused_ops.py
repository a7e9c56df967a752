"""What the functions of layers give lies within 2 units of BF16's last place of float64, on every
backend; compiled ones give the same bits.
"""

from collections.abc import Callable

import pytest
import torch

from tests.cuda_emulation.emulator import Emulator, Mistake, needs_emulation
from tests.support.fused_ops import (
    ELEMENT_WISE,
    FUNCTIONS,
    NORMS,
    every_bfloat16,
    float64_target,
    rows_of_every_kind,
    ulps,
)
from tests.support.instruction_sets import ISAS
from tests.support.same_bytes import assert_same_bytes
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Backend, FusedOp

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "cuda": lambda: CudaBackend(Emulator("random", max_grid=5)),
    **{isa: (lambda isa=isa: CpuBackend(isa, threads=1)) for isa in ISAS},
}
NOMINALS = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(
    params=[pytest.param(n, marks=needs_emulation if n == "cuda" else ()) for n in BACKENDS],
    scope="module",
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend; CUDA's kernels on the CPU."""
    return BACKENDS[request.param]()


def exact_element_wise(function: str, x: torch.Tensor) -> torch.Tensor:
    """The formulas in float64, by other ways than the backends'."""
    x = x.double()
    if function == "relu":
        return torch.where(x.isnan(), x, x.clamp(min=0.0))
    if function == "gelu":  # the logarithm of Phi keeps its digits at both ends
        return x * torch.special.log_ndtr(x).exp()
    if function == "gelu_tanh":
        u = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)
        return x * torch.nn.functional.logsigmoid(2 * u).exp()
    if function == "silu":
        return x * torch.nn.functional.logsigmoid(x).exp()
    return x


def run(backend: Backend, op: FusedOp, x: torch.Tensor, round_to: torch.dtype,
        **given: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The rounded result."""
    target = float64_target(op, x, round_to, **given)
    backend.fused_op(target)()
    return target.output


# --- functions of one element ---


@pytest.mark.parametrize("function", ELEMENT_WISE)
def test_every_bfloat16_input(backend, function):
    """All 65,536 inputs, rounded to BF16: half a unit from float64, and a little; NaN and
    infinities where float64 has them.
    """
    x = every_bfloat16()
    exact = exact_element_wise(function, x)
    assert ulps(run(backend, FusedOp(function), x, torch.bfloat16), exact) <= 0.51
    # What is rounded is far closer, so FP32 results are good to about 5 digits more.
    assert ulps(run(backend, FusedOp(function), x, torch.float32), exact) <= 0.004


@pytest.mark.parametrize("round_to", NOMINALS)
@pytest.mark.parametrize("dtype", NOMINALS)
def test_dtypes_in_and_out(backend, dtype, round_to):
    """A source of any dtype is read exactly, and a result is rounded once to any other, at any
    alignment.
    """
    for shape in ((3, 5), (1, 1), (33, 129), (2, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        x[0, 0] = 2.0**-24  # FP16's smallest
        made = run(backend, FusedOp("identity"), x, round_to)
        assert_same_bytes(made, x.float().to(round_to), f"{dtype} to {round_to}")


def test_swiglu(backend):
    """Both halves of a row, where silu of the first alone is too small for FP32, too."""
    first = torch.linspace(-200.0, 200.0, 401).bfloat16()
    second = torch.tensor([1.0, -3.0, 2.0**-60, 2.0**100, -(2.0**127), 1e-30]).bfloat16()
    x = torch.stack(torch.broadcast_tensors(first[:, None], second[None, :]), dim=1).reshape(
        401, 12
    )
    exact = exact_element_wise("silu", x[:, :6]) * x[:, 6:].double()
    assert ulps(run(backend, FusedOp("swiglu"), x, torch.bfloat16), exact) <= 0.51


# --- functions of a row ---


def exact_norm(
    op: FusedOp, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the magnitude of its larger term."""
    x = x.double()
    if op.function == "layernorm":
        x = x - x.mean(dim=1, keepdim=True)
    y = x / (x.square().mean(dim=1, keepdim=True) + op.eps).sqrt()
    if weight is not None:
        y = y * (weight.double() + (1 if op.zero_centered_gamma else 0))
    if bias is None:
        return y, torch.zeros_like(y)
    return y + bias.double(), torch.maximum(y.abs(), bias.double().abs())


@pytest.mark.parametrize("cols", [1, 2, 5, 64, 127, 128, 129, 515, 2048])
@pytest.mark.parametrize("function", NORMS)
def test_norms(backend, function, cols):
    """Rows of any length and any kind: far from zero, with outliers, tiny, up to FLT_MAX."""
    for kind, x in rows_of_every_kind(cols):
        for eps in (1e-5, 0.0):
            op = FusedOp(function, eps)
            exact, _ = exact_norm(op, x, None, None)
            if function == "layernorm":
                # An element equal to the mean is 0, and all of a row of one: what is left of it in
                # float64, too, is noise.
                noise = x.double().abs().amax(dim=1, keepdim=True) * 2.0**-44
                x_centered = (x.double() - x.double().mean(dim=1, keepdim=True)).abs()
                exact = torch.where(x_centered <= noise, torch.nan, exact)
            made = run(backend, op, x, torch.bfloat16)
            made = torch.where(exact.isnan(), torch.nan, made)
            worst = ulps(made, exact)
            assert worst <= 2.0, f"{kind}, eps {eps}: {worst} units"


@pytest.mark.parametrize("cols", [1, 3, 96, 129, 1000])
def test_rows_of_equal_elements(backend, cols):
    """layernorm of a row of equal elements is 0, with 1 / sqrt(eps) for a backward, whatever the
    element: FP32's ends, too.
    """
    ends = torch.tensor([[2.0**50], [-3.3e20], [torch.finfo(torch.float32).max], [1e-45], [7.1]])
    x = ends.expand(-1, cols).contiguous()
    mean, rstd = torch.full((5,), torch.nan), torch.full((5,), torch.nan)
    y = run(backend, FusedOp("layernorm", 1e-5), x, torch.float32, mean=mean, rstd=rstd)
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(mean, ends.view(-1))
    torch.testing.assert_close(rstd, torch.full((5,), 1e-5**-0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-29, 1e-38, 1.0, 1e30])
def test_differences_that_are_subnormal(backend, eps):
    """layernorm of elements that differ by FP32's last bits near 0 is as near to float64 as any."""
    g = torch.Generator().manual_seed(7)
    steps = torch.randint(0, 9, (16, 200), generator=g, dtype=torch.int32)
    from_zero, far = steps.view(torch.float32), (steps + (7 << 23)).view(torch.float32)  # 2^-120
    op = FusedOp("layernorm", eps)
    for x in (from_zero, far):
        exact, _ = exact_norm(op, x, None, None)
        assert ulps(run(backend, op, x, torch.bfloat16), exact) <= 2.0


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("function", NORMS)
def test_weight_and_bias(backend, function, zero_centered):
    """With a weight, and a bias, of other dtypes: within 2 units of the larger term of the sum."""
    g = torch.Generator().manual_seed(3)
    for cols in (3, 300):
        x = torch.randn(37, cols, generator=g).half()
        weight = torch.randn(cols, generator=g).bfloat16()
        bias = torch.randn(cols, generator=g) if function == "layernorm" else None
        op = FusedOp(function, 1e-3, zero_centered)
        given = {"weight": weight} | ({} if bias is None else {"bias": bias})
        exact, term = exact_norm(op, x, weight, bias)
        assert ulps(run(backend, op, x, torch.bfloat16, **given), exact, term) <= 2.0


def test_statistics(backend):
    """Mean and 1 / deviation of each row come with the result, as a backward needs them."""
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(4)) * 3 + 1
    mean, rstd = torch.full((70,), torch.nan), torch.full((70,), torch.nan)
    run(backend, FusedOp("layernorm", 1e-5), x, torch.float32, mean=mean, rstd=rstd)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(dim=1), rtol=1e-6, atol=0)
    deviation = (exact.var(dim=1, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(rstd.double(), 1 / deviation, rtol=1e-6, atol=0)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("function", NORMS)
def test_a_row_that_is_not_finite(backend, function, special):
    """One NaN or infinity is what float64 makes of it, and other rows do not see it."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(5))
    x[2, 77] = special
    made = run(backend, FusedOp(function), x, torch.bfloat16)
    exact, _ = exact_norm(FusedOp(function), x, None, None)
    assert torch.equal(made.isnan(), exact.isnan())
    assert not made[[0, 1, 3, 4]].isnan().any()


# --- the same bits ---

OF_INSTRUCTIONS = Mistake(
    "fused_op",
    "cuda/conversions.h",
    "q.x[i] = round_to<Nominal, Scalar>(q.x[i]);",
    """if (q.x[i] == q.x[i])
            q.x[i] = round_to<Nominal, Scalar>(q.x[i]);
        else if (!SAME<Nominal, Fp32>)
            q.x[i] = Scalar::value(SAME<Nominal, Bf16> ? 0x7FFF0000 : 0x7FFFE000);""",
)
"""The NaNs that a device's conversions make, planted: cvt.rn.bf16x2.f32 and cvt.rn.f16.f32 give
0x7FFF for every one (PTX ISA, "cvt"), and FP32 is not converted."""

CANONICAL = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def rows_with_every_nan(function: str, dtype: torch.dtype) -> torch.Tensor:
    """[rows, S]: of every NaN of BF16, or of FP16 where that is ``dtype``, rows that have it in one
    place and 1 elsewhere.
    """
    as_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    values = torch.arange(65536).to(torch.int16).view(as_dtype)
    nans = values[values.isnan()]
    if dtype == torch.float32:  # with each payload, which a conversion might not keep
        nans = (nans.view(torch.int16).int() << 16).view(torch.float32)
    cols = 6 if function == "swiglu" else 3
    x = torch.ones(cols, len(nans), cols, dtype=dtype)
    for place in range(cols):
        x[place, :, place] = nans
    return x.view(-1, cols)


@needs_emulation
@pytest.mark.parametrize("dtype", NOMINALS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_nan_has_one_pattern(function, dtype):
    """Whatever NaN comes in, the canonical one comes out, in each dtype: on every backend, also
    where a device's instructions make another one of it.
    """
    x = rows_with_every_nan(function, dtype)
    assert x.isnan().any(dim=1).all()
    devices = {"instructions": CudaBackend(Emulator(mistake=OF_INSTRUCTIONS))}
    made = {name: make() for name, make in BACKENDS.items()} | devices
    for name, backend in made.items():
        for round_to in NOMINALS:
            y = run(backend, FusedOp(function), x, round_to)
            assert y.isnan().any(dim=1).all()
            expected = CANONICAL[round_to]
            bits = y.view(torch.int32 if round_to == torch.float32 else torch.int16)
            found = set(bits[y.isnan()].tolist())
            assert found == {expected}, f"{name}, {round_to}: {sorted(map(hex, found))}"
        if function in NORMS:
            statistics = {"rstd": torch.empty(len(x))}
            if function == "layernorm":
                statistics["mean"] = torch.empty(len(x))
            run(backend, FusedOp(function), x, torch.float32, **statistics)
            for values in statistics.values():
                assert set(values.view(torch.int32).tolist()) == {CANONICAL[torch.float32]}, name


@needs_emulation
@pytest.mark.parametrize("function", [*ELEMENT_WISE, "swiglu", *NORMS])
def test_compiled_backends_give_the_same_bits(function):
    """CUDA's kernels and the CPU's loops, whatever the instruction set and the order of threads."""
    g = torch.Generator().manual_seed(6)
    for cols in (5, 130, 1000):
        x = torch.randn(9, cols * (2 if function == "swiglu" else 1), generator=g) * 4
        made = {
            name: run(make(), FusedOp(function), x, torch.float32)
            for name, make in BACKENDS.items()
            if name != "reference"
        }
        first = next(iter(made.values()))
        for name, result in made.items():
            assert_same_bytes(result, first, f"{function} of {cols} columns on {name}")
