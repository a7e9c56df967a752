"""The four ways to train with zerocast, in one shape: small, on any number of ranks. These are of
gloo, or threads, but for masters that torch distributes.

Each subject holds a model of two linear layers whose weights are the cast of FP32 masters, and
knows what a user does after the masters were written, and what the weights must be then.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator
from zerocast.recipes import Recipe

K, HIDDEN = 64, 96
# Without the random bits of gradients, so that two backward passes give the same.
RECIPE = zerocast.NVFP4BlockScaling(disable_stochastic_rounding=True)


def plain_model() -> torch.nn.Sequential:
    """[batch, K] -> [batch, K]; the same values on every rank and at every call."""
    model = torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, K, bias=False)
    )
    generator = torch.Generator().manual_seed(0)  # ranks may be threads, torch's own is shared
    for weight in model.parameters():
        torch.nn.init.uniform_(weight, -0.125, 0.125, generator=generator)
    return model


def batch(rank: int = 0) -> torch.Tensor:
    """[4, K]."""
    return torch.randn(4, K, generator=torch.Generator().manual_seed(1000 + rank))


def first_values() -> dict[str, torch.Tensor]:
    """What the masters start from."""
    return {name: p.detach().clone() for name, p in plain_model().named_parameters()}


class Subject:
    """One way to train.

    Attributes:
        model: whose layers' weights are the cast of the masters.
        optimizer: steps the masters.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, comm: Communicator, recipe: Recipe = RECIPE) -> None:
        self.comm, self.recipe = comm, recipe
        self.make()

    def make(self) -> None:
        """Model, masters and optimizer."""
        raise NotImplementedError

    def masters(self) -> list[torch.Tensor]:
        """What this rank's user holds and may write: FP32, of plain memory, by weight."""
        raise NotImplementedError

    def publish(self) -> None:
        """What a user calls when the masters were written."""

    def backward(self) -> torch.Tensor:
        """Forward and backward of a batch; the loss."""
        loss = (self.model(batch()) - 1).square().mean()
        loss.backward()
        return loss.detach()

    def train(self) -> None:
        """One step as the documentation has it."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    def whole_masters(self) -> list[torch.Tensor]:
        """FP32, gathered. Collective."""
        raise NotImplementedError

    def weights(self) -> list[torch.Tensor]:
        """Quantized, as the next forward multiplies with them. Collective."""
        return list(self.model.parameters())

    def check(self) -> None:
        """Every weight holds, byte for byte, the unsharded cast of its whole master. Collective."""
        masters = self.whole_masters()
        for i, (weight, master) in enumerate(zip(self.weights(), masters, strict=True)):
            assert isinstance(weight, zerocast.QuantizedTensor)
            wanted = zerocast.quantize(master, self.recipe, dtype=weight.dtype)
            for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data"):
                assert_same_bytes(getattr(weight, name), getattr(wanted, name), f"{i}.{name}")


class Plan(Subject):
    """Masters of one's own, a torch optimizer, and :class:`zerocast.CastPlan`."""

    def make(self) -> None:
        self.model = plain_model()
        zerocast.nn.convert(self.model, self.recipe, weights="quantized")
        self.shards, self.starts = [], []
        for value in first_values().values():
            cut = value.numel() // self.comm.size + 1  # an odd element, inside a row and a block
            start = min(cut * self.comm.rank, value.numel())
            shard = value.view(-1)[start : start + cut].clone()
            self.shards.append(shard)
            self.starts.append(start)
        self.plan = zerocast.CastPlan(
            list(self.model.parameters()), self.shards, self.starts, self.comm
        )
        self.optimizer = torch.optim.AdamW(self.shards, lr=0.05)
        self.publish()

    def masters(self) -> list[torch.Tensor]:
        return self.shards

    def backward(self) -> torch.Tensor:
        loss = super().backward()
        for weight, shard, start in zip(
            self.model.parameters(), self.shards, self.starts, strict=True
        ):
            shard.grad = weight.grad.view(-1)[start : start + shard.numel()].clone()
            weight.grad = None
        return loss

    def publish(self) -> None:
        self.plan.cast()
        self.plan.all_gather()

    def whole_masters(self) -> list[torch.Tensor]:
        by_rank = self.comm.all_gather_object(self.shards)
        return [
            torch.cat([shard.detach() for shard in shards]).view(w.shape).float()
            for shards, w in zip(zip(*by_rank, strict=True), self.model.parameters(), strict=True)
        ]


class Zero(Subject):
    """:class:`zerocast.optim.ZeroOptimizer`."""

    options: dict[str, bool] = {}  # noqa: RUF012

    def make(self) -> None:
        self.model = plain_model()
        zerocast.nn.convert(self.model, self.recipe, weights="quantized")
        self.optimizer = zerocast.optim.ZeroOptimizer(
            self.model.named_parameters(), torch.optim.AdamW, self.comm, lr=0.05, **self.options
        )

    def masters(self) -> list[torch.Tensor]:
        groups = self.optimizer.inner.param_groups
        return [p for group in groups for p in group["params"]]

    def publish(self) -> None:
        """The next step casts the masters; without gradients it changes none."""
        self.optimizer.step()

    def whole_masters(self) -> list[torch.Tensor]:
        return [self.optimizer.gather_master(p) for p in self.model.parameters()]


class OverlappingZero(Zero):
    """Casts and gathers while the next forward runs."""

    options = {"overlap_all_gather": True, "overlap_cast": True}  # noqa: RUF012


class Distributed(Subject):
    """Masters that torch has distributed over the ranks."""

    def make(self) -> None:
        self.model = plain_model()
        zerocast.nn.convert(self.model, self.recipe, weights="master")
        self.distribute(init_device_mesh("cpu", (self.comm.size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def distribute(self, mesh: DeviceMesh) -> None:
        """By torch's own function."""
        raise NotImplementedError

    def masters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def whole_masters(self) -> list[torch.Tensor]:
        return [p.full_tensor().detach().clone() for p in self.masters()]


class Fsdp2(Distributed):
    """Sharded by ``fully_shard``, gathered in codes."""

    def distribute(self, mesh: DeviceMesh) -> None:
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def masters(self) -> list[torch.Tensor]:
        self._each("reshard")
        return super().masters()

    def _each(self, call: str) -> None:
        """Let the parameters be masters, or weights."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, call)()

    def weights(self) -> list[torch.Tensor]:
        self._each("reshard")
        self._each("unshard")
        return [p.detach() for p in self.model.parameters()]


class Tensor(Distributed):
    """Split by ``parallelize_module``: a column-wise and a row-wise layer."""

    def distribute(self, mesh: DeviceMesh) -> None:
        parallelize_module(self.model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def check(self) -> None:
        """By the layers' outputs for unit vectors, which are the weights' decoded values: a sum of
        one such value and zeros is exact.
        """
        up, down = self.model
        rank, size = self.comm.rank, self.comm.size
        rows = torch.eye(HIDDEN).chunk(size, dim=1)[rank]
        with torch.no_grad():
            decoded = [up(torch.eye(K)).T, down(rows).T]
            wanted = [zerocast.quantize(m, self.recipe).dequantize() for m in self.whole_masters()]
            wanted[0] = wanted[0].chunk(size, dim=0)[rank]
        for i, (actual, expected) in enumerate(zip(decoded, wanted, strict=True)):
            assert_same_bytes(actual.contiguous() + 0.0, expected.contiguous() + 0.0, f"layer {i}")


def local(master: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a master."""
    return master.to_local() if isinstance(master, DTensor) else master
