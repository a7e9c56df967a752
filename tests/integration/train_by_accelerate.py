"""Trains adapters by accelerate under FSDP2, and quantized optimizer states, on ranks of torchrun.

    train_by_accelerate.py peft|adamw8bit RECIPE FOLDER

``peft``: LoRA adapters around a converted model, whose base weights are frozen masters; they train
and stay in high precision. Merged, they are in the masters that a server's folder is cast from.
``adamw8bit``: torchao's AdamW8bit steps the masters. In both what is gathered is the unsharded cast
of the masters at the end, and the loss has fallen.
"""

import sys

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

import zerocast
from tests.sharded.sharded import assert_converted_casts, whole_masters
from tests.support.exports import assert_served
from tests.support.llama import HIDDEN_96, llama, tokens
from tests.support.recipes import RECIPES


def prepared(model, make_optimizer):
    """Model and optimizer, sharded block by block by accelerate."""
    # accelerate has FSDP2 for processes with accelerators alone, and does nothing there that
    # CPUs cannot do.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(model, make_optimizer(model.parameters()))


def export_merged(model, recipe, folder: str) -> None:
    """Merge the adapters into the sharded masters, and write what servers load into ``folder``."""
    before, merged = whole_masters(model), model.merge_and_unload()
    masters = whole_masters(merged)
    zerocast.export.save_pretrained(merged, folder, dialect="compressed-tensors/nvfp4")
    assert_served(folder, masters, recipe, torch.float32)
    layer = "model.layers.1.self_attn.v_proj"
    base, b, a = (
        before[f"base_model.model.{layer}.{part}.weight"]
        for part in ("base_layer", "lora_B.default", "lora_A.default")
    )
    torch.testing.assert_close(masters[f"{layer}.weight"], base + 2 * b @ a)  # alpha / r is 8 / 4


def main(kind: str, name: str, folder: str) -> None:
    """Six steps."""
    recipe, model = RECIPES[name], llama(HIDDEN_96)
    zerocast.nn.convert(model, recipe, weights="master", filter_fqns=["lm_head"])
    make_optimizer = torch.optim.AdamW
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        again = zerocast.nn.convert(model, recipe, weights="master", filter_fqns=["lm_head"])
        assert not again.converted
    else:
        from torchao.optim import AdamW8bit as make_optimizer
    accelerator, model, optimizer = prepared(model, lambda p: make_optimizer(p, lr=1e-2))
    losses = []
    for step in range(6):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        zerocast.sharded.precompute_scales_for_fsdp(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert_converted_casts(model, recipe, 14)
    if kind == "peft":
        export_merged(accelerator.unwrap_model(model), recipe, folder)
        print("the adapters are in what is served")
    print(f"14 weights are the unsharded cast; loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
