"""MLX's NVFP4: one level of scales, so the scale of the tensor is 1 whatever the weight's amax."""

import random
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import zerocast
from tests.support.claims import assert_unsharded_cast, message_of
from tests.support.experts import moe
from tests.support.exports import configuration, of_masters
from tests.support.llama import llama
from tests.support.partitions import draw_partition
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import run_in_process
from zerocast.errors import InputError, NonFiniteError, UnsupportedError
from zerocast.export import DIALECTS, Export, load_pretrained, save_pretrained
from zerocast.refit import Refit

MLX = DIALECTS["mlx/nvfp4"]
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Of the codes 0 to 7."""


def weight(rows: int = 48, columns: int = 160) -> torch.Tensor:
    """BF16, rows of magnitudes from 1e-4 to 3e3, which is more than scales can hold."""
    generator = torch.Generator().manual_seed(rows)
    scales = torch.logspace(-4, 3.5, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * scales).bfloat16()


def by_hand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [M, K] and scales E4M3 [M, K / 16]: ``E4M3(amax / 6)``, and x times the rounded
    inverse of that, to the nearest, of two to the one whose code is even.
    """
    blocks = x.float().view(len(x), -1, 16)
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    scaled = blocks * (1 / scales.float().clamp(min=2**-20))[..., None]
    between = (VALUES[1:] + VALUES[:-1]) / 2
    magnitude = scaled.abs()
    codes = (magnitude[..., None] > between).sum(-1)
    codes += ((magnitude[..., None] == between).any(-1) & (codes % 2 == 1)).long()
    return (codes + 8 * scaled.signbit()).view(x.shape), scales


def test_codes_and_scales_are_those_of_the_formula():
    """Eight codes in a word, the first in its low bits; blocks of which the scale is 0 have other
    codes, which decode to 0 all the same; the decoded values are products of both.
    """
    x = weight()
    whole = zerocast.quantize(x, MLX.recipe, columnwise=False)
    stored = MLX.encode(whole.quantized_storage)
    assert {n: (t.dtype, list(t.shape)) for n, t in stored.items()} == {
        "weight": (torch.uint32, [48, 20]), "scales": (torch.uint8, [48, 10]),
    }  # fmt: skip
    codes, scales = by_hand(x)
    assert_same_bytes(stored["scales"].view(torch.float8_e4m3fn), scales, "scales")
    words = stored["weight"].view(torch.int32).long() & 0xFFFFFFFF
    found = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).view(x.shape)
    is_zero = scales.float().eq(0).repeat_interleave(16, 1)
    assert 0 < is_zero.sum() < is_zero.numel() / 2
    assert_same_bytes(found[~is_zero], codes[~is_zero], "codes")
    decoded = VALUES[found % 8] * torch.where(found > 7, -1, 1)
    decoded *= scales.float().repeat_interleave(16, 1)
    assert_same_bytes(whole.dequantize(torch.float32) + 0.0, decoded + 0.0, "values")


