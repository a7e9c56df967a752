"""A decoder built like torchtitan's Llama debug model, small; sharded and stepped as its trainer
does.
"""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

DIM, HIDDEN, VOCABULARY, HEADS, BLOCKS = 64, 96, 112, 2, 1

LAYERS = {
    "attention.wq": (DIM, DIM),
    "attention.wkv": (DIM, 2 * DIM),
    "attention.wo": (DIM, DIM),
    "feed_forward.w1": (DIM, HIDDEN),
    "feed_forward.w2": (HIDDEN, DIM),
    "feed_forward.w3": (DIM, HIDDEN),
}
"""The linear layers of a block: by name, in and out."""

ALL_LAYERS = {f"layers.{i}.{name}" for i in range(BLOCKS) for name in LAYERS} | {"lm_head"}


class Attention:
    """The forward of an attention; mixed into modules that hold the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, DIM] -> the same."""
        heads = (*x.shape[:-1], HEADS, DIM // HEADS)
        k, v = self.wkv(x).chunk(2, dim=-1)
        q, k, v = (t.view(heads).transpose(1, 2) for t in (self.wq(x), k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(x.shape))


class FeedForward:
    """The forward of a feed-forward network."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, DIM] -> the same."""
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Block:
    """The forward of a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, DIM] -> the same."""
        x = x + self.attention(torch.nn.functional.rms_norm(x, x.shape[-1:]))
        return x + self.feed_forward(torch.nn.functional.rms_norm(x, x.shape[-1:]))


class Decoder:
    """The forward of the model."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, time] -> [batch, time, VOCABULARY]."""
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
    """torchtitan's: an optimizer that steps those of the parts of a model."""

    def __init__(self, model_parts: list[torch.nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [
            torch.optim.AdamW(part.parameters(), lr=0.01, foreach=True) for part in model_parts
        ]
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def step(self) -> None:
        """Step them all."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def loss(model: torch.nn.Module, rank: int = 0) -> torch.Tensor:
    """Of a batch of 2 sequences of 16 tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
