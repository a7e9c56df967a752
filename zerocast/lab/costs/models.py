"""Makes models whose steps are estimated, as modules on the meta device, which uses no memory.

Named models are made here from torch's layers, without transformers, with the names and shapes that
transformers gives them. Others are made by transformers from a ``config.json``.
"""

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerocast import BackendError, InputError, QuantizedTensor, Recipe, TensorParallelShard, empty
from zerocast.arguments import did_you_mean
from zerocast.comm import Communicator
from zerocast.nn import convert
from zerocast.safe_files import read_text

Params = list[tuple[str, torch.Tensor]]
"""Names and weights, as ``model.named_parameters()`` gives them."""


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a dense decoder with grouped heads of 128 and a gated MLP."""

    hidden: int
    layers: int
    mlp: int
    kv_heads: int = 8
    vocabulary: int = 128256


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """The sizes of a decoder with latent attention, whose layers from index :attr:`dense` on have
    experts instead of an MLP.
    """

    hidden: int = 7168
    layers: int = 61
    mlp: int = 18432
    dense: int = 3
    experts: int = 256
    expert_mlp: int = 2048
    q_rank: int = 1536
    kv_rank: int = 512
    heads: int = 128
    rope: int = 64
    vocabulary: int = 129280


MODELS: dict[str, Llama | DeepSeek] = {
    "llama-8b": Llama(4096, 32, 14336),
    "llama-70b": Llama(8192, 80, 28672),
    "llama-405b": Llama(16384, 126, 53248),
    "deepseek-671b": DeepSeek(),
}
"""The sizes of Llama 3.1, as published by Meta, and of DeepSeek-V3, as published by DeepSeek."""

TP_PLAN = {
    "lm_head": "colwise",
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.*_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.gate_proj": "colwise",
    "model.layers.*.up_proj": "colwise",
    "model.layers.*.down_proj": "rowwise",
    "model.layers.*.experts.*": "experts",
}
"""The weights of the named models that tensor parallelism shards, by patterns of names. These are
those that transformers shards, and the heads of latent attention, which it does not shard."""


def model_of(name: str | Path) -> torch.nn.Module:
    """Make a causal language model of BF16 weights on the meta device.

    Args:
        name: one of :data:`MODELS`, or the path of a ``config.json`` of transformers, or of the
            directory that holds one.

    Raises:
        BackendError: for a configuration, if transformers is not installed.
        InputError: for another name, or a configuration that transformers does not support.
    """
    if str(name) not in MODELS:
        return _of_transformers(Path(name))
    sizes = MODELS[str(name)]
    model = _module(
        model=_module(
            embed_tokens=torch.nn.Embedding(
                sizes.vocabulary, sizes.hidden, dtype=torch.bfloat16, device="meta"
            ),
            layers=torch.nn.ModuleList(_layer(sizes, i) for i in range(sizes.layers)),
            norm=_norm(sizes.hidden),
        ),
        lm_head=_linear(sizes.vocabulary, sizes.hidden),
    )
    model._tp_plan = TP_PLAN  # type: ignore[assignment]  # the attribute of transformers' models
    return model


def _layer(sizes: Llama | DeepSeek, index: int) -> torch.nn.Module:
    hidden = sizes.hidden
    mlp = _mlp(hidden, sizes.mlp)
    if isinstance(sizes, DeepSeek):
        head, rank = 128, sizes.kv_rank
        attention = _module(
            q_a_proj=_linear(sizes.q_rank, hidden),
            q_a_layernorm=_norm(sizes.q_rank),
            q_b_proj=_linear(sizes.heads * (head + sizes.rope), sizes.q_rank),
            kv_a_proj_with_mqa=_linear(rank + sizes.rope, hidden),
            kv_a_layernorm=_norm(rank),
            kv_b_proj=_linear(sizes.heads * 2 * head, rank),
            o_proj=_linear(hidden, sizes.heads * head),
        )
        if index >= sizes.dense:
            mlp = _module(
                gate=_module(weight=_parameter(sizes.experts, hidden)),
                experts=_module(
                    gate_up_proj=_parameter(sizes.experts, 2 * sizes.expert_mlp, hidden),
                    down_proj=_parameter(sizes.experts, hidden, sizes.expert_mlp),
                ),
                shared_experts=_mlp(hidden, sizes.expert_mlp),
            )
    else:
        keys = 128 * sizes.kv_heads
        attention = _module(
            q_proj=_linear(hidden, hidden),
            k_proj=_linear(keys, hidden),
            v_proj=_linear(keys, hidden),
            o_proj=_linear(hidden, hidden),
        )
    return _module(
        self_attn=attention,
        mlp=mlp,
        input_layernorm=_norm(hidden),
        post_attention_layernorm=_norm(hidden),
    )


def _module(**parts: torch.nn.Module | torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))


def _linear(rows: int, cols: int) -> torch.nn.Module:
    return torch.nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16, device="meta")


def _norm(size: int) -> torch.nn.Module:
    return torch.nn.RMSNorm(size, dtype=torch.bfloat16, device="meta")


def _mlp(hidden: int, inner: int) -> torch.nn.Module:
    return _module(
        gate_proj=_linear(inner, hidden),
        up_proj=_linear(inner, hidden),
        down_proj=_linear(hidden, inner),
    )


def _of_transformers(path: Path) -> torch.nn.Module:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"a model must be one of {', '.join(MODELS)} or a config.json of transformers, got "
            f"{path}: {error}.{did_you_mean(str(path), MODELS)}"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(
            f"{path} must be a JSON object with a model_type, as transformers writes it."
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BackendError(
            f"the shapes of {path} are those that transformers gives the model; pip install "
            "transformers, or estimate one of " + ", ".join(MODELS)
        ) from error
    try:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=torch.bfloat16
            )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} must be the configuration of a causal language model of transformers: {error}"
        ) from error
    assert isinstance(made, torch.nn.Module)
    return made


def quantize_model(
    model: torch.nn.Module, recipe: Recipe | str, filter_fqns: Sequence[str] = ()
) -> None:
    """Quantize the experts of ``model`` in place, and its linear layers except those that
    ``filter_fqns`` excludes (:func:`zerocast.nn.convert`).
    """
    experts = {
        name.rpartition(".")[0] for name, weight in model.named_parameters() if weight.dim() > 2
    }
    convert(model, recipe, filter_fqns=filter_fqns, include=sorted(experts))


def params_of(model: torch.nn.Module, comm: Communicator | None = None) -> Params:
    """Return the weights of ``model`` that require a gradient, each once.

    With ``comm``, return this rank's part of them under tensor parallelism: rows or columns, and
    some matrices of a stack of experts.

    Raises:
        InputError: if the model has no plan of tensor parallelism, a stack cannot be divided
            evenly, or a shard would end inside a block.
    """
    params: Params = [(n, weight) for n, weight in model.named_parameters() if weight.requires_grad]
    if comm is None or comm.size == 1:
        return params
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        raise InputError(
            f"{type(model).__name__} has no plan of tensor parallelism (_tp_plan of transformers); "
            "estimate it with tp=1."
        )
    return [(name, _tp_part(name, weight, plan, comm)) for name, weight in params]


def _tp_part(
    name: str, weight: torch.Tensor, plan: dict[str, str], comm: Communicator
) -> torch.Tensor:
    """Return the part of a weight of this rank of ``comm``; all if ``plan`` does not match it."""
    names = name, name.removesuffix(".weight")
    styles = [s for pattern, s in plan.items() for n in names if fnmatch.fnmatchcase(n, pattern)]
    if not styles:
        return weight
    if weight.dim() > 2:
        if weight.shape[0] % comm.size:
            raise InputError(
                f"the {weight.shape[0]} matrices of {name} must be divided evenly over the "
                f"{comm.size} ranks of tensor parallelism; choose another tp."
            )
        part = torch.Size((weight.shape[0] // comm.size, *weight.shape[1:]))
        tp_shard = None
    else:
        tp_shard = TensorParallelShard.chunk(weight.shape, int(styles[0] == "rowwise"), comm)
        part = tp_shard.shape
    if not isinstance(weight, QuantizedTensor):
        return weight.new_empty(part)
    storage = weight.quantized_storage
    made = empty(
        part,
        weight.recipe,
        dtype=weight.dtype,
        device="meta",
        columnwise=storage.has_columnwise,
        tp_shard=tp_shard,
    )
    made.quantized_storage.amax_group = storage.amax_group
    return made
