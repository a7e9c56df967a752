"""The dialects by name: the checkpoints that servers load, and their sections of ``config.json``.

The sources of names, shapes and formulas are compressed-tensors 0.20 (``compressors/``), NVIDIA's
ModelOpt 0.47 (``torch/export``), SGLang's MXFP8 (``quantization/fp8.py``), transformers 5.23
(``integrations/mxfp4.py``, ``finegrained_fp8.py``), mlx-lm 0.32 (``utils.py``), and the
checkpoints of DeepSeek-V3, V3.1 and V4 and of gpt-oss.
"""

from dataclasses import replace
from typing import Any

import torch

from zerocast.arguments import did_you_mean
from zerocast.errors import InputError
from zerocast.export.dialects import EXPERTS, HEADS, LINEAR, Dialect, Section
from zerocast.export.mixed import MixedDialect
from zerocast.export.tensor_scale import TensorScale
from zerocast.recipes import (
    NAMED,
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from zerocast.versions import __version__


def _arguments(bits: int, strategy: str, **others: Any) -> Section:
    """Return one ``QuantizationArgs`` of compressed-tensors."""
    given = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return {**given, "dynamic": False, **others}


def _compressed_tensors(fmt: str, **arguments: Section) -> Section:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "format": fmt, **arguments}},
    }


# Readers take the files of no other producer.
_OF_MODELOPT = {
    "quant_method": "modelopt",
    "producer": {"name": "modelopt", "version": f"zerocast {__version__}"},
}


def _modelopt(algorithm: str, **arguments: Section) -> Section:
    given = {name: {"dynamic": False, "type": "float", **a} for name, a in arguments.items()}
    return {
        **_OF_MODELOPT,
        "quant_algo": algorithm,
        "config_groups": {"group_0": {**given, "targets": ["Linear"]}},
    }


def _deepseek(name: str, recipe: Recipe, section: Section | None = None, **fields: Any) -> Dialect:
    """Return a dialect whose section is that of FP8 in blocks, with the items of ``section``.

    Readers do not quantize output layers. vLLM looks for ``expert_dtype`` beside the section, and
    transformers inside.
    """
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Dialect(
        name=f"deepseek/{name}",
        recipe=recipe,
        section={**blocks, "weight_block_size": [128, 128], **(section or {})},
        unquantized_key="modules_to_not_convert",
        reads=(LINEAR, EXPERTS),
        also_in_config={k: v for k, v in (section or {}).items() if k == "expert_dtype"},
        **{"scales": "weight_scale_inv", **fields},
    )


_E8M0 = torch.float8_e8m0fnu
_UE8M0 = {"scale_fmt": "ue8m0"}
_FP8_EXPERTS, _FP4_EXPERTS = {"expert_dtype": "fp8"}, {"expert_dtype": "fp4"}
_PER_TOKEN = _arguments(8, "token", dynamic=True)
_NVFP4 = NVFP4BlockScaling(disable_2d_quantization=True, disable_stochastic_rounding=True)
_OF_MLX = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
_MXFP8, _MXFP4 = MXFP8BlockScaling(), MXFP4BlockScaling()
_ONE_SCALE: Any = NAMED["fp8-tensor"]
_ONE_SCALE_A_ROW: Any = NAMED["fp8-channel"]
_ANY_BLOCK_SCALE: Any = NAMED["fp8-block"]
# The lower bounds of the amax in DeepGEMM, and in the Triton kernels of slime and verl.
_DEEPGEMM = QParams(scale_formula="quotient", amax_epsilon=1e-4)
_TRITON = QParams(scale_formula="inverse first", amax_epsilon=1e-10)
# vLLM 0.32, where it quantizes while it loads: its least scale of a row is 1 / (512 * 448).
_VLLM_TENSOR = QParams(scale_formula="inverse first")
_VLLM_CHANNEL = QParams(scale_formula="quotient", amax_epsilon=1 / 512)
_VLLM_BLOCK = QParams(scale_formula="inverse first", amax_epsilon=1e-4)
_E8M0_SCALES = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_E4M3_SCALES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_GROUPS_OF_16 = {"num_bits": 4, "group_size": 16}
_NVFP4_WEIGHTS = _arguments(4, "tensor_group", group_size=16, **_E4M3_SCALES)

