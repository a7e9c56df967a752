"""The decoder that a tree of configurations builds, as torchtitan 0.3 does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from tests.torchtitan import decoder
from tests.torchtitan.decoder import BLOCKS, DIM, LAYERS, VOCABULARY

INIT = {"weight": partial(torch.nn.init.normal_, std=0.05)}


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=INIT)


def _layer(name: str) -> Callable[[], Linear.Config]:
    return partial(_linear, *LAYERS[name])


class Attention(decoder.Attention, Module):
    """With layers that configurations build."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its layers."""

        wq: Linear.Config = field(default_factory=_layer("attention.wq"))
        wkv: Linear.Config = field(default_factory=_layer("attention.wkv"))
        wo: Linear.Config = field(default_factory=_layer("attention.wo"))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wq, self.wkv, self.wo = config.wq.build(), config.wkv.build(), config.wo.build()


class FeedForward(decoder.FeedForward, Module):
    """With layers that configurations build."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its layers."""

        w1: Linear.Config = field(default_factory=_layer("feed_forward.w1"))
        w2: Linear.Config = field(default_factory=_layer("feed_forward.w2"))
        w3: Linear.Config = field(default_factory=_layer("feed_forward.w3"))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = config.w1.build(), config.w2.build(), config.w3.build()


class Block(decoder.Block, Module):
    """Of what configurations build."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its halves."""

        attention: Attention.Config = field(default_factory=Attention.Config)
        feed_forward: FeedForward.Config = field(default_factory=FeedForward.Config)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = config.attention.build(), config.feed_forward.build()


class Embedding(torch.nn.Embedding, Module):
    """torch's."""


class RMSNorm(torch.nn.RMSNorm, Module):
    """torch's."""


class ModuleDict(torch.nn.ModuleDict, Module):
    """torch's."""


class Decoder(decoder.Decoder, Module):
    """Of what configurations build."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its blocks, in a list as torchtitan has them, and its head."""

        layers: list = field(default_factory=lambda: [Block.Config() for _ in range(BLOCKS)])
        lm_head: Linear.Config = field(default_factory=lambda: _linear(DIM, VOCABULARY))
        enable_weight_tying: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(VOCABULARY, DIM)
        self.layers = ModuleDict({str(i): c.build() for i, c in enumerate(config.layers)})
        self.norm = RMSNorm(DIM)
        self.lm_head = config.lm_head.build()
        self.tok_embeddings._param_init = INIT
        self.norm._param_init = {"weight": torch.nn.init.ones_}
