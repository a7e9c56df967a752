"""A converted decoder on two ranks, sharded, checkpointed, compiled and stepped as torchtitan does
it.
"""

from types import SimpleNamespace

import pytest
import torch

import zerocast
from tests.sharded.test_traffic import Collectives
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_bytes import assert_same_bytes
from tests.torchtitan.decoder import ALL_LAYERS, OptimizersContainer, loss, shard
from zerocast.integrations.torchtitan import (
    AutocastLinear,
    LinearConverter,
    precompute_after_steps,
    recipe_named,
)

pytestmark = pytest.mark.mpi(min_size=4)
pytest.importorskip("torchtitan.models.common.linear")

LOW_BIT = {
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}


def trainer(*, checkpoints: bool = False, compiles: bool = False, **options):
    """A model and its optimizer, made in the order of torchtitan's trainer."""
    from tests.torchtitan.built_decoder import Decoder

    config = LinearConverter.Config(model_compile_enabled=compiles, **(LOW_BIT | options))
    tree = config.build().convert(Decoder.Config())
    with torch.device("meta"):
        model = tree.build()
    shard(model, checkpoints=checkpoints, compiles=compiles)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return SimpleNamespace(model=model, optimizer=OptimizersContainer([model]))


def assert_whole_casts(model: torch.nn.Module, recipe: zerocast.Recipe) -> None:
    """What every converted layer gathers is, to the byte, the cast of its whole master."""
    layers = [m for m in model.modules() if isinstance(m, AutocastLinear)]
    assert {layer.name for layer in layers} == ALL_LAYERS - {"lm_head"}
    whole = {
        layer: zerocast.quantize(layer.weight.full_tensor(), recipe, dtype=torch.bfloat16)
        for layer in layers
    }
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    for layer, expected in whole.items():
        for name, buffer in layer.weight.quantized_storage.buffers.items():
            assert_same_bytes(
                buffer, expected.quantized_storage.buffers[name], f"{layer.name} {name}"
            )
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize(
    ("recipe_name", "asks"),
    [("tensorwise", "option"), ("nvfp4", "option"), ("nvfp4", "call"), ("tensorwise", "both")],
)
def test_trained_in_codes(recipe_name, asks):
    """Three steps: what is gathered are the codes of the whole masters, a step of the optimizer is
    followed by one all-reduce for all scales, and forward and backward have none; whether the
    option asks for that, a call for this optimizer, or both.
    """

    def run(comm):
        t = trainer(
            recipe_name=recipe_name,
            filter_fqns=["lm_head"],
            precompute_float8_dynamic_scale_for_fsdp=asks != "call",
        )
        if asks != "option":
            precompute_after_steps(t.optimizer)
        counted = []
        for _ in range(3):
            with Collectives() as forth:
                loss(t.model, comm.rank).backward()
            with Collectives() as after:
                t.optimizer.step()
                t.optimizer.zero_grad()
            counted.append((forth.calls["allreduce_"], after.calls["allreduce_"]))
        assert_whole_casts(t.model, recipe_named(recipe_name))
        return counted

    for counted in run_ranks("torch_distributed", 2, run):
        assert counted[1:] == [(0, 1), (0, 1)]


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("wrapped", "options"),
    [
        (("checkpoints",), {"recipe_name": "nvfp4"}),
        (("checkpoints", "compiles"), {"weights_only": True}),
        (("compiles",), {"recipe_name": "mxfp8"}),
        (("checkpoints", "compiles"), {"recipe_name": "tensorwise"}),
    ],
)
@on_ranks("torch_distributed", 2)
def test_wrapped_blocks_give_the_same_gradients(comm, wrapped, options):
    """Blocks that are computed again in the backward, and compiled blocks, give the gradients of
    blocks as they are, to the bit.
    """
    gradients = []
    for wraps in (False, True):
        t = trainer(**dict.fromkeys(wrapped, wraps), **options)
        loss(t.model, comm.rank).backward()
        gradients.append([p.grad.full_tensor() for p in t.model.parameters()])
    for i, (actual, expected) in enumerate(zip(*gradients, strict=True)):
        assert_same_bytes(actual, expected, f"gradient {i}")