_V4_MXFP4 = _deepseek(
    "v4-mxfp4",
    _MXFP4,
    {**_UE8M0, **_FP4_EXPERTS},
    code_dtype=torch.int8,
    scales="scale",
    scale_dtype=_E8M0,
)

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="compressed-tensors/nvfp4",
            recipe=_NVFP4,
            codes="weight_packed",
            code_dtype=torch.uint8,
            scale_dtype=torch.float8_e4m3fn,
            tensor_scale=TensorScale("weight_global_scale", inverted=True),
            section=_compressed_tensors(
                "nvfp4-pack-quantized",
                weights=_NVFP4_WEIGHTS,
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-tensor",
            recipe=_ONE_SCALE,
            scale_shape=(1,),
            section=_compressed_tensors(
                "float-quantized",
                weights=_arguments(8, "tensor"),
                # For experts with one scale per tensor, vLLM and SGLang accept only such inputs.
                input_activations=_arguments(8, "tensor", dynamic=True),
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-channel",
            recipe=_ONE_SCALE_A_ROW,
            section=_compressed_tensors(
                "float-quantized", weights=_arguments(8, "channel"), input_activations=_PER_TOKEN
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-block",
            recipe=_ANY_BLOCK_SCALE,
            reads=(LINEAR, EXPERTS),  # vLLM splits the scales of an output layer by its rows
            section=_compressed_tensors(
                "float-quantized",
                weights=_arguments(8, "block", block_structure=[128, 128]),
                input_activations=_arguments(8, "group", dynamic=True, group_size=128),
            ),
        ),
        Dialect(
            name="compressed-tensors/mxfp8",
            recipe=_MXFP8,
            scale_dtype=torch.uint8,
            section=_compressed_tensors(
                "mxfp8-quantized",
                weights=_arguments(8, "group", **_E8M0_SCALES),
                input_activations=_arguments(8, "group", **_E8M0_SCALES, dynamic=True),
            ),
        ),
        Dialect(
            name="compressed-tensors/mxfp4",
            recipe=MXFP4BlockScaling(scale_rounding="even"),
            codes="weight_packed",
            code_dtype=torch.uint8,
            scale_dtype=torch.uint8,
            section=_compressed_tensors(
                "mxfp4-pack-quantized", weights=_arguments(4, "group", **_E8M0_SCALES)
            ),
        ),
        Dialect(
            name="modelopt/fp8",
            recipe=_ONE_SCALE,
            scale_shape=(),
            section=_modelopt("FP8", weights={"num_bits": 8}, input_activations={"num_bits": 8}),
            input_scale="input_scale",
        ),
        Dialect(
            name="modelopt/fp8-channel",
            recipe=_ONE_SCALE_A_ROW,
            scale_shape=(-1,),
            section=_modelopt(
                "FP8_PER_CHANNEL_PER_TOKEN",
                weights={"num_bits": 8, "strategy": "channel"},
                input_activations={"num_bits": 8, "strategy": "token", "dynamic": True},
            ),
            reads=(LINEAR, HEADS),  # vLLM expects one scale per expert
        ),
        Dialect(
            name="modelopt/nvfp4",
            recipe=_NVFP4,
            code_dtype=torch.uint8,
            scale_dtype=torch.float8_e4m3fn,
            tensor_scale=TensorScale("weight_scale_2", inverted=False),
            section=_modelopt("W4A16_NVFP4", weights=_GROUPS_OF_16),
        ),
        Dialect(
            name="modelopt/mxfp8",
            recipe=_MXFP8,
            scale_dtype=torch.uint8,
            section=_modelopt(
                "MXFP8",
                weights={"num_bits": 8, "group_size": 32},
                input_activations={"num_bits": 8, "group_size": 32, "dynamic": True},
            ),
        ),
        Dialect(
            name="sglang/mxfp8",
            recipe=_MXFP8,
            scales="weight_scale_inv",
            scale_dtype=torch.uint8,
            section={
                "quant_method": "mxfp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [1, 32],
            },
            unquantized_key="ignored_layers",
            reads=(LINEAR, EXPERTS),
        ),
        Dialect(
            name="gpt-oss/mxfp4",
            recipe=_MXFP4,
            codes="_blocks",
            code_dtype=torch.uint8,
            code_block=16,
            scales="_scales",
            scale_dtype=torch.uint8,
            section={"quant_method": "mxfp4"},
            unquantized_key="modules_to_not_convert",
            reads=(EXPERTS,),
            fuses_experts=True,
        ),
        Dialect(
            name="mlx/nvfp4",
            recipe=replace(_NVFP4, one_level=True),
            code_dtype=torch.uint32,
            scales="scales",
            scale_dtype=torch.uint8,
            section=_OF_MLX,
            unquantized_key="",  # it quantizes the layers that have scales
            reads=(LINEAR, HEADS),  # its checkpoints have experts in one tensor, of other names
            also_in_config={"quantization": _OF_MLX},
        ),
        _deepseek("fp8", _ANY_BLOCK_SCALE),
        _deepseek("fp8-deepgemm", replace(_ANY_BLOCK_SCALE, fp8_quant_fwd_weight=_DEEPGEMM)),
        _deepseek("fp8-triton", replace(_ANY_BLOCK_SCALE, fp8_quant_fwd_weight=_TRITON)),
        _deepseek("fp8-ue8m0", Float8BlockScaling(), _UE8M0),
        # vLLM expects FP32 scales in a checkpoint of DeepSeek-V4 whose experts are FP8.
        _deepseek("v4-fp8", Float8BlockScaling(), {**_UE8M0, **_FP8_EXPERTS}, scales="scale"),
        _V4_MXFP4,
        _deepseek(
            "v4",
            Float8BlockScaling(),
            {**_UE8M0, **_FP4_EXPERTS},
            scales="scale",
            scale_dtype=_E8M0,
            by_name=tuple((like, _V4_MXFP4) for like in ("experts.*", "*.experts.*")),
        ),
    )
}
"""Every dialect that has one format of weights, or chooses by their names, by its name."""


