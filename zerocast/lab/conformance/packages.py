"""Packages: the functions of installed packages that are applied to the inputs of packs.

Each is a table of calls; nothing in a package is replaced. If a package has the formula of a
dialect but not its names, its tensors get the names of the dialect here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import SimpleNamespace
from typing import Any

import torch

from zerocast import InputError, QuantizedTensor, empty, quantize
from zerocast.arguments import did_you_mean
from zerocast.export import DIALECTS, Dialect
from zerocast.lab.conformance.case_packs import blocks_of
from zerocast.lab.conformance.causes import block_amaxes
from zerocast.lab.threaded_cast import cast_on_threads

Stored = Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]
Calls = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Package:
    """An implementation that is compared with packs.

    Attributes:
        name: its name; if it is a distribution, its version is reported.
        encodes: by the name of a format, a function: FP32 values [n] -> uint8 codes [n].
        decodes: by the name of a format, a function: uint8 codes [n] -> FP32 values [n].
        writes: by the name of a dialect, a function: a weight [M, K], FP32 with values of BF16 ->
            the tensors of the dialect by name, or a tuple in its order. It raises for weights that
            the package does not quantize.
        gathers: by the name of a dialect, a function: such a weight, and the flat indices where the
            shards of ranks begin and the last ends -> the gathered tensors of each rank.
    """

    name: str
    encodes: Calls = field(default_factory=dict)
    decodes: Calls = field(default_factory=dict)
    writes: Calls = field(default_factory=dict)
    gathers: Calls = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, and the version if there is one."""
        try:
            return f"{self.name} {version(self.name)}"
        except PackageNotFoundError:
            return self.name


def package_of(name: str) -> Package:
    """Return the package ``name``: one of :data:`PACKAGES`, or your :class:`Package`,
    ``module:attribute``.

    Raises:
        InputError: if there is no such package, or it is not installed.
    """
    if name not in PACKAGES and ":" not in name:
        known = ", ".join(PACKAGES)
        needed = "module:attribute that is a zerocast.lab.conformance.Package"
        near = did_you_mean(name, PACKAGES)
        raise InputError(f"PACKAGE must be one of {known}, or {needed}, got {name!r}.{near}")
    try:
        found = PACKAGES[name]() if name in PACKAGES else pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        message = f"{name} cannot be measured: {error}; install it, and try again."
        raise InputError(message) from error
    if not isinstance(found, Package):
        raise InputError(f"{name} must be a zerocast.lab.conformance.Package, got {found!r}.")
    return found


def _each(call: Callable[..., Any], first: Mapping[str, Any]) -> Calls:
    """Return ``call`` with its first argument bound to each value, by name."""
    return {name: partial(call, each) for name, each in first.items()}


def _zerocast() -> Package:
    def write(dialect: Dialect, x: torch.Tensor) -> Stored:
        whole = quantize(x, dialect.recipe, dtype=torch.bfloat16, columnwise=False)
        return dialect.encode(whole.quantized_storage)

    def gather(dialect: Dialect, x: torch.Tensor, cuts: tuple[int, ...]) -> list[Stored]:
        def make() -> QuantizedTensor:
            return empty(x.shape, dialect.recipe, dtype=torch.bfloat16, columnwise=False)

        return [dialect.encode(w.quantized_storage) for w in cast_on_threads(make, x, cuts)]

    return Package(name="zerocast", writes=_each(write, DIALECTS), gathers=_each(gather, DIALECTS))


def _torch() -> Package:
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu}
    encodes = _each(lambda dtype, x: x.to(dtype).view(torch.uint8), dtypes)
    decodes = _each(lambda dtype, codes: codes.view(dtype).float(), dtypes)
    return Package(name="torch", encodes=encodes, decodes=decodes)


def _ml_dtypes() -> Package:
    import ml_dtypes
    import numpy as np

    def encode(dtype: Any, x: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(x.numpy().astype(dtype).view(np.uint8))

    def decode(dtype: Any, codes: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))

    dtypes = {
        "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
        "e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu,
    }  # fmt: skip
    return Package(name="ml_dtypes", encodes=_each(encode, dtypes), decodes=_each(decode, dtypes))


def _compressed_tensors() -> Package:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def write(dialect: Dialect, x: torch.Tensor) -> Stored:
        state = {"weight": x}
        config = QuantizationConfig.model_validate(dialect.quantization_config([]))
        scheme = config.config_groups["group_0"]
        if dialect.tensor_scale is not None:
            state["weight_global_scale"] = generate_gparam(x.amin(), x.amax())
        # Observers of its users give minima and maxima; scales are symmetric, so amaxes suffice.
        amax = block_amaxes(x, blocks_of(dialect.name, x.shape))
        state["weight_scale"], _ = calculate_qparams(
            -amax, amax, scheme.weights, state.get("weight_global_scale")
        )
        return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)

    own = {
        name: each
        for name, each in DIALECTS.items()
        if name.startswith("compressed-tensors/") and not name.endswith("-vllm")
    }
    return Package(name="compressed-tensors", writes=_each(write, own))


