"""The decoder of torch's own modules, as torchtitan 0.2 builds it."""

import torch

from tests.torchtitan import decoder
from tests.torchtitan.decoder import BLOCKS, DIM, LAYERS, VOCABULARY


def _add_layers(module: torch.nn.Module, prefix: str) -> None:
    for name, sizes in LAYERS.items():
        if name.startswith(prefix):
            setattr(module, name.removeprefix(prefix), torch.nn.Linear(*sizes, bias=False))


class Attention(decoder.Attention, torch.nn.Module):
    """With torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        _add_layers(self, "attention.")


class FeedForward(decoder.FeedForward, torch.nn.Module):
    """With torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        _add_layers(self, "feed_forward.")


class Block(decoder.Block, torch.nn.Module):
    """With torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()


class Decoder(decoder.Decoder, torch.nn.Module):
    """With torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(VOCABULARY, DIM)
        self.layers = torch.nn.ModuleDict({str(i): Block() for i in range(BLOCKS)})
        self.norm = torch.nn.RMSNorm(DIM)
        self.lm_head = torch.nn.Linear(DIM, VOCABULARY, bias=False)

    def init_states(self) -> None:
        """Draw all parameters."""
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, torch.nn.RMSNorm):
                    torch.nn.init.ones_(parameter)
                else:
                    torch.nn.init.normal_(parameter, std=0.05)