def _w4a4(family: str, part: str, section: Section) -> Dialect:
    own = DIALECTS[f"{family}/nvfp4"]
    return replace(own, name=f"{own.name}-w4a4", section=section, input_scale=part)


W4A4_DIALECTS = {
    dialect.name: dialect
    for dialect in (
        _w4a4(
            "compressed-tensors",
            "input_global_scale",
            _compressed_tensors(
                "nvfp4-pack-quantized",
                weights=_NVFP4_WEIGHTS,
                input_activations={**_NVFP4_WEIGHTS, "dynamic": "local"},
            ),
        ),
        _w4a4(
            "modelopt",
            "input_scale",
            _modelopt("NVFP4", **dict.fromkeys(("weights", "input_activations"), _GROUPS_OF_16)),
        ),
    )
}
"""Every dialect that stores weights as another one does, and whose servers quantize inputs to
NVFP4, too: in blocks of 1x16 as they come, under a static tensor scale. By its name.
"""


def _mixed(family: str, section: Section) -> MixedDialect:
    known = [*DIALECTS.values(), *W4A4_DIALECTS.values()]
    members = tuple(each for each in known if each.name.startswith(f"{family}/"))
    recipe, name = members[0].recipe, f"{family}/mixed"
    return MixedDialect(name=name, recipe=recipe, section=section, members=members)


MIXED_DIALECTS = {
    dialect.name: dialect
    for dialect in (
        _mixed(
            "compressed-tensors",
            {"quant_method": "compressed-tensors", "quantization_status": "compressed"},
        ),
        _mixed("modelopt", {**_OF_MODELOPT, "quant_algo": "MIXED_PRECISION"}),
    )
}
"""Every dialect in which the recipe of a weight decides its format, by its name."""

# Added here, so that they are no members of the mixed dialects.
DIALECTS |= {
    f"{name}-vllm": replace(DIALECTS[name], name=f"{name}-vllm", recipe=recipe)
    for name, recipe in (
        ("compressed-tensors/fp8-tensor", replace(_ONE_SCALE, fp8_quant_fwd_weight=_VLLM_TENSOR)),
        (
            "compressed-tensors/fp8-channel",
            replace(_ONE_SCALE_A_ROW, fp8_quant_fwd_weight=_VLLM_CHANNEL),
        ),
        ("deepseek/fp8", replace(_ANY_BLOCK_SCALE, fp8_quant_fwd_weight=_VLLM_BLOCK)),
    )
}


KNOWN_DIALECTS: dict[str, Dialect] = {**DIALECTS, **W4A4_DIALECTS, **MIXED_DIALECTS}
"""All of these."""


def as_dialect(dialect: Dialect | str) -> Dialect:
    """Return ``dialect``, or the dialect of that name.

    Raises:
        InputError: if there is no such dialect.
    """
    if isinstance(dialect, Dialect):
        return dialect
    if not isinstance(dialect, str) or dialect not in KNOWN_DIALECTS:
        raise InputError(
            f"dialect must be one of {', '.join(KNOWN_DIALECTS)}, or a zerocast.export.Dialect, "
            f"got {dialect!r}.{did_you_mean(dialect, KNOWN_DIALECTS)}"
        )
    return KNOWN_DIALECTS[dialect]
