"""A converted decoder on two ranks, sharded, checkpointed, compiled and stepped as torchtitan does
it.
"""

import pytest
import torch

pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")

from tests.adapters.torchtitan.decoder import IN_BLOCKS, Decoder, OptimizersContainer, loss, shard
from tests.sharded.sharded import assert_converted_casts, gradients
from tests.support.claims import assert_same_tensors
from tests.support.collectives import Collectives
from tests.support.ranks import on_gloo
from zerocast.adapters.torchtitan import (
    LinearConverter,
    precompute_after_steps,
    recipe_named,
)

LOW_BIT = {
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}


def trainer(*, checkpoints: bool = False, compiles: bool = False, **options):
    """A model and its optimizer, made in the order of torchtitan's trainer."""
    config = LinearConverter.Config(model_compile_enabled=compiles, **(LOW_BIT | options))
    tree = config.build().convert(Decoder.Config())
    with torch.device("meta"):
        model = tree.build()
    shard(model, checkpoints=checkpoints, compiles=compiles)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model, OptimizersContainer([model])


@on_gloo(2)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize(
    ("recipe_name", "asks"),
    [("tensorwise", "option"), ("nvfp4", "option"), ("nvfp4", "call"), ("tensorwise", "both")],
)
def test_trained_in_codes(comm, recipe_name, asks):
    """Three steps: what is gathered are the codes of the whole masters, a step of the optimizer is
    followed by one all-reduce for all scales, and forward and backward have none; whether the
    option asks for that, a call for this optimizer, or both.
    """
    model, optimizer = trainer(
        recipe_name=recipe_name,
        filter_fqns=["lm_head"],
        precompute_float8_dynamic_scale_for_fsdp=asks != "call",
    )
    if asks != "option":
        precompute_after_steps(optimizer)
    counted = []
    for _ in range(3):
        with Collectives() as forth:
            loss(model, comm.rank).backward()
        with Collectives() as after:
            optimizer.step()
            optimizer.zero_grad()
        counted.append((forth.all_reduces, after.all_reduces))
    assert_converted_casts(model, recipe_named(recipe_name), len(IN_BLOCKS))
    assert counted[1:] == [(0, 1), (0, 1)]


@on_gloo(2)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("wrapped", "options"),
    [
        (("checkpoints",), {"recipe_name": "nvfp4"}),
        (("checkpoints", "compiles"), {"weights_only": True}),
        (("checkpoints", "compiles"), {"recipe_name": "nvfp4"}),
        (("compiles",), {"recipe_name": "mxfp8"}),
        (("checkpoints", "compiles"), {"recipe_name": "tensorwise"}),
    ],
)
def test_wrapped_blocks_give_the_same_gradients(comm, wrapped, options):
    """Blocks that are computed again in the backward, and compiled blocks, give the gradients of
    blocks as they are, to the bit.
    """
    found = []
    for wraps in (True, False):
        model, _ = trainer(**dict.fromkeys(wrapped, wraps), **options)
        loss(model, comm.rank).backward()
        found.append(dict(enumerate(gradients(model).values())))  # wrappers change names
    assert_same_tensors(*found)
