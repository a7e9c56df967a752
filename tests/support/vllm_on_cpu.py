"""vLLM's models on a CPU, built and filled by vLLM's own configuration, classes and loaders.

On a CPU vLLM has no kernels for most formats. So whatever chooses a kernel returns an object that
does nothing, and nothing is multiplied: tests look at what the kernels would be given.

vLLM has an environment of its own (scripts/serving.sh), and is imported where it is used.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

CHOICES = re.compile(r"init_\w+_linear_kernel|select_\w+_moe_backend")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of the kernel by which vLLM gives fused FP8 weights one scale."""
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@contextmanager
def without_kernels(folder: Path) -> Iterator[None]:
    """The process is the one rank of vLLM, in which its models can be built; it uses ``folder``."""
    import vllm._custom_ops as ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.quantization import get_quantization_config

    for name in ("compressed-tensors", "fp8", "modelopt", "gpt_oss_mxfp4", "online"):
        get_quantization_config(name)
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(ops, "scaled_fp8_quant", to_e4m3)
        for name in [name for name in sys.modules if name.startswith("vllm.model_executor.")]:
            for choice in filter(CHOICES.fullmatch, [*vars(sys.modules[name])]):
                pair = mock.MagicMock(return_value=(mock.MagicMock(), mock.MagicMock()))
                one = mock.MagicMock()
                patch.setattr(sys.modules[name], choice, one if "kernel" in choice else pair)
        init_distributed_environment(1, 0, f"file://{folder / 'ranks'}", 0, "gloo")
        initialize_model_parallel(1)
        yield
        cleanup_dist_env_and_memory()


def load(folder: Path, **options: Any) -> torch.nn.Module:
    """vLLM's model of a checkpoint, its parameters as its loaders have filled them; ``options`` are
    of its engine.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options |= {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    config = EngineArgs(model=str(folder), max_model_len=64, **options).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


# --- by the names of the checkpoint ---


def is_experts(module: torch.nn.Module) -> bool:
    """Whether it holds all experts of a layer."""
    return hasattr(module, "ckpt_gate_proj_name")


def is_fused(experts: torch.nn.Module) -> bool:
    """Whether the checkpoint has all experts in one tensor, too, under names of its own."""
    return "GptOss" in type(experts).__name__


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether vLLM built a linear layer, a head or experts for codes."""
    is_plain = "Unquantized" in type(getattr(module, "quant_method", None)).__name__
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return not is_plain and any("weight_" in name for name in names)


def fused(model: torch.nn.Module, name: str) -> list[str]:
    """The layers of the checkpoint that the layer ``name`` is made of."""
    prefix, dot, last = name.rpartition(".")
    return [prefix + dot + each for each in model.packed_modules_mapping.get(last, [last])]


def split(layer: torch.nn.Module, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Its rows by the ``count`` layers that were fused; of scales of tensors, one each."""
    if count == 1:
        return (tensor,)
    sizes = [1] * count if tensor.shape == (count,) else layer.output_partition_sizes
    return tensor.split([size * len(tensor) // sum(sizes) for size in sizes])


def projections(experts: torch.nn.Module, name: str) -> Iterator[tuple[str, int, str, Any]]:
    """Of each its name in the checkpoint, its expert, and its place: one of the matrices of all
    experts, and which of the two parts of these are its rows.
    """
    for e in range(experts.global_num_experts):
        for own, matrix, part in (("gate", "w13", 0), ("up", "w13", 1), ("down", "w2", ...)):
            yield f"{name}.{e}.{getattr(experts, f'ckpt_{own}_proj_name')}", e, matrix, part


def as_stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of vLLM's model, by the names that the checkpoint has for them, fused ones
    taken apart.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        module_name, _, part = name.rpartition(".")
        module = model.get_submodule(module_name)
        if type(module).__name__ == "Attention":  # scales of the cache of keys and values
            continue
        prefix = module_name.removesuffix(".routed_experts")
        if is_experts(module) and is_fused(module):
            found[f"{prefix}.{part}"] = parameter
        elif is_experts(module):
            for own, e, matrix, half in projections(module, prefix):
                if part.startswith(f"{matrix}_"):
                    value = parameter[e] if half is ... else parameter[e].chunk(2)[half]
                    found[f"{own}.{part.removeprefix(matrix + '_')}"] = value
        else:
            names = fused(model, module_name)
            for own, value in zip(names, split(module, parameter, len(names)), strict=True):
                found[f"{own}.{part}"] = value
    return {name: value.detach() for name, value in found.items()}


# --- what the weights are to vLLM ---


def decode(
    codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """FP32: the values of codes, two in a byte of uint8, under scales of equal parts of them."""
    values = codes.float()
    if codes.dtype == torch.uint8:
        values = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    factors = scales.float() if scales.dtype != torch.uint8 else torch.exp2(scales.float() - 127)
    factors = (factors if factors.dim() > 1 else factors.reshape(-1, 1)) * tensor_scale
    for dim in (-2, -1):
        factors = factors.repeat_interleave(values.shape[dim] // factors.shape[dim], dim)
    return values * factors


def decode_projection(read: dict[str, torch.Tensor], half: Any) -> torch.Tensor:
    """Of one expert's two projections, or the one, the values of ``half``; of two tensor scales
    vLLM takes the first.
    """
    codes = read["weight_packed"] if "weight_packed" in read else read["weight"]
    scales = read["weight_scale_inv"] if "weight_scale_inv" in read else read["weight_scale"]
    tensor_scale: torch.Tensor | float = 1.0
    if "weight_scale_2" in read:
        tensor_scale = read["weight_scale_2"].reshape(-1)[0]
    if "weight_global_scale" in read:
        tensor_scale = 1 / read["weight_global_scale"].reshape(-1)[0]
    values = decode(codes, scales, tensor_scale)
    return values if half is ... else values.chunk(2)[half]


def served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values of the weights that vLLM has in codes, by their names in the checkpoint: of linear
    layers from what it prepares for their kernels, of experts by its rules. The layers are of no
    other use afterwards.
    """
    found: dict[str, torch.Tensor] = {}
    for name, module in [*model.named_modules()]:
        own = {part: value.detach() for part, value in module.named_parameters(recurse=False)}
        prefix = name.removesuffix(".routed_experts")
        if is_experts(module) and is_fused(module):
            for part in ("w13_weight", "w2_weight"):
                found[f"{prefix}.{part}"] = decode(own[part], own[f"{part}_scale"])
        elif is_experts(module) and is_quantized(module):
            for weight, e, matrix, half in projections(module, prefix):
                like = f"{matrix}_"
                read = {p.removeprefix(like): v[e] for p, v in own.items() if p.startswith(like)}
                found[f"{weight}.weight"] = decode_projection(read, half)
        elif is_quantized(module):
            module.quant_method.process_weights_after_loading(module)
            weight = module.weight.detach()
            weight = weight if weight.is_contiguous() else weight.t()
            scales = getattr(module, "weight_scale_inv", None)
            scales = module.weight_scale if scales is None else scales
            tensor_scale = getattr(module, "weight_global_scale", torch.ones(()))
            whole = decode(weight, scales.detach(), tensor_scale.detach())
            names = fused(model, name)
            for layer, rows in zip(names, split(module, whole, len(names)), strict=True):
                found[f"{layer}.weight"] = rows
    return found
