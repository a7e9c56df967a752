"""What the layers' package refuses: by whom it is called, and what the error says. Nothing is
changed then.
"""

from functools import partial

import pytest
import torch
from torch import nn

import zerocast
from tests.support.fused_ops import quantizer_of
from tests.support.models import Attention
from tests.support.recipes import RECIPES
from zerocast.errors import InputError
from zerocast.nn import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    convert,
    coverage,
    explain,
    swizzle,
    unswizzle,
)
from zerocast.nn import functional as F
from zerocast.nn.autocast import autocast, model_init
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import RecipeState
from zerocast.numerics import FusedOp
from zerocast.recipes import DelayedScaling, Float8CurrentScaling

NVFP4, CURRENT, MXFP8 = RECIPES["nvfp4"], RECIPES["current"], RECIPES["mxfp8"]


def named() -> nn.ModuleDict:
    """What patterns of names can match."""
    blocks = (nn.ModuleDict({"experts": nn.Linear(32, 32), "norm": nn.LayerNorm(32)}) for _ in "ab")
    return nn.ModuleDict({"embed": nn.Embedding(40, 32), "blocks": nn.ModuleList(blocks)})


def converting(model=None, recipe=NVFP4, **options) -> None:
    """Convert a model, whose parameters are the same ones after the error."""
    model = nn.Sequential(nn.Linear(16, 16)) if model is None else model
    before = [*model.parameters()] if isinstance(model, nn.Module) else []
    try:
        convert(model, recipe, **options)
    finally:
        assert not before or all(a is b for a, b in zip(before, model.parameters(), strict=True))


def inside(call, *arguments, recipe=CURRENT) -> None:
    """Call in a region, which is left again."""
    with autocast(recipe=recipe):
        call(*arguments)


def entered(make, **options) -> None:
    """What is no region is not active, either."""
    try:
        make(**options).__enter__()
    finally:
        assert not zerocast.nn.regions.current().enabled


def apply_relu(**options) -> None:
    """To [2, 4]."""
    F.apply_fused(FusedOp("relu"), torch.zeros(2, 4), **options)


including = partial(converting, named())
attention = Attention(32, 32, output=True)
linear = partial(Linear, out_features=8)
create = RecipeState.create
two_by = partial(torch.zeros, 2)

