"""A master is its values to whoever asks for its memory or puts another tensor in its place."""

import pytest
import torch

import zerocast
from tests.sharded.sharded import bank, batch, whole_masters
from tests.support.claims import assert_same_tensors, message_of
from tests.support.ranks import on_gloo
from tests.support.same_bytes import assert_same_bytes
from zerocast.sharded.master_weight import restore


def master(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A layer's weight [32, 48], converted."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 32, bias=False, dtype=dtype)
    zerocast.nn.convert(layer, zerocast.NVFP4BlockScaling(), weights="master")
    return layer.weight


def test_masters_have_addresses():
    """Wrappers that exchange the parameters of an optimizer tell them apart by data_ptr."""
    weight, other = master(), master()
    assert weight.data_ptr() == weight.value.data_ptr()
    assert weight.data_ptr() not in (0, other.data_ptr())


def test_a_master_is_no_operand_of_a_product():
    """Nor is an expert of several: what was not gathered in codes would work in high precision."""
    experts = torch.nn.ParameterDict({"up": torch.randn(2, 32, 48)})
    zerocast.nn.convert(experts, "nvfp4", weights="master", include=["up"], strict=True)
    x, stack = torch.ones(48), experts["up"]
    for call in (
        lambda: master() @ x,
        lambda: stack[1] @ x,
        lambda: torch.addmv(torch.zeros(32), stack[0], x),
        lambda: torch.baddbmm(torch.zeros(2, 32, 1), stack, x.expand(2, 1, 48).mT),
        lambda: torch.addbmm(torch.zeros(32, 1), stack, x.expand(2, 1, 48).mT),
        lambda: torch.einsum("k,emk->em", x, stack),
    ):
        assert "FSDP2 has not gathered it" in message_of(zerocast.UnsupportedError, call)


def test_what_is_assigned_to_data_is_the_master():
    """A parameter that is given another dtype in place has it, and its cast is due."""
    weight = master(torch.bfloat16)
    value, gather = weight.value.clone(), weight.low_bit_all_gather
    gather.cast_values.set_to(weight.value)
    weight.data = weight.data.float()
    assert gather.is_due(weight.value)
    assert (weight.dtype, weight.value.dtype) == (torch.float32, torch.float32)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert_same_bytes(weight.value, value.float(), "a widened master")
    weight.data = torch.ones(32, 48)
    assert_same_bytes(weight.detach().clone().value, torch.ones(32, 48), "a plain tensor")
    assert weight.low_bit_all_gather is gather


def test_another_shape_is_refused():
    """Assigning to .data cannot change which weight a master is of."""
    weight = master()
    message = message_of(zerocast.InputError, setattr, weight, "data", torch.ones(48, 32))
    assert message == (
        "what is assigned to .data of weight must be of its shape [32, 48], got [48, 32]."
    )
    assert weight.value.shape == (32, 48)


def test_a_master_can_be_handed_to_another_library():
    """DLPack gives the memory of the values."""
    weight = master().detach()
    shared = torch.from_dlpack(weight)
    assert_same_bytes(shared, weight.value, "by DLPack")
    assert shared.data_ptr() == weight.value.data_ptr()


def test_compiled_functions_take_masters():
    """torch.compile compiles a function of masters once for all that are alike, with eager's
    results; a write in it makes a cast due.
    """

    def average(mean, weight):
        mean.lerp_(weight, 0.25)

    compiled = torch.compile(average, backend="aot_eager", fullgraph=True)
    weights = [master().detach(), torch.nn.init.normal_(master()).detach()]
    means = [torch.nn.init.ones_(master()).detach() for _ in range(2)]
    gather = means[0].low_bit_all_gather
    gather.cast_values.set_to(means[0].value)
    with torch.no_grad():
        compiled(means[0], weights[0])
        average(means[1], weights[0])
        assert gather.is_due(means[0].value)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(means[0], weights[1])
        average(means[1], weights[1])
    assert_same_bytes(means[0].value, means[1].value, "averaged")
    assert means[0].low_bit_all_gather is gather


def test_compiled_foreach_functions_take_masters():
    """As optimizers are compiled: lists of masters of several shapes."""
    masters = {how: [master().detach(), master()[:5].detach()] for how in ("eager", "compiled")}

    def step(weights):
        torch._foreach_mul_(weights, 0.5)
        torch._foreach_add_(weights, [torch.ones(weight.shape) for weight in weights])

    with torch.no_grad():
        step(masters["eager"])
        torch.compile(step, backend="aot_eager")(masters["compiled"])
    for actual, expected in zip(masters["compiled"], masters["eager"], strict=True):
        assert_same_bytes(actual.value, expected.value, "stepped")


@on_gloo(3)
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("first", ["training", "inference"])
def test_codes_are_gathered_in_inference_mode(comm, first):
    """A forward in inference mode gives the output of one without gradients, whether the model has
    been trained before or never gathered; training goes on as without it.
    """
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        model = bank()
        if first == "training":
            model(batch(comm)).backward()
        with mode():
            results.append({"output": model(batch(comm)).clone()})
        if first == "training":
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer.step()
            model(batch(comm)).backward()
            optimizer.step()
            results[-1] |= whole_masters(model)
    assert_same_tensors(results[1], results[0], "in inference mode")


def test_a_damaged_master_is_not_loaded() -> None:
    """What unpickling gives is compared with what a master is made of."""
    gather = master().low_bit_all_gather
    assert restore(torch.zeros(16, 32), gather, True, True).requires_grad
    for value, given in (
        (torch.zeros(16, 32, dtype=torch.int32), gather),
        ([0.0], gather),
        (torch.zeros(16, 32), "w"),
        (zerocast.quantize(torch.zeros(16, 32), zerocast.NVFP4BlockScaling()), gather),
    ):
        with pytest.raises(zerocast.errors.InputError, match="needs a plain tensor"):
            restore(value, given, True, True)
