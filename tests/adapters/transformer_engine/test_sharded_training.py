"""Training by TransformerEngine's names: small ZeRO-1 and FSDP loops over weights that hold codes.

Beside each loop a model with BF16 weights trains, whose masters are whole on every rank and whose
layers quantize in each forward. The losses of both are equal to the bit, at every step.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch

import zerocast.adapters.transformer_engine.pytorch as te
from tests.support.nightly import nightly
from tests.support.ranks import PROCESSES, run_ranks
from zerocast.adapters.transformer_engine.common import recipe as recipes
from zerocast.adapters.transformer_engine.pytorch.tensor.utils import (
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from zerocast.comm import Communicator, SingleRank

RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 32x32": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SIZES = (64, 96, 32, 64)
"""Of three layers: no boundary of two to four equal shards is one of a weight or of a block."""
TOKENS, LEARNING_RATE = 32, 3.0


def codes(weight: torch.Tensor) -> list[str]:
    """The attributes that are all-gathered."""
    if isinstance(weight, te.Float8Tensor):
        return ["_data"]
    both = isinstance(weight, te.MXFP8Tensor) and not weight.recipe.enable_2d_quantization
    return ["_rowwise_data", "_columnwise_data"] if both else ["_rowwise_data"]


def per_byte(weight: torch.Tensor) -> int:
    """How many elements a byte of codes holds."""
    return 2 if isinstance(weight, te.NVFP4Tensor) else 1


class Sharded:
    """What both loops have in common: which elements are whose, masters, gradients.

    The weights lie one behind the other, and each rank owns as many elements; the last one's end
    may be behind the end of the weights.
    """

    def __init__(self, weights: list[torch.Tensor], comm: Communicator, *, manual: bool) -> None:
        self.weights, self.comm, self.manual = weights, comm, manual
        self.starts = [0, *accumulate(weight.numel() for weight in weights)]
        world_size = comm.size
        self.share = -(-self.starts[-1] // (2 * world_size)) * 2  # whole bytes of 4-bit codes
        low = self.share * comm.rank
        self.owned: list[tuple[int, int] | None] = []
        self.masters: list[torch.Tensor | None] = []
        for weight, start in zip(weights, self.starts, strict=False):
            first = min(max(low - start, 0), weight.numel())
            last = min(max(low + self.share - start, 0), weight.numel())
            value = weight.get_high_precision_init_val().view(-1).float()
            weight.clear_high_precision_init_val()
            self.owned.append((first, last) if first < last else None)
            self.masters.append(value[first:last].clone() if first < last else None)
            weight.main_grad = torch.zeros(weight.shape)

    @property
    def offsets(self) -> list[int | None]:
        """Where each master starts in its weight."""
        return [owned and owned[0] for owned in self.owned]

    def update(self, gradients: list[torch.Tensor]) -> None:
        """One step of gradient descent on this rank's masters."""
        for master, owned, gradient in zip(self.masters, self.owned, gradients, strict=True):
            if master is not None:
                master -= LEARNING_RATE * gradient.view(-1)[slice(*owned)]

    def finish(self) -> None:
        """All codes are there."""
        if self.manual:
            post_all_gather_processing(self.weights)