def _transformers() -> Package:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    def float8(x: torch.Tensor, **options: Any) -> Stored:
        quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(**options))
        made = Fp8Quantize(quantizer).convert({"weight": x})
        if len(made) == 1:
            raise ValueError("it leaves shapes that are no multiple of the block unquantized")
        return tuple(made.values())

    calls: Calls = {"deepseek/fp8": float8, "deepseek/v4": partial(float8, scale_fmt="ue8m0")}
    return Package(name="transformers", writes=calls)


def _torchao() -> Package:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor

    def float8(granularity: Any, x: torch.Tensor) -> Stored:
        made = Float8Tensor.from_hp(x, granularity=granularity)
        return made.qdata, made.scale

    def nvfp4(x: torch.Tensor) -> Stored:
        tensor_scale = per_tensor_amax_to_scale(x.abs().max())
        made = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale)
        return made.qdata, made.scale, tensor_scale

    float4 = torch.float4_e2m1fn_x2
    calls: Calls = {
        "compressed-tensors/fp8-tensor": partial(float8, PerTensor()),
        "compressed-tensors/fp8-channel": partial(float8, PerRow()),
        "compressed-tensors/fp8-block": partial(float8, PerBlock([128, 128])),
        "compressed-tensors/mxfp4": lambda x: to_mx(x, float4, 32, Mode.EVEN)[::-1],
        "modelopt/nvfp4": nvfp4,
        "sglang/mxfp8": lambda x: to_mx(x, torch.float8_e4m3fn, 32, Mode.RCEIL)[::-1],
        "gpt-oss/mxfp4": lambda x: to_mx(x, float4, 32, Mode.RCEIL)[::-1],
    }
    fp4 = {"encodes": {"e2m1": f32_to_f4_unpacked}, "decodes": {"e2m1": f4_unpacked_to_f32}}
    return Package(name="torchao", writes=calls, **fp4)


def _modelopt() -> Package:
    from modelopt.torch.quantization import qtensor

    def write(tensor: Any, x: torch.Tensor, **options: Any) -> Stored:
        made, *scales = tensor.quantize(x, **options)
        return made._quantized_data, *scales

    float8, blocks = qtensor.FP8QTensor, {-1: 128, -2: 128}
    calls: Calls = {
        "modelopt/fp8": partial(write, float8),
        "compressed-tensors/fp8-block": partial(write, float8, block_sizes=blocks),
        "modelopt/nvfp4": partial(write, qtensor.NVFP4QTensor, block_size=16),
        "modelopt/mxfp8": partial(write, qtensor.MXFP8QTensor),
        "gpt-oss/mxfp4": partial(write, qtensor.MXFP4QTensor, block_size=32),
    }
    return Package(name="nvidia-modelopt", writes=calls)


def _vllm() -> Package:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with set_current_vllm_config(VllmConfig()):
        # vLLM's statement of its kernel in torch, because its builds for CPUs have no such kernel.
        by_scale = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR).forward_native

    def tensor(x: torch.Tensor) -> Stored:
        amax = weight_amax(x).float().reshape(1)
        made: Stored = by_scale(x, amax / amax.new_tensor(448))
        return made

    def channel(x: torch.Tensor) -> Stored:
        method: Any = Fp8PtpcOnlineLinearMethod.__new__(Fp8PtpcOnlineLinearMethod)  # no kernel
        method.requantization_source, method.requantization_source_parameters = None, {}
        method.fp8_linear = SimpleNamespace(
            process_weights_after_loading=lambda layer: None, input_quant_key=lambda: None
        )
        layer: Any = torch.nn.Linear(x.shape[1], x.shape[0], bias=False, device="meta")
        layer.weight, layer.tp_size = torch.nn.Parameter(x, requires_grad=False), 1
        method.process_weights_after_loading(layer)
        return layer.weight.t(), layer.weight_scale

    quantizers: dict[str, Callable[[torch.Tensor], Stored]] = {
        "compressed-tensors/fp8-tensor-vllm": tensor,
        "compressed-tensors/fp8-channel-vllm": channel,
        "deepseek/fp8-vllm": per_block_cast_to_fp8,
        "modelopt/mxfp8": mxfp8_e4m3_quantize,
    }
    calls = _each(lambda quantize, x: quantize(x.bfloat16()), quantizers)
    (name,) = packages_distributions()["vllm"]
    return Package(name=name, writes=calls)


