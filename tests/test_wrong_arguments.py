"""Every public call with each of its arguments replaced by what it cannot use: it ends in an error
of zerocast's that says what is required, or does what can only have been meant.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import zerocast
from zerocast.comm import SingleRank
from zerocast.errors import ZerocastError
from zerocast.nn.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput

functional = zerocast.nn.functional
SHAPE = (32, 64)


class Raises:
    """An iterable whose first item is an error."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()
        raise RuntimeError("from the caller's own generator")


def wrong_values() -> dict[str, Any]:
    """What an argument is replaced by, made anew for every call."""
    x = torch.ones(SHAPE, dtype=torch.float32)
    return {
        "None": None, "True": True, "5": 5, "0": 0, "-1": -1, "2**64": 2**64, "nan": float("nan"),
        "text": "x", "surrogate": "\ud800", "bytes": b"", "list": [], "dict": {}, "tuple": (5, -1),
        "list of None": [None], "object": object(), "class": torch.nn.Linear, "instance": int,
        "lambda": lambda: None, "lambda of any": lambda *_, **__: "x", "generator": iter(()),
        "huge shape": (2**40, 2**40), "dtype": torch.complex64, "device": torch.device("meta"),
        "module": torch.nn.Linear(3, 3), "FP64": x.double(), "BF16": x.bfloat16(), "bool": x > 0,
        "complex": x.to(torch.complex64), "int64": x.long(), "scalar": x[0, 0], "vector": x[0],
        "empty": x[:0], "strided": x.t(), "meta": x.to("meta"), "sparse": x.to_sparse(),
        "negative bit": torch._neg_view(x), "overlapping": x[:1].expand(SHAPE),
        "quantized": zerocast.quantize(x, zerocast.Float8CurrentScaling()),
        "raises": Raises(), "recipe": zerocast.NVFP4BlockScaling(),
        "params": zerocast.QParams(stochastic_rounding=True),
    }  # fmt: skip


def entered(context: AbstractContextManager[Any]) -> None:
    """A region is checked on entering it, at the latest."""
    with context:
        pass


def linear(**given: Any) -> Any:
    """A converted model, for what takes a model."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    zerocast.nn.convert(model, zerocast.Float8CurrentScaling(), **given)
    return model


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones."""
    return torch.ones(shape or SHAPE, dtype=dtype)


def weight() -> zerocast.QuantizedTensor:
    """A weight in FP8."""
    return zerocast.quantize(x(), zerocast.Float8CurrentScaling())


def quantizer() -> zerocast.Quantizer:
    """A quantizer to FP8."""
    return zerocast.Quantizer(zerocast.Float8CurrentScaling())


def state() -> zerocast.RecipeState:
    """The state of a layer's forward."""
    return zerocast.RecipeState.create(zerocast.DelayedScaling(), "forward", 3)


def zero(**given: Any) -> Any:
    """An optimizer of a small model."""
    given = {"params": list(linear().parameters()), "lr": 0.1} | given
    return zerocast.optim.ZeroOptimizer(**given)


RECIPE_TYPES = (
    zerocast.DelayedScaling,
    zerocast.Float8BlockScaling,
    zerocast.Float8CurrentScaling,
    zerocast.Float8RowwiseScaling,
    zerocast.MXFP8BlockScaling,
    zerocast.NVFP4BlockScaling,
)


def recipe_fields(kind: type) -> dict[str, Any]:
    """Its parameters, by their defaults."""
    return {name: p.default for name, p in inspect.signature(kind).parameters.items()}