@pytest.mark.parametrize("exchange", ["full", "boundary"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_any_partition_gives_the_unsharded_cast(backend, exchange):
    """Of 1x16 blocks and of 16x16, under one amax and each under its own, on 4 ranks."""
    masters = [weight(48).float(), weight(40).float(), torch.zeros(16, 32)]
    recipes = [MLX.recipe, zerocast.NVFP4BlockScaling(one_level=True)]

    def run(comm, recipe, groups):
        weights = [
            zerocast.empty(m.shape, recipe, columnwise=recipe != MLX.recipe) for m in masters
        ]
        rng = random.Random(len(groups))
        own = [draw_partition(m.numel(), comm.size, rng)[comm.rank] for m in masters]
        shards = [m.view(-1)[e.start : e.end] for m, e in zip(masters, own, strict=True)]
        starts, names = [e.start for e in own], ["a", "b", "c"]
        plan = zerocast.CastPlan(
            weights, shards, starts, comm, names=names, amax_groups=groups, exchange=exchange
        )
        plan.cast()
        plan.all_gather()
        return weights

    with zerocast.use_backend(backend):
        for recipe in recipes:
            for groups in ([], [["a", "b"]]):
                for found in run_in_process(4, partial(run, recipe=recipe, groups=groups)):
                    for at, (cast, master) in enumerate(zip(found, masters, strict=True)):
                        whole = zerocast.quantize(
                            master, recipe, dtype=torch.bfloat16, columnwise=recipe != MLX.recipe
                        )
                        assert_unsharded_cast(cast, whole, f"{recipe}, {groups}, {at}")


def test_a_checkpoint_is_that_of_mlx(tmp_path):
    """Its two sections, the same, without a list of modules; it quantizes what has scales. What is
    read back is stored as it was; a refit's audit asks for no list.
    """
    model = llama(
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    ).bfloat16()
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["down_proj"])
    save = of_masters(model)
    save_pretrained(model, tmp_path, dialect=MLX, **save)
    config, stored = configuration(tmp_path), load_file(tmp_path / "model.safetensors")
    own = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    assert config["quantization"] == config["quantization_config"] == own
    assert "model.layers.0.mlp.down_proj.scales" not in stored
    for name, tensor in load_pretrained(tmp_path).items():
        if isinstance(tensor, zerocast.QuantizedTensor):
            module = name.removesuffix(".weight")
            for part, value in MLX.encode(tensor.quantized_storage).items():
                assert_same_bytes(value, stored[f"{module}.{part}"], f"{module}.{part}")
            master = save["optimizer"].gather_master(model.get_parameter(name)).bfloat16()
            cast = zerocast.quantize(master, MLX.recipe).dequantize()
            assert_same_bytes(tensor.dequantize(), cast, name)
    assert Refit(model, MLX, **save).audit(own)


def test_trained_bytes_are_saved_where_they_have_one_level(tmp_path):
    """Those of two levels would be decoded by the wrong scale; and one level is two, of which one
    is 1, for readers of two.
    """
    layers = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64)}).bfloat16()
    zerocast.nn.convert(layers, "nvfp4")
    message = message_of(InputError, save_pretrained, layers, tmp_path, dialect=MLX)
    assert "whose bytes mlx/nvfp4 cannot hold; give from_masters=True" in message
    one = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64)}).bfloat16()
    zerocast.nn.convert(one, zerocast.NVFP4BlockScaling(one_level=True))
    values = one["up"].weight.dequantize()
    for number, dialect in enumerate((MLX, "compressed-tensors/nvfp4")):
        save_pretrained(one, tmp_path / str(number), dialect=dialect)
        loaded = load_pretrained(tmp_path / str(number))["up.weight"]
        assert_same_bytes(loaded.dequantize(), values, str(dialect))
    scale = load_file(tmp_path / "1" / "model.safetensors")["up.weight_global_scale"]
    assert scale.item() == 1.0


def test_what_mlx_does_not_read_is_refused():
    """Experts, which its checkpoints have in one tensor under other names; a NaN; 4-over-6."""
    model = moe("qwen-moe").bfloat16()
    include = ["model.layers.*.mlp.experts"]
    zerocast.nn.convert(model, "nvfp4", include=include, filter_fqns=["self_attn", "lm_head"])
    message = message_of(InputError, Export, model, MLX, **of_masters(model))
    assert "is the weight of experts, whose codes no server reads from mlx/nvfp4" in message
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    with torch.no_grad():
        layer[0].weight[3, 4] = torch.nan
    export = Export(layer, MLX, include=["0"])
    assert "0.weight holds a NaN" in message_of(NonFiniteError, lambda: [*export.buckets()])
    message_of(UnsupportedError, zerocast.NVFP4BlockScaling, one_level=True, nvfp4_4over6="weights")
