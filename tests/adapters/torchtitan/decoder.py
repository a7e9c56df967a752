"""A decoder built like torchtitan's Llama debug model, small: by a tree of configurations; sharded
and stepped as its trainer does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

DIM, HIDDEN, VOCABULARY, HEADS = 64, 96, 112, 2

IN_BLOCKS = [
    "layers.0.attention.wkv",
    "layers.0.attention.wo",
    "layers.0.attention.wq",
    "layers.0.feed_forward.w1",
    "layers.0.feed_forward.w2",
    "layers.0.feed_forward.w3",
]
"""The linear layers; beside them there is lm_head."""

INIT = {"weight": partial(torch.nn.init.normal_, std=0.05)}


def _linear(inputs: int, outputs: int) -> Callable[[], Linear.Config]:
    return partial(Linear.Config, in_features=inputs, out_features=outputs, param_init=INIT)


class Built(Module):
    """Of what the fields of its configuration build."""

    def __init__(self, config: Module.Config) -> None:
        super().__init__()
        for each in fields(config):
            part = getattr(config, each.name)
            if isinstance(part, Module.Config):
                setattr(self, each.name, part.build())


class Attention(Built):
    """[batch, time, DIM] -> the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its layers."""

        wq: Linear.Config = field(default_factory=_linear(DIM, DIM))
        wkv: Linear.Config = field(default_factory=_linear(DIM, 2 * DIM))
        wo: Linear.Config = field(default_factory=_linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal."""
        heads = (*x.shape[:-1], HEADS, DIM // HEADS)
        k, v = self.wkv(x).chunk(2, dim=-1)
        q, k, v = (t.view(heads).transpose(1, 2) for t in (self.wq(x), k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(x.shape))


class FeedForward(Built):
    """[batch, time, DIM] -> the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its layers."""

        w1: Linear.Config = field(default_factory=_linear(DIM, HIDDEN))
        w2: Linear.Config = field(default_factory=_linear(HIDDEN, DIM))
        w3: Linear.Config = field(default_factory=_linear(DIM, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU between."""
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(Built):
    """[batch, time, DIM] -> the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its halves."""

        attention: Attention.Config = field(default_factory=Attention.Config)
        feed_forward: FeedForward.Config = field(default_factory=FeedForward.Config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each half behind a norm, beside a residual."""
        x = x + self.attention(torch.nn.functional.rms_norm(x, x.shape[-1:]))
        return x + self.feed_forward(torch.nn.functional.rms_norm(x, x.shape[-1:]))


class Embedding(torch.nn.Embedding, Module):
    """torch's."""


class RMSNorm(torch.nn.RMSNorm, Module):
    """torch's."""


class ModuleDict(torch.nn.ModuleDict, Module):
    """torch's."""


class Decoder(Built):
    """[batch, time] -> [batch, time, VOCABULARY]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its block, in a list as torchtitan has them, and its head."""

        layers: list = field(default_factory=lambda: [Block.Config()])
        lm_head: Linear.Config = field(default_factory=_linear(DIM, VOCABULARY))
        enable_weight_tying: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tok_embeddings = Embedding(VOCABULARY, DIM)
        self.layers = ModuleDict({str(i): c.build() for i, c in enumerate(config.layers)})
        self.norm = RMSNorm(DIM)
        self.tok_embeddings._param_init = INIT
        self.norm._param_init = {"weight": torch.nn.init.ones_}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x))


def shard(model: torch.nn.Module, *, checkpoints: bool = False, compiles: bool = False) -> None:
    """Wrap the blocks of ``model``, then shard it."""
    if checkpoints:
        for name, block in model.layers.items():
            model.layers[name] = checkpoint_wrapper(block, early_stop=False)
    if compiles:
        for block in model.layers.values():
            block.compile(backend="aot_eager", fullgraph=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(model.tok_embeddings, mp_policy=policy)
    fully_shard([model.norm, model.lm_head], mp_policy=policy, reshard_after_forward=False)
    for block in model.layers.values():
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else gloo is asked what it lacks


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan's: an optimizer that steps another one, of the parts of a model."""

    def __init__(self, model_parts: list[torch.nn.Module]) -> None:
        self.model_parts = model_parts
        parameters = [p for part in model_parts for p in part.parameters()]
        self.inner = torch.optim.AdamW(parameters, lr=0.01, foreach=True)
        super().__init__(parameters, {})

    def step(self) -> None:
        """Step the other one."""
        self.inner.step()


def loss(model: torch.nn.Module, rank: int = 0) -> torch.Tensor:
    """Of a batch of 2 sequences of 16 tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