def use(recipe: zerocast.Recipe) -> None:
    """A recipe that is accepted can be used."""
    zerocast.quantize(x(128, 128), recipe)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "quantize": (
        zerocast.quantize,
        lambda: {
            "tensor": x(), "recipe": "nvfp4", "dtype": torch.bfloat16, "columnwise": True,
            "name": "w", "tp_shard": None,
        },
    ),
    "empty": (
        zerocast.empty,
        lambda: {
            "shape": SHAPE, "recipe": "nvfp4", "dtype": torch.bfloat16, "device": "cpu",
            "columnwise": True, "name": "w", "tp_shard": None,
        },
    ),
    "replace_raw_data": (
        zerocast.replace_raw_data,
        lambda: {
            "tensor": weight(), "new_raw_data": x(dtype=torch.uint8), "new_columnwise_data": None,
        },
    ),
    "Quantizer": (
        zerocast.Quantizer,
        lambda: {"recipe": "mxfp8", "rowwise": True, "columnwise": True, "slot": None},
    ),
    "Quantizer.make_empty": (
        lambda **given: quantizer().make_empty(**given),
        lambda: {"shape": SHAPE, "dtype": torch.float32, "device": "cpu"},
    ),
    "Quantizer.quantize": (
        lambda **given: quantizer().quantize(**given), lambda: {"tensor": x(), "out": None},
    ),
    "Quantizer.set_usage": (
        lambda **given: quantizer().set_usage(**given),
        lambda: {"rowwise": True, "columnwise": True},
    ),
    "RecipeState.create": (
        zerocast.RecipeState.create,
        lambda: {
            "recipe": zerocast.DelayedScaling(), "mode": "forward", "num_quantizers": 3,
            "device": "cpu", "name": "layer",
        },
    ),
    "RecipeState.create, stochastic": (
        zerocast.RecipeState.create,
        lambda: {
            "recipe": zerocast.NVFP4BlockScaling(), "mode": "backward", "num_quantizers": 3,
            "device": "cpu", "name": "layer",
        },
    ),
    "RecipeState.load_state_dict": (
        lambda **given: state().load_state_dict(**given),
        lambda: {"state_dict": state().state_dict()},
    ),
    **{
        kind.__name__: (
            lambda kind=kind, **given: use(kind(**given)), lambda kind=kind: recipe_fields(kind),
        )
        for kind in RECIPE_TYPES
    },
    "Recipe.for_role": (zerocast.NVFP4BlockScaling().for_role, lambda: {"role": "input"}),
    "Recipe.check_shape": (zerocast.NVFP4BlockScaling().check_shape, lambda: {"shape": SHAPE}),
    "QParams": (
        lambda **given: use(
            zerocast.NVFP4BlockScaling(fp4_quant_fwd_weight=zerocast.QParams(**given))
        ),
        lambda: recipe_fields(zerocast.QParams),
    ),
    "Format": (
        lambda **given: use(zerocast.Float8CurrentScaling(**given)), lambda: {"fp8_format": "e4m3"},
    ),
    "TensorParallelShard": (
        zerocast.TensorParallelShard,
        lambda: {
            "whole": torch.Size((64, 64)), "dim": 0, "start": 0, "size": 32, "comm": SingleRank(),
        },
    ),
    "model_init": (
        lambda **given: entered(zerocast.model_init(**given)),
        lambda: {"enabled": True, "recipe": "mxfp8", "preserve_high_precision_init_val": True},
    ),
    "autocast": (
        lambda **given: entered(zerocast.autocast(**given)),
        lambda: {
            "enabled": True, "calibrating": False, "recipe": "delayed",
            "amax_reduction_group": SingleRank(),
        },
    ),
    "use_backend": (
        lambda **given: entered(zerocast.use_backend(**given)), lambda: {"backend": "reference"},
    ),
    "reduce_amaxes": (zerocast.reduce_amaxes, lambda: {"amax_reduction_group": SingleRank()}),
    "checkpoint_contexts": (zerocast.checkpoint_contexts, dict),
    "is_fp8_available": (zerocast.is_fp8_available, lambda: {"return_reason": True}),
    "is_fp8_block_scaling_available": (
        zerocast.is_fp8_block_scaling_available, lambda: {"return_reason": True},
    ),
    "is_mxfp8_available": (zerocast.is_mxfp8_available, lambda: {"return_reason": True}),
    "is_nvfp4_available": (zerocast.is_nvfp4_available, lambda: {"return_reason": True}),
    "convert": (
        zerocast.nn.convert,
        lambda: {
            "model": torch.nn.Sequential(torch.nn.Linear(64, 32)), "recipe": "mxfp8",
            "weights": "quantized", "filter_fqns": (), "amax_groups": (),
            "low_bit_all_gather": True,
        },
    ),
    "convert, masters": (
        zerocast.nn.convert,
        lambda: {
            "model": torch.nn.Sequential(torch.nn.Linear(64, 32)), "recipe": "mxfp8",
            "weights": "master", "filter_fqns": (), "amax_groups": (), "low_bit_all_gather": True,
        },
    ),
    "explain": (
        zerocast.nn.explain,
        lambda: {
            "model": linear(), "recipe": "mxfp8", "tokens": 64, "device": "cpu",
            "dtype": torch.bfloat16,
        },
    ),
    "statistics": (
        lambda **given: entered(zerocast.nn.statistics(**given)), lambda: {"model": linear()},
    ),
    "swizzle": (zerocast.nn.swizzle, lambda: {"scales": x(128, 4, dtype=torch.uint8)}),
    "unswizzle": (
        zerocast.nn.unswizzle, lambda: {"scales": x(512, dtype=torch.uint8), "shape": (128, 4)},
    ),
    "Linear": (
        zerocast.nn.Linear,
        lambda: {
            "in_features": 64, "out_features": 32, "bias": True, "device": "cpu",
            "dtype": torch.bfloat16, "recipe": "mxfp8", "columnwise": True, "name": "layer",
        },
    ),
    "LayerNorm": (
        zerocast.nn.LayerNorm,
        lambda: {
            "normalized_shape": 64, "eps": 1e-5, "elementwise_affine": True, "bias": True,
            "device": "cpu", "dtype": torch.bfloat16, "zero_centered_gamma": False,
        },
    ),
    "RMSNorm": (
        zerocast.nn.RMSNorm,
        lambda: {
            "normalized_shape": 64, "eps": 1e-5, "elementwise_affine": True, "device": "cpu",
            "dtype": torch.bfloat16, "zero_centered_gamma": False,
        },
    ),
    "LayerNormLinear": (
        zerocast.nn.LayerNormLinear,
        lambda: {
            "in_features": 64, "out_features": 32, "eps": 1e-5, "bias": True,
            "normalization": "RMSNorm", "return_layernorm_output": False,
            "zero_centered_gamma": False, "params_dtype": torch.bfloat16, "device": "cpu",
            "recipe": "mxfp8", "columnwise": True, "name": "layer",
        },
    ),
    "LayerNormMLP": (
        zerocast.nn.LayerNormMLP,
        lambda: {
            "hidden_size": 64, "ffn_hidden_size": 32, "eps": 1e-5, "bias": True,
            "normalization": "RMSNorm", "activation": "swiglu", "return_layernorm_output": False,
            "zero_centered_gamma": False, "params_dtype": torch.bfloat16, "device": "cpu",
            "recipe": "mxfp8", "columnwise": True, "name": "layer",
        },
    ),
    "layernorm": (
        functional.layernorm,
        lambda: {
            "x": x(), "weight": x(64), "bias": x(64), "eps": 1e-5, "quantizer": quantizer(),
            "zero_centered_gamma": False, "output": False,
        },
    ),
    "gelu": (
        functional.gelu,
        lambda: {"x": x(), "quantizer": quantizer(), "approximate": "tanh", "output": True},
    ),
    "linear": (functional.linear, lambda: {"x": x(), "weight": weight(), "bias": x(32)}),
    "report": (zerocast.sharded.report, lambda: {"model": linear(weights="master")}),
    "LowBitAllGather": (
        zerocast.sharded.LowBitAllGather,
        lambda: {
            "shape": SHAPE, "recipe": zerocast.MXFP8BlockScaling(), "name": "w", "state": None,
        },
    ),
    "MasterWeight": (
        zerocast.sharded.MasterWeight,
        lambda: {
            "value": x(),
            "gather": zerocast.sharded.LowBitAllGather(SHAPE, zerocast.MXFP8BlockScaling(), "w"),
        },
    ),
    "ZeroOptimizer": (
        zero,
        lambda: {
            "params": list(linear().parameters()), "optimizer_class": torch.optim.SGD,
            "group": SingleRank(), "overlap_all_gather": False, "bucket_size": 64, "lr": 0.1,
        },
    ),
    "ZeroOptimizer.load_state_dict": (
        lambda **given: zero().load_state_dict(**given),
        lambda: {"state_dict": zero().state_dict()},
    ),
    "Float8ColwiseParallel": (
        Float8ColwiseParallel,
        lambda: {"input_layouts": Shard(0), "output_layouts": None, "use_local_output": True},
    ),
    "PrepareFloat8ModuleInput": (
        PrepareFloat8ModuleInput,
        lambda: {
            "input_layouts": Shard(0), "desired_input_layouts": Replicate(),
            "input_kwarg_layouts": None,
            "desired_input_kwarg_layouts": None, "use_local_output": False,
            "fwd_config_submodule_fqn": None,
        },
    ),
}  # fmt: skip


def outcomes(name: str) -> dict[str, str]:
    """The foreign error that each replaced argument of a call ends in."""
    call, arguments = CALLS[name]
    found = {}
    for argument in arguments():
        for kind in wrong_values():
            value = wrong_values()[kind]
            if argument in ("amax_compute_algo", "filter_fqns") and callable(value):
                continue  # it is called, and what it raises is its author's
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**arguments() | {argument: value})
            except ZerocastError:
                pass
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else ""
                found[f"{argument}={kind}"] = f"{type(error).__name__}: {text[:90]}"
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_ends_in_an_error_that_says_so(name: str) -> None:
    """Whatever one argument is replaced by, what is raised is an error of zerocast's."""
    call, arguments = CALLS[name]
    call(**arguments())
    found = outcomes(name)
    assert not found, "\n".join(f"{where}: {error}" for where, error in found.items())