REFUSED = {
    "convert": [
        (partial(converting, "gpt"), r"model must be a torch\.nn\.Module, got 'gpt'"),
        (partial(converting, recipe="nvfp5"), "recipe must be a zerocast recipe"),
        (partial(converting, weights="fp8"), "weights must be 'quantized'"),
        (partial(converting, filter_fqns="head"),
         r"a sequence of strings such as \['head'\], .*got 'head'"),
        (partial(converting, filter_fqns=[1]), r"got \[1\]"),
        (partial(converting, filter_fqns=1), r"or a function of a layer and its name .*, got 1\."),
        (partial(converting, filter_fqns=["hed"]),
         r"got 'hed', which is in none of them; correct it"),
        (lambda: converting(nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(16)), CURRENT),
         r"got 1\.weight of a lazy module"),
        (partial(converting, attention, weights="high_precision",
                 amax_groups=[["*wq", "*wk", "*wv"]]), "amax_groups needs weights that hold codes"),
        (partial(converting, attention, amax_groups=[["*.attention.wq"]]),
         r"matches none of wq, wk, wv, wo\."),
        (partial(including, include=["blocks.*.expert"]),
         r"got 'blocks\.\*\.expert', which matches none; .* Did you mean 'blocks\.\*\.experts"),
        (partial(including, include=["blocks.0.norm"]), r"got 'blocks\.0\.norm', which matches"),
        (partial(including, include="embed"), "include must be a list of names of modules such as"),
        (partial(including, include=[3]), "include must be a list of names of modules such as"),
        (partial(including, include=["embed"], weights="high_precision"),
         "got weights='high_precision', under which only linear layers quantize, one by one"),
        (partial(including, strict=1), "strict must be True or False"),
        (partial(coverage, "gpt"), r"model must be a torch\.nn\.Module, got 'gpt'"),
        (partial(explain, nn.Linear(8, 8), "mxfp9"), "recipe must be a zerocast recipe"),
        (partial(explain, nn.Linear(8, 8), tokens=0), "tokens must be at least 1, got 0"),
    ],
    "layers": [
        (partial(linear, in_features=10, recipe=NVFP4), r"multiple of 16 .* got K = 10"),
        (partial(linear, in_features=16, recipe=NVFP4, dtype=torch.float64), r"got torch\.float64"),
        (partial(linear, in_features=16, recipe="nvfp5"), "recipe must be a zerocast recipe"),
        *((partial(kind, 32, 32, normalization="BatchNorm"), "'RMSNorm', got 'BatchNorm'")
          for kind in (LayerNormLinear, LayerNormMLP)),
        (partial(LayerNormMLP, 32, 32, activation="tanh"), "must be .*'swiglu'.* got 'tanh'"),
        (lambda: inside(Linear(32, 64), torch.randn(4, 32).bfloat16()),
         r"one dtype, got torch\.bfloat16"),
        (lambda: inside(Linear(40, 32), torch.randn(2, 40), recipe=NVFP4),
         "the layer's input cannot be quantized"),
        (lambda: inside(Linear(32, 10), torch.randn(2, 32), recipe=MXFP8),
         r"gradient of the output cannot be quantized: .* got\s+K = 10"),
    ],
    "regions": [
        *((partial(entered, make, recipe="fp8"), "recipe must be a zerocast recipe .*got 'fp8'")
          for make in (autocast, model_init)),
        (partial(entered, autocast, amax_reduction_group="all"), "a group must be"),
        (partial(create, "fp8", "forward"), "'nvfp4'.*, got 'fp8'"),
        (partial(create, DelayedScaling(), "both"), "'forward' or 'backward', got 'both'"),
        (partial(create, DelayedScaling(), "forward", -1), "got -1"),
    ],
    "quantizers": [
        *((partial(getattr(Quantizer(recipe), act), x), words)
          for act in ("quantize", "calibrate")
          for recipe, x, words in ((CURRENT, torch.arange(4), r"torch\.float32.*int64"),
                                   (MXFP8, torch.zeros(4, 40), "multiple of 32"))),
        (partial(Quantizer, Float8CurrentScaling(), rowwise=False, columnwise=False),
         "rowwise=False and"),
        (partial(Quantizer, DelayedScaling()), r"RecipeState\.create"),
    ],
    "functions": [
        (partial(F.gelu, two_by(2, dtype=torch.int32)), "source of gelu must be.*int32"),
        (partial(F.gelu, torch.zeros(())), r"at least one element, got shape \(\)"),
        (partial(F.gelu, two_by(0)), r"at least one element, got shape \(2, 0\)"),
        (partial(F.swiglu, two_by(5)), r"two halves, 2 K, got shape \(2, 5\)"),
        (partial(F.gelu, two_by(2), approximate="fast"), "'none' or 'tanh', got 'fast'"),
        (partial(F.layernorm, two_by(4), torch.ones(3)), r"of shape \(4,\).*\(3,\)"),
        (partial(F.layernorm, two_by(4), None, torch.ones(4).int()), "bias.*int32"),
        (partial(apply_relu, weight=torch.ones(4)), "relu takes no weight, got one; leave it out"),
        (partial(apply_relu, dtype=torch.int8),
         r"the result of relu must be of torch\.float32.*int8"),
        (lambda: F.silu(two_by(40), quantizer_of(MXFP8)), "multiple of 32"),
        (lambda: apply_relu(quantizer=quantizer_of(CURRENT), out=quantizer_of(CURRENT).make_empty(
            (4, 2), dtype=torch.float32)), r"out must have shape \(2, 4\)"),
    ],
    "swizzle": [
        *((partial(swizzle, torch.zeros(shape)), rf"whole tiles.*{words}")
          for shape, words in (((127, 4), r"\(127, 4\)"), ((128, 3), r"\(128, 3\)"),
                               ((128,), r"\(128,\)"), ((0, 2), r"\(0, 2\)"))),
        (partial(unswizzle, torch.zeros(512), (128, 8)),
         r"into \(128, 8\) needs 1024 scales, got 512"),
    ],
}  # fmt: skip
ROWS = [
    pytest.param(call, words, id=f"{part} {i}")
    for part, rows in REFUSED.items()
    for i, (call, words) in enumerate(rows)
]


@pytest.mark.parametrize(("call", "words"), ROWS)
def test_what_cannot_be_right_is_refused(call, words):
    """With what is required and what was given."""
    with pytest.raises(InputError, match=f"(?s){words}"):
        call()