class Zero1(Sharded):
    """Whole weights on every rank; their codes are copied into a buffer, gathered, copied back."""

    def step(self, gradients: list[torch.Tensor]) -> None:
        """From gradients to whole weights."""
        self.update(gradients)
        quantize_master_weights(
            self.weights, self.masters, self.offsets, self.comm,
            manual_post_all_gather_processing=self.manual,
        )  # fmt: skip
        packed = per_byte(self.weights[0])
        for name in codes(self.weights[0]):
            whole = [getattr(weight, name).view(-1) for weight in self.weights]
            flat = torch.zeros(self.share * self.comm.size // packed, dtype=torch.uint8)
            flat[: self.starts[-1] // packed] = torch.cat(whole)
            low = self.share * self.comm.rank // packed
            flat[:low] = flat[low + self.share // packed :] = 0  # what others own
            self.comm.all_gather_(flat)
            for start, each in zip(self.starts, whole, strict=False):
                each.copy_(flat[start // packed :][: each.numel()])
        self.finish()


class Fsdp(Sharded):
    """Codes lie in flat buffers; each rank casts into its shard of them, which is gathered."""

    def __init__(self, weights: list[torch.Tensor], comm: Communicator, *, manual: bool) -> None:
        super().__init__(weights, comm, manual=manual)
        self.packed = per_byte(weights[0])
        size = self.share * comm.size // self.packed
        self.flat = [torch.zeros(size, dtype=torch.uint8) for _ in codes(weights[0])]
        for weight, start in zip(weights, self.starts, strict=False):
            names = codes(weight)
            for name, flat in zip(names, self.flat, strict=True):
                old = getattr(weight, name)
                new = flat[start // self.packed :][: old.numel()].view(old.shape)
                if len(names) == 1:
                    replace_raw_data(weight, new)
                else:
                    setattr(weight, name, new.copy_(old))

    def own_codes(self, i: int) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
        """Where the codes of this rank's shard of a weight are to be written."""
        owned = self.owned[i]
        if owned is None:
            return (None, None) if len(self.flat) == 2 else None
        first, last = (self.starts[i] + at for at in owned)
        parts = [flat[first // self.packed : last // self.packed] for flat in self.flat]
        return tuple(parts) if len(parts) == 2 else parts[0]

    def step(self, gradients: list[torch.Tensor]) -> None:
        """From gradients to whole weights."""
        self.update(gradients)
        for flat in self.flat:  # as where the codes of others are freed after a forward
            low = self.share * self.comm.rank // self.packed
            flat[:low] = flat[low + self.share // self.packed :] = 0
        quantize_master_weights(
            self.weights, self.masters, self.offsets, self.comm,
            [self.own_codes(i) for i in range(len(self.weights))],
            manual_post_all_gather_processing=self.manual,
        )  # fmt: skip
        for flat in self.flat:
            self.comm.all_gather_(flat)
        self.finish()


LOOPS: dict[str, type[Zero1] | type[Fsdp]] = {"ZeRO-1": Zero1, "FSDP": Fsdp}


def model() -> torch.nn.Sequential:
    """Three layers, whose weights are BF16 or stand for it; always with the same values."""
    generator = torch.Generator().manual_seed(7)
    layers = [
        te.Linear(
            k, m, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True,
            init_method=lambda weight: weight.normal_(std=0.125, generator=generator),
        )
        for k, m in pairwise(SIZES)
    ]  # fmt: skip
    return torch.nn.Sequential(*layers)


def train(scheme: str, loop: str, steps: int, *, manual: bool) -> Callable[[Communicator], object]:
    """Train on a rank; the losses of the sharded weights and of the reference."""

    def on_rank(comm: Communicator) -> object:
        recipe = RECIPES[scheme]
        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            sharded = model()
        whole = model()
        for weight in whole.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        masters = [weight.detach().float() for weight in whole.parameters()]
        optimizer = LOOPS[loop](list(sharded.parameters()), comm, manual=manual)
        losses = []
        for step in range(steps):
            seed = torch.Generator().manual_seed(1000 * step + comm.rank)
            x = torch.randn(TOKENS, SIZES[0], generator=seed).bfloat16()
            target = torch.randn(TOKENS, SIZES[-1], generator=seed)
            of_step, gradients = [], []
            for each in (sharded, whole):
                for weight in each.parameters():
                    weight.main_grad.zero_()
                with te.autocast(recipe=recipe, amax_reduction_group=SingleRank()):
                    y = each(x)
                loss = torch.nn.functional.mse_loss(y.float(), target)
                loss.backward()
                of_step.append(float(loss.detach()))
                own = [weight.main_grad.clone() for weight in each.parameters()]
                everyones = comm.all_gather_object(own)
                gathered = [torch.stack(grads) for grads in zip(*everyones, strict=True)]
                gradients.append([grads.sum(0) / comm.size for grads in gathered])
            losses.append(tuple(of_step))
            with torch.no_grad():
                optimizer.step(gradients[0])
                for weight, master, gradient in zip(
                    whole.parameters(), masters, gradients[1], strict=True
                ):
                    master -= LEARNING_RATE * gradient
                    weight.copy_(master)
        return losses

    return on_rank


def check(kind: str, ranks: int, scheme: str, loop: str, steps: int, *, manual: bool) -> None:
    """Equal losses on every rank, which change from step to step."""
    results = run_ranks(kind, ranks, train(scheme, loop, steps, manual=manual))
    for rank, losses in enumerate(results):
        assert all(sharded == whole for sharded, whole in losses), (rank, losses)
        assert len(set(losses)) == steps, (rank, losses)


@pytest.mark.parametrize(
    ("ranks", "manual", "steps"),
    [
        (3, None, 3),
        *(nightly(ranks, manual, 20) for ranks in (2, 3, 4) for manual in (False, True)),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheme", RECIPES)
def test_losses_are_those_of_whole_masters(scheme, loop, ranks, manual, steps):
    """With the columnwise copies made by the caller or by the next forward: either, or that of the
    loop.
    """
    manual = loop == "FSDP" if manual is None else manual
    check("in_process", ranks, scheme, loop, steps, manual=manual)


@pytest.mark.slow
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheme", RECIPES)
def test_losses_are_those_of_whole_masters_on_processes(kind, scheme, loop):
    """The same over MPI and gloo."""
    check(kind, 4, scheme, loop, 5, manual=loop == "ZeRO-1")