def _llm_compressor() -> Package:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    def write(preset: str, x: torch.Tensor) -> Stored:
        groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
        converter = ModelFreePtqConverter(QuantizationConfig(config_groups=groups))
        made = converter.process({"X.weight": x.bfloat16()})  # the dtype of checkpoints
        return {
            name.removeprefix("X."): tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            for name, tensor in made.items()
        }

    presets = {
        "compressed-tensors/nvfp4": "NVFP4A16",
        "compressed-tensors/fp8-tensor": "FP8",
        "compressed-tensors/fp8-channel": "FP8_DYNAMIC",
        "compressed-tensors/fp8-block": "FP8_BLOCK",
        "compressed-tensors/mxfp8": "MXFP8A16",
        "compressed-tensors/mxfp4": "MXFP4A16",
    }
    return Package(name="llmcompressor", writes=_each(write, presets))


def _optimum_quanto() -> Package:
    from optimum.quanto import AbsmaxOptimizer, qfloat8_e4m3fn, quantize_weight

    def channel(x: torch.Tensor) -> Stored:
        scale = AbsmaxOptimizer()(x, qfloat8_e4m3fn, axis=0)
        made = quantize_weight(x, qfloat8_e4m3fn, axis=0, scale=scale)
        return made._data, scale.reshape(-1, 1)

    return Package(name="optimum-quanto", writes={"compressed-tensors/fp8-channel": channel})


def _auto_round() -> Package:
    from auto_round.data_type import QUANT_FUNC_WITH_DTYPE
    from auto_round.data_type.nvfp import calculate_gparam
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    def write(data_type: str, bits: int, group: int, x: torch.Tensor) -> Stored:
        layer: Any = torch.nn.Linear(x.shape[1], x.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(x, requires_grad=False)
        whole = {"global_scale": calculate_gparam(x, group)} if data_type == "nv_fp" else {}
        quantize = QUANT_FUNC_WITH_DTYPE[f"{data_type}{bits}"]
        _, scale, _ = quantize(x, bits=bits, group_size=group, data_type=data_type, **whole)
        shape = x.shape[1], x.shape[0]
        made = QuantLinear(bits, group, *shape, False, data_type=data_type, act_bits=16)
        made.pack(layer, scale, **whole)
        return dict(made.named_buffers()) | {"weight": getattr(made, "weight", x)}

    calls: Calls = {
        "compressed-tensors/nvfp4": partial(write, "nv_fp", 4, 16),
        "compressed-tensors/mxfp4": partial(write, "mx_fp", 4, 32),
        "compressed-tensors/mxfp8": partial(write, "mx_fp", 8, 32),
    }
    return Package(name="auto-round", writes=calls)


def _fouroversix() -> Package:
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, ScaleRule

    def write(kind: str, x: torch.Tensor) -> Stored:
        rule = {"scale_rule": ScaleRule.static_6, "use_blackwell_scale_layout": False}
        codes, scales, amax = quantize_to_fp4(x, fp4_format=DataType(kind), **rule)
        # It keeps the amax, which the dialect has as a scale; it computes by 2688 / amax.
        scale = torch.where(amax == 0, 1.0, amax.new_tensor(2688) / amax)
        return codes, scales.reshape(len(x), -1), *(() if kind == "mxfp4" else (scale,))

    kinds = {"compressed-tensors/nvfp4": "nvfp4", "gpt-oss/mxfp4": "mxfp4"}
    return Package(name="fouroversix", writes=_each(write, kinds))


def _gguf() -> Package:
    import gguf

    def mxfp4(x: torch.Tensor) -> Stored:
        kind = gguf.GGMLQuantizationType.MXFP4
        rows = torch.from_numpy(gguf.quantize(x.numpy(), kind)).unflatten(1, (-1, 17))
        # Its scale comes first, and a byte holds elements i and i + 16.
        first, second = rows[..., 1:] & 15, rows[..., 1:] >> 4
        codes = torch.cat((first, second), -1).unflatten(-1, (-1, 2))
        return codes[..., 0] | codes[..., 1] << 4, rows[..., 0]

    return Package(name="gguf", writes={"gpt-oss/mxfp4": mxfp4})


PACKAGES: Mapping[str, Callable[[], Package]] = {
    "zerocast": _zerocast, "torch": _torch, "ml_dtypes": _ml_dtypes,
    "compressed-tensors": _compressed_tensors, "transformers": _transformers,
    "torchao": _torchao, "nvidia-modelopt": _modelopt, "vllm": _vllm,
    "llmcompressor": _llm_compressor, "optimum-quanto": _optimum_quanto,
    "auto-round": _auto_round, "fouroversix": _fouroversix, "gguf": _gguf,
}  # fmt: skip
"""Functions by name that make the known packages, if these are installed."""
