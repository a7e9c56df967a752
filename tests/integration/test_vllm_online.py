"""What is exported has the bytes that vLLM makes of the same weights in BF16 while it loads them:
by its own quantizers, and in its own models, fused layers included.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerocast
from tests.support import vllm_on_cpu
from tests.support.programs import output_of
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS, save_pretrained
from zerocast.lab.conformance import package_of
from zerocast.lab.conformance.causes import FormulaChanges, restated

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: scripts/serving.sh"),
]

CHANNEL = "compressed-tensors/fp8-channel-vllm"
SCHEMES = {
    "fp8_per_tensor": "compressed-tensors/fp8-tensor-vllm",
    "fp8_per_channel": CHANNEL,
    "fp8_per_block": "deepseek/fp8-vllm",
    "mxfp8": "modelopt/mxfp8",
}
DIVIDES = "it divides elements by the stored scale"


def every_amax(block: int, chunk: int) -> list[torch.Tensor]:
    """BF16 [1, n * block]: a block for each positive finite value, which is its amax; the other
    elements are drawn below it.
    """
    amaxes = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    shares = torch.rand(len(amaxes), block, generator=torch.Generator().manual_seed(0))
    weight = (amaxes[:, None].double() * shares).bfloat16()
    weight[:, 1::2] *= -1
    weight[:, 0] = amaxes
    return [part.reshape(1, -1) for part in weight.split(chunk)]


def by_zerocast(dialect: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the dialect."""
    whole = zerocast.quantize(weight, DIALECTS[dialect].recipe, columnwise=False)
    return DIALECTS[dialect].encode(whole.quantized_storage)


@pytest.mark.parametrize(
    ("dialect", "block", "chunk"), [("deepseek/fp8-vllm", 128, 2048), ("modelopt/mxfp8", 32, 2**15)]
)
def test_blocks_of_every_amax(dialect, block, chunk):
    """Codes and scales, all of them."""
    quantize = package_of("vllm").writes[dialect]
    parts = every_amax(block, chunk)
    assert sum(part.numel() for part in parts) == block * 0x7F7F
    for part in parts:
        theirs = quantize(part.float())
        for (name, own), their in zip(by_zerocast(dialect, part).items(), theirs, strict=True):
            assert_same_bytes(own.view(torch.uint8), their.contiguous().view(torch.uint8), name)


def test_rows_of_every_amax():
    """Every scale, and the codes that a division gives: one in some thousands is the one next to
    ours.
    """
    weight = torch.cat([part.view(-1, 96) for part in every_amax(96, 2**15)])
    codes, scales = package_of("vllm").writes[CHANNEL](weight.float())
    divided, inverses = restated(CHANNEL, weight.float(), FormulaChanges(DIVIDES))
    assert_same_bytes(codes.contiguous().view(torch.uint8), divided.view(torch.uint8), "codes")
    assert_same_bytes(scales, inverses, "scales")
    own = by_zerocast(CHANNEL, weight)
    assert_same_bytes(own["weight_scale"], scales, "scales")
    steps = own["weight"].view(torch.uint8).int() - codes.contiguous().view(torch.uint8).int()
    assert steps.abs().max() == 1
    assert 0 < steps.count_nonzero() < 1e-3 * steps.numel()


def llama() -> torch.nn.Module:
    """Of transformers, BF16, whose fused layers are multiples of the blocks."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=128, intermediate_size=384, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_vllm_quantizes_while_it_loads(tmp_path, monkeypatch, scheme):
    """Holds the bytes of the export, of every linear layer but the head; of rows all scales, and
    all codes but those that the division moves by one.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    model = llama()
    model.save_pretrained(tmp_path / "bf16")
    zerocast.nn.convert(model, "nvfp4", filter_fqns=["lm_head"])
    optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), lr=1e-3)
    options = {"dialect": SCHEMES[scheme], "optimizer": optimizer, "from_masters": True}
    save_pretrained(model, tmp_path / "codes", **options)
    stored = load_file(tmp_path / "codes" / "model.safetensors")

    with vllm_on_cpu.without_kernels(tmp_path):
        by_scale = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR).forward_native
        monkeypatch.setattr(ops, "scaled_fp8_quant", lambda x, scale: by_scale(x, scale))
        read = vllm_on_cpu.load(tmp_path / "bf16", quantization=scheme)
    scales_of = ("weight_scale", "weight_scale_inv")
    held = {n: m for n, m in read.named_modules() if any(hasattr(m, each) for each in scales_of)}
    assert len(held) == 8
    for name, module in held.items():
        (part,) = (each for each in scales_of if hasattr(module, each))
        parts = vllm_on_cpu.fused(read, name)
        codes = torch.cat([stored[f"{each}.weight"].view(torch.uint8) for each in parts])
        scales = [stored[f"{each}.{part}"] for each in parts]
        scale = getattr(module, part).detach()
        expected = scales[0] if scale.numel() == 1 else torch.cat(scales)
        assert_same_bytes(scale.reshape(expected.shape), expected, name)
        weight = module.weight.detach()
        weight = weight if weight.is_contiguous() else weight.t()
        steps = weight.view(torch.uint8).int() - codes.int()
        assert steps.abs().max() <= (scheme == "fp8_per_channel"), name
        assert steps.count_nonzero() < 1e-3 * steps.numel(), name


def test_the_kernel_of_mxfp4():
    """vLLM's own, by Triton's interpreter, since Triton has none for CPUs here."""
    program = Path(__file__).with_name("mxfp4_by_vllm.py")
    assert "the same bytes" in output_of([sys.executable, program], timeout=600)
