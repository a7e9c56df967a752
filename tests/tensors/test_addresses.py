"""What hands out memory: a quantized weight has none of its nominal dtype, and never gives 0."""

import pytest
import torch

from tests.support.weights import both_recipes, make
from zerocast.errors import MissingDataError, UnsupportedError
from zerocast.recipes import NVFP4BlockScaling
from zerocast.tensors import quantize


@both_recipes
def test_addresses_are_refused(recipe):
    """data_ptr, storages and the interfaces of other libraries say what to do, for views, too."""
    weight = make(recipe)
    for tensor in (weight, torch.nn.Parameter(weight), weight.detach(), weight.view(-1), weight[0]):
        for ask in (
            lambda t: t.data_ptr(),
            lambda t: t.storage(),
            lambda t: t.untyped_storage().data_ptr(),
            lambda t: t.__cuda_array_interface__,
            lambda t: t.__dlpack__(),
        ):
            with pytest.raises((UnsupportedError, RuntimeError, AttributeError)) as raised:
                ask(tensor)
            if raised.type is UnsupportedError:
                assert "dequantize()" in str(raised.value)


def test_safetensors_says_what_to_save(tmp_path):
    """safetensors, which writes plain memory, is refused with what to save in its place."""
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"a": make(NVFP4BlockScaling()), "b": make(NVFP4BlockScaling(), rows=18)}
    with pytest.raises(UnsupportedError, match="save the FP32 masters, or weight.dequantize"):
        safetensors.save_file(weights, f"{tmp_path}/model.safetensors")


def test_save_pretrained_says_what_to_save(tmp_path):
    """So is transformers' save_pretrained of a converted model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(quantize(projection.weight, NVFP4BlockScaling()))
    with pytest.raises(UnsupportedError, match="save the FP32 masters, or weight.dequantize"):
        model.save_pretrained(tmp_path)


@both_recipes
def test_a_dropped_columnwise_copy_comes_back(recipe):
    """update_usage derives it from the codes, and it has the bytes that it had."""
    weight = make(recipe)
    data, scale_inv = weight.columnwise_data.clone(), weight.columnwise_scale_inv.clone()
    weight.update_usage(columnwise_usage=False)
    with pytest.raises(MissingDataError, match=r"update_usage\(columnwise_usage=True\)"):
        _ = weight.columnwise_data
    weight.update_usage(columnwise_usage=True)
    assert torch.equal(weight.columnwise_data, data)
    assert torch.equal(weight.columnwise_scale_inv, scale_inv)
