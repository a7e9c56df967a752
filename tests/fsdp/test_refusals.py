"""What is refused: on every rank, with one message, at once."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import zerocast
from tests.fsdp.sharded import RECIPES, Bank, K, bank, batch
from tests.support.ranks import run_ranks

on_ranks = pytest.mark.mpi(min_size=4)
NVFP4 = RECIPES["nvfp4"]


def caught(action, error) -> str:
    """The message of the ``error`` that ``action`` raises."""
    with pytest.raises(error) as raised:
        action()
    return str(raised.value)


@on_ranks
def test_sharding_by_columns_is_refused_when_the_model_is_wrapped():
    """A placement that shards columns is refused by fully_shard, before anything has travelled."""

    def run(comm):
        model = Bank((48,))
        zerocast.nn.convert(model, NVFP4, weights="master")
        by_columns = {"shard_placement_fn": lambda parameter: Shard(1)}
        return caught(lambda: fully_shard(model, **by_columns), zerocast.UnsupportedError)

    (message,) = set(run_ranks("torch_distributed", 4, run))
    assert message == (
        "layers.0.weight: a low-bit all-gather needs masters sharded by rows, got a split of "
        "dimension 1; leave shard_placement_fn out for this parameter, or leave its layer out of "
        "zerocast.nn.convert by filter_fqns."
    )


NOT_GATHERED = (
    "layers.0 was to be all-gathered in codes before its layer runs, and FSDP2 has not gathered "
    "it; call torch.distributed.fsdp.fully_shard on the layer or a module around it, without the "
    "parameter among ignored_params, and run it by that module's forward. (For a model that is not "
    "sharded, convert with weights='quantized' or 'high_precision'.)"
)


def test_a_layer_that_is_not_sharded_is_refused():
    """A converted model that fully_shard was not called on does not run in high precision."""
    model = Bank((48,))
    zerocast.nn.convert(model, NVFP4, weights="master")
    message = caught(lambda: model(torch.randn(4, K)), zerocast.UnsupportedError)
    assert message == NOT_GATHERED


@on_ranks
def test_ignored_parameters_and_bypassed_hooks_are_refused():
    """A parameter that fully_shard ignores, and a layer whose module's forward did not run, would
    be high precision: an error on every rank.
    """

    def run(comm):
        model = Bank((48,))
        zerocast.nn.convert(model, NVFP4, weights="master")
        fully_shard(model, ignored_params=set(model.parameters()))
        ignored = caught(lambda: model(batch()), zerocast.UnsupportedError)
        model = bank(NVFP4, (48,), wrap_layers=False)
        layer = model.layers[0]
        return ignored, caught(lambda: layer(batch()), zerocast.UnsupportedError)

    for messages in run_ranks("torch_distributed", 2, run):
        assert messages == (NOT_GATHERED, NOT_GATHERED)


def test_a_product_with_a_master_is_refused():
    """Whoever multiplies with a master himself is told that it was to be gathered."""
    model = Bank((48,))
    zerocast.nn.convert(model, NVFP4, weights="master")
    weight = model.layers[0].weight
    message = caught(
        lambda: torch.nn.functional.linear(torch.randn(4, K), weight), zerocast.UnsupportedError
    )
    assert message == NOT_GATHERED.replace("layers.0 was", "layers.0.weight was")


def test_precompute_needs_low_bit_gathers():
    """A model without a parameter that is gathered in codes is refused, not passed over."""
    message = caught(
        lambda: zerocast.fsdp.precompute_scales_for_fsdp(Bank((48,))), zerocast.InputError
    )
    assert message == (
        "precompute_scales_for_fsdp needs a model with parameters that FSDP2 all-gathers in codes, "
        "got one with none; convert it by zerocast.nn.convert(model, recipe, weights='master'), "
        "then call torch.distributed.fsdp.fully_shard."
    )


def test_a_recipe_that_casts_the_transpose_is_refused():
    """Weights in blocks of one dimension cannot be cast from shards: convert says so."""
    recipe = zerocast.NVFP4BlockScaling(disable_2d_quantization=True)
    model = Bank((48,))
    message = caught(
        lambda: zerocast.nn.convert(model, recipe, weights="master"), zerocast.InputError
    )
    assert message == (
        f"a weight that is all-gathered in codes needs a recipe whose columnwise copy follows from "
        f"shards of the master, got {recipe}, which casts the transposed tensor; give weights "
        f"blocks of two dimensions."
    )
    assert type(model.layers[0]) is torch.nn.Linear
