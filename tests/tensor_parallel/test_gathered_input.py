"""Inputs that are split in time and gathered in codes are the cast of the gathered tensor."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    parallelize_module,
)

import zerocast
from tests.support.claims import assert_same_tensors, message_of, stored
from tests.support.collectives import Collectives
from tests.support.models import Attention, InRegion
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES, each
from tests.tensor_parallel.parallel import K, batch, mesh_of, results
from zerocast.nn import regions
from zerocast.nn.tensor_parallel import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    gather_input,
)

CURRENT, DELAYED = RECIPES["current"], RECIPES["delayed"]
HYBRID = zerocast.DelayedScaling(fp8_format=zerocast.Format.HYBRID, amax_history_len=2)


def attention(mesh, *, in_codes: bool) -> Attention:
    """Converted, its layers split by rows, its input gathered once, in codes or in BF16."""
    torch.manual_seed(0)
    model = Attention().bfloat16()
    zerocast.nn.convert(model, CURRENT, weights="high_precision")
    style = PrepareFloat8ModuleInput if in_codes else PrepareModuleInput
    parallelize_module(
        model, mesh, style(input_layouts=Shard(1), desired_input_layouts=Replicate())
    )
    return parallelize_module(model, mesh, dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel()))


def part_of_batch(comm, seed: int = 0) -> torch.Tensor:
    """What this rank has of a batch that is split in time."""
    return batch(seed).bfloat16().chunk(comm.size, 1)[comm.rank]


# --- the bytes ---


@on_gloo()
@each("current", "delayed")
@pytest.mark.parametrize(("shape", "dim"), [((2, 30, K), 1), ((5, 7, K), 0), ((3, K), 0)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gathered_codes_are_those_of_the_gathered_input(comm, shape, dim, recipe):
    """Codes, scale and columnwise copy of an input that is split, unevenly or with empty parts,
    are those of one rank that has it whole, in each of three forwards.
    """
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=draw).bfloat16() * 3**i for i in range(3)]
    mesh = mesh_of(comm.size)
    layer, alone = (zerocast.nn.Linear(K, 16, dtype=torch.bfloat16) for _ in range(2))
    for step, values in enumerate(inputs):
        with zerocast.autocast(recipe=recipe, amax_reduction_group=zerocast.comm.SingleRank()):
            quantizer = alone._registered(regions.current(), values.device)[0].input
            expected = quantizer.quantize(values)
        with zerocast.autocast(recipe=recipe):
            split = distribute_tensor(values, mesh, [Shard(dim)])
            gathered = gather_input("a test", layer, split).to_local()
        found, expected = stored({"input": gathered}), stored({"input": expected})
        found = {name: found[name] for name in expected}
        assert_same_tensors(found, expected, f"in step {step}")


@on_gloo(4)
@pytest.mark.parametrize("recipe", [CURRENT, HYBRID], ids=["current", "delayed"])
def test_training_is_that_of_an_input_gathered_in_high_precision(comm, recipe):
    """Outputs and all gradients are bit for bit those of torch's ColwiseParallel, which gathers
    BF16 and leaves quantizing to the layer, over three steps.
    """
    traces = []
    for style in (ColwiseParallel, Float8ColwiseParallel):
        torch.manual_seed(0)
        layer = zerocast.nn.Linear(K, 96, bias=True, dtype=torch.bfloat16)
        parallelize_module(layer, mesh_of(comm.size), style(input_layouts=Shard(1)))
        trace = {}
        for step in range(3):
            found = results(InRegion(layer, recipe), part_of_batch(comm, step))
            trace |= {f"{name}, step {step}": value for name, value in found.items()}
            layer.zero_grad()
        traces.append(trace)
    assert_same_tensors(*reversed(traces))


@on_gloo(4)
def test_one_gather_of_one_byte_an_element_serves_three_layers(comm):
    """PrepareFloat8ModuleInput gathers an input of wq, wk and wv once, at half the bytes of BF16,
    to the same outputs and gradients.
    """
    traces, numel = [], batch().numel()
    for in_codes, nbytes in ((False, 2 * numel), (True, numel)):
        model = InRegion(attention(mesh_of(comm.size), in_codes=in_codes), CURRENT)
        with torch.no_grad(), Collectives() as seen:
            model(part_of_batch(comm))
        assert seen.all_gathers == (1, nbytes)
        traces.append(results(model, part_of_batch(comm)))
    assert_same_tensors(*reversed(traces))


# --- what is refused ---


@on_gloo(2)
def test_a_gather_in_high_precision_is_refused(comm):
    """Outside of autocast, and under recipes whose inputs cannot be gathered in codes, the forward
    raises on every rank.
    """
    layer = zerocast.nn.Linear(K, 96, name="wq")
    parallelize_module(layer, mesh_of(comm.size), Float8ColwiseParallel(input_layouts=Shard(1)))
    assert message_of(zerocast.InputError, layer, batch()) == (
        "Float8ColwiseParallel of wq gathers its input in codes, which needs "
        "zerocast.autocast(enabled=True) around the forward and an input with elements, and at "
        "least one is missing; for forwards in high precision use torch's style."
    )
    with zerocast.autocast(recipe=RECIPES["mxfp8"]):
        under = message_of(zerocast.UnsupportedError, layer, batch())
    with zerocast.autocast(recipe=CURRENT):
        x = DTensor.from_local(batch(), mesh_of(comm.size), [Replicate()])
        placed = message_of(zerocast.InputError, layer, x)
    assert under == (
        f"Float8ColwiseParallel of wq gathers codes under recipes that quantize an input with "
        f"one scale (Float8CurrentScaling, DelayedScaling), got {RECIPES['mxfp8']}; use "
        f"torch's style, which gathers in high precision and leaves quantizing to the layer."
    )
    assert placed == (
        "Float8ColwiseParallel of wq gathers an input that is split in a leading dimension, "
        "Shard(d), over a mesh of one dimension, got (Replicate(),) of shape (2, 32, 64); "
        "state its input_layouts, or use torch's style."
    )


def test_a_style_that_would_gather_nothing_is_refused():
    """Layouts under which nothing travels are refused when the style is made."""
    assert message_of(zerocast.InputError, Float8ColwiseParallel) == (
        "Float8ColwiseParallel gathers an input that is split, input_layouts=Shard(d), got None; "
        "where nothing is gathered use ColwiseParallel."
    )
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Shard(1)}
    message = message_of(zerocast.InputError, PrepareFloat8ModuleInput, **layouts)
    assert message == (
        "PrepareFloat8ModuleInput gathers an input that is Shard(d) and desired as Replicate(), "
        "got [(Shard(dim=1), Shard(dim=1))]; where nothing is gathered use PrepareModuleInput."
    )


@on_gloo(2)
def test_layers_that_were_not_converted_are_refused(comm):
    """A style on a module that has no layer of zerocast raises when it is applied."""
    mesh, plain = mesh_of(comm.size), torch.nn.Linear(K, K)
    split = {"input_layouts": Shard(1)}
    column, module = (
        message_of(zerocast.InputError, parallelize_module, plain, mesh, style)
        for style in (
            Float8ColwiseParallel(**split),
            PrepareFloat8ModuleInput(**split, desired_input_layouts=Replicate()),
        )
    )
    assert column == (
        "Float8ColwiseParallel is for zerocast.nn.Linear, got Linear; convert the model by "
        "zerocast.nn.convert first, or use ColwiseParallel."
    )
    assert module == (
        "PrepareFloat8ModuleInput needs a zerocast.nn.Linear that determines how the input is "
        "quantized, got none: the module is Linear; convert the model by zerocast.nn.convert "
        "first, or use PrepareModuleInput."
    )
