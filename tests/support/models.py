"""Models to convert, shard and train: one of each shape."""

from collections.abc import Iterable, Sequence

import torch
from torch.utils.checkpoint import checkpoint

import zerocast
from zerocast import nn
from zerocast.recipes import Recipe


class SideBySide(torch.nn.Module):
    """Layers that share their input: [..., K] -> a number."""

    def __init__(self, layers: torch.nn.ModuleList | torch.nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the mean squares of all outputs."""
        return sum(layer(x).float().square().mean() for layer in self.layers.children())


class Bank(SideBySide):
    """Linear layers [rows, k] side by side."""

    def __init__(self, rows: Iterable[int], k: int = 96, dtype: torch.dtype | None = None) -> None:
        layers = (torch.nn.Linear(k, m, bias=False, dtype=dtype) for m in rows)
        super().__init__(torch.nn.ModuleList(layers))


class Pair(torch.nn.Module):
    """[..., k] -> the same shape, by way of ``hidden``; with a norm there, if asked for."""

    def __init__(
        self, k: int = 64, hidden: int = 256, *, bias: bool = True, norm: bool = False
    ) -> None:
        super().__init__()
        self.up = torch.nn.Linear(k, hidden, bias=bias)
        self.norm = torch.nn.LayerNorm(hidden) if norm else None
        self.down = torch.nn.Linear(hidden, k, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x + down(gelu(norm(up(x))))``."""
        hidden = self.up(x)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return x + self.down(torch.nn.functional.gelu(hidden))


class Blocks(torch.nn.Module):
    """Two blocks one after the other, [..., k] -> a number; activations checkpointed, or not."""

    def __init__(self, k: int = 96, hidden: int = 48, *, checkpoints: bool = False) -> None:
        super().__init__()
        layers = ((torch.nn.Linear(k, hidden), torch.nn.Linear(hidden, k)) for _ in range(2))
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(up, torch.nn.GELU(), down) for up, down in layers
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the last output."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.float().square().mean()


class Attention(torch.nn.Module):
    """Three projections [width, k] that a server fuses, and with ``output`` one [k, width] that it
    does not: [..., k] -> [..., width], or the input's shape.
    """

    def __init__(self, k: int = 64, width: int = 96, *, output: bool = False) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (torch.nn.Linear(k, width, bias=False) for _ in range(3))
        self.wo = torch.nn.Linear(width, k, bias=False) if output else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No softmax: every weight has a gradient that depends on the others."""
        y = self.wq(x) * self.wk(x) + self.wv(x)
        return y if self.wo is None else self.wo(y)


class GroupedExperts(torch.nn.Module):
    """Gate and up projections [experts, 16, 32] as torchtitan keeps them, each matrix of one value.

    Args:
        gate: the values of the gate projections, by expert.
        up: those of the up projections.
    """

    __module__ = "torchtitan.models.common.moe"

    def __init__(self, gate: Sequence[float], up: Sequence[float]) -> None:
        super().__init__()
        self.w1_EFD, self.w3_EFD = (
            torch.nn.Parameter(torch.tensor(values).view(-1, 1, 1).repeat(1, 16, 32))
            for values in (gate, up)
        )


class InRegion(torch.nn.Module):
    """``model`` inside of :func:`zerocast.autocast`."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shapes as the model's."""
        with zerocast.autocast(recipe=self.recipe):
            return self.model(x)


def every_layer(recipe: Recipe | None = None) -> torch.nn.Sequential:
    """Every kind of layer with products, and one of torch's, [rows, 64] -> [rows, 64]; weights of
    ``recipe`` hold codes. The same values at every call.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        nn.LayerNormMLP(64, 96, activation="swiglu", recipe=recipe, name="mlp"),
        nn.LayerNormLinear(64, 96, normalization="RMSNorm", bias=False, recipe=recipe, name="norm"),
        torch.nn.ReLU(),
        nn.Linear(96, 64, recipe=recipe, name="linear"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def recipe_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of each recipe that a model's layers ran under, by layer, direction and key."""
    states = [
        (name, state)
        for name, module in model.named_modules()
        for kept, _ in (getattr(module, "_kept", None) or {}).values()
        for state in kept
    ]
    return {
        f"{name}, {state.recipe.scheme}, {state.mode}, {key}": tensor
        for name, state in states
        for key, tensor in state.state_dict().items()
    }
