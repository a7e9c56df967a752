"""Experts, embeddings and Conv1D: weights of modules that are no linear layers, gathered in codes
under FSDP2, of whose values the modules' own forwards compute.
"""

import itertools

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import (
    BF16,
    adamw,
    assert_converted_casts,
    feed,
    gathered,
    load,
    reshard,
    save_plain,
    shard,
    whole_masters,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.collectives import Collectives
from tests.support.experts import INCLUDE, KINDS, moe, tokens
from tests.support.fused import cast_as_served, served_together
from tests.support.models import SideBySide
from tests.support.nightly import nightly
from tests.support.ranks import on_gloo, run_ranks
from tests.support.recipes import RECIPES, STATELESS, each
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import UnsupportedError
from zerocast.layout import chunk
from zerocast.tensors import QuantizedTensor

pytestmark = pytest.mark.mpi(min_size=4)

NVFP4 = RECIPES["nvfp4"]


class Experts(torch.nn.Module):
    """Five experts [24, 32]: no number of ranks but 5 has as many each."""

    def __init__(self, k: int = 32) -> None:
        super().__init__()
        spread = torch.logspace(-3, 3, 5).view(5, 1, 1)
        self.matrices = torch.nn.Parameter(torch.randn(5, 24, k) * spread)
        self.bias = torch.nn.Parameter(torch.zeros(5, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., k] -> [5, ..., 24]."""
        return torch.stack([x @ m.t() + b for m, b in zip(self.matrices, self.bias, strict=True)])


def value_of(name: str, master: torch.Tensor, recipe) -> torch.Tensor:
    """What a module works with, of the whole master: each of its matrices quantized alone."""
    if master.dim() == 2:
        return zerocast.quantize(master, recipe, dtype=torch.bfloat16).dequantize()
    matrices = [zerocast.quantize(m, recipe, dtype=torch.bfloat16) for m in master]
    return torch.stack([m.dequantize() for m in matrices])


def assert_values_of_codes(model, recipe, included) -> None:
    """The included weights, gathered, are the values of the unsharded casts of their masters, and
    plain tensors; those of linear layers hold codes. Collective.
    """
    masters, weights = whole_masters(model), gathered(model)
    fused = itertools.chain(*served_together(masters))
    whole = cast_as_served({name: masters[name] for name in fused}, recipe, torch.bfloat16)
    for name, weight in weights.items():
        if name in included:
            assert type(weight.data) is torch.Tensor
            assert_same_bytes(weight.detach(), value_of(name, masters[name], recipe), name)
        elif isinstance(weight, QuantizedTensor):
            if name not in whole:
                whole[name] = zerocast.quantize(masters[name], recipe, dtype=torch.bfloat16)
            assert_same_bytes(weight.dequantize(), whole[name].dequantize(), name)
        else:
            assert_same_bytes(weight.detach(), masters[name].bfloat16(), name)
    reshard(model)


def gathered_bytes(model) -> dict[str, float]:
    """By parameter, what the report says that a gather moves."""
    parameters = zerocast.sharded.report(model).parameters
    return {p.name: p.bytes_per_element * p.shape.numel() for p in parameters}


def sharded_moe(kind: str) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """All that can be in codes is, gathered block by block; and the names of included weights."""
    model = moe(kind)
    report = zerocast.nn.convert(model, NVFP4, weights="master", include=INCLUDE, strict=True)
    assert len(report.included) == 5
    assert not report.left
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16), report.included


@on_gloo()
@pytest.mark.parametrize(
    ("kind", "world_size", "steps"),
    [("qwen-moe", 3, 2), *(nightly(kind, size, 20) for kind in KINDS for size in (1, 2, 3, 4))],
)
def test_experts_of_transformers_train_as_plain_tensors(comm, kind, steps):
    """After steps of their own forward and backward, with given gradients, masters are bit for bit
    those of plain unsharded tensors, and what the modules compute with is the value of the
    unsharded cast of each matrix. The gathers move what the report says: codes of all weights.
    """
    plain = dict(moe(kind).named_parameters())
    model, included = sharded_moe(kind)
    optimizers = [adamw(plain.values()), adamw(model.parameters())]
    for number in range(steps):
        x = tokens(number)
        with Collectives() as seen:
            model(input_ids=x, labels=x).loss.backward()
        feed(plain.values(), number)
        feed(model.parameters(), number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(whole_masters(model), stored(plain), f"after {steps} steps")
    assert_values_of_codes(model, NVFP4, included)
    # All in the forward; the blocks again in the backward.
    sizes = gathered_bytes(model)
    moved = sum(size * (2 if ".layers." in name else 1) for name, size in sizes.items())
    assert seen.all_gathers[1] == (moved if comm.size > 1 else 0)
    for name in included:
        rows, row_numel = plain[name].shape[0], plain[name][0].numel()
        numel = row_numel * chunk(rows, 0, comm.size).size * comm.size
        # Codes, a scale for 16x16 of them, and what fills these up to a row.
        assert 0 <= sizes[name] - numel / 2 <= 2 * numel / 256 + comm.size * row_numel


def converted(recipe=NVFP4, **options) -> SideBySide:
    """Experts beside a linear layer, the same on every rank."""
    torch.manual_seed(0)
    layers = {"experts": Experts(), "linear": torch.nn.Linear(32, 16)}
    model = SideBySide(torch.nn.ModuleDict(layers))
    zerocast.nn.convert(
        model, recipe, weights="master", include=["layers.experts"], strict=True, **options
    )
    return model


@on_gloo(4)
@each(*STATELESS, slow={*STATELESS} - {"nvfp4", "rowwise"})
def test_what_a_module_works_with_is_the_value_of_the_unsharded_cast(comm, recipe):
    """Under every recipe that remembers nothing, with experts of other magnitudes beside each other
    and a rank without any; the gradient reaches the master; one plane of codes travels.
    """
    model = shard(converted(recipe), wrap_layers=False)
    optimizer = adamw(model.parameters())
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    for number in range(2):
        with Collectives() as seen:
            model(x).backward()
        grad = model.layers["experts"].matrices.grad.full_tensor()
        assert bool(grad.ne(0).flatten(1).any(dim=1).all())
        assert_values_of_codes(model, recipe, ["layers.experts.matrices"])
        feed(model.parameters(), number)
        optimizer.step()
        optimizer.zero_grad()
    sizes = gathered_bytes(model)
    codes = 4 * 2 * 24 * 32 * recipe.numerics.fmt.bits // 8
    assert codes <= sizes["layers.experts.matrices"] <= 1.25 * codes  # and scales
    assert seen.all_gathers[1] == sum(sizes.values())


@on_gloo(3)
def test_a_second_gather_of_the_same_values_changes_nothing_that_a_backward_saved(comm):
    """A module that is gathered again before the backward (another microbatch) may have its values
    saved by autograd: they are the same, and torch sees no write.
    """
    model = converted()
    fully_shard(model.layers["experts"], mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    losses = [model(x) for _ in range(2)]
    for loss in losses:
        loss.backward()


def save_and_load(recipe):
    """By torch.distributed.checkpoint, which sees plain tensors, into a model on fewer ranks."""

    def saved(comm):
        model = shard(converted(recipe), wrap_layers=False)
        return save_plain(model, comm), whole_masters(model)

    folder, masters = run_ranks("torch_distributed", 3, saved)[0]

    def resumed(comm):
        torch.manual_seed(1)
        model = converted(recipe)
        with torch.no_grad():
            model.layers["experts"].matrices.zero_()
        model = shard(model, wrap_layers=False)
        load(model, folder)
        assert_same_tensors(whole_masters(model), masters, "loaded")
        assert_values_of_codes(model, recipe, ["layers.experts.matrices"])

    run_ranks("torch_distributed", 2, resumed)


def test_masters_of_experts_are_saved_as_plain_tensors():
    """And loaded on another number of ranks."""
    save_and_load(NVFP4)


@on_gloo(2)
def test_an_embedding_tied_to_a_linear_layer_is_gathered_once(comm):
    """In codes for the layer; the embedding looks up their values."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(48, 32)
            self.head = torch.nn.Linear(32, 48, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x)).square().mean()

    torch.manual_seed(0)
    model = Tied()
    report = zerocast.nn.convert(model, NVFP4, weights="master", include=["embed"], strict=True)
    assert (report.converted, report.included) == (("head",), ("embed.weight",))
    fully_shard(model, mp_policy=BF16)
    for _ in range(2):  # the first plans
        with Collectives() as seen:
            model(torch.arange(40).view(2, 20)).backward()
    assert model.embed.weight.grad is model.head.weight.grad
    assert seen.all_gathers[1] == 48 * 32 // 2 + 2 * 4  # codes, and scales of 2 x 2 blocks a rank
    assert_converted_casts(model, NVFP4, 1)


def test_masters_that_nobody_gathers_are_not_computed_with():
    """A model that fully_shard does not know would work in high precision."""
    model = converted()
    with pytest.raises(UnsupportedError, match="layers.experts.matrices was to be all-gathered"):
        model.layers["experts"](torch.ones(2, 32))
