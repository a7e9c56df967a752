"""Trains a small Llama by transformers' Trainer under accelerate's FSDP2, on CPU ranks of torchrun.

    train_by_trainer.py FOLDER RECIPE STATE_DICT_TYPE RAM_EFFICIENT OPTIONS

Four steps, saved after the second one. Another Trainer, around another model, resumes there and
must end with the same bytes: masters, and what the recipe remembers of them. Where that is nothing,
it writes the folder FOLDER/served. OPTIONS are TrainingArguments in JSON, of which those of
fsdp_config go beside the others, "fused" has zerocast's AdamW, and "compile" compiles each layer.
"""

import json
import sys

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainerCallback, TrainingArguments

import zerocast
from tests.support.llama import HIDDEN_96, llama, tokens
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes

DIALECT = "compressed-tensors/nvfp4"


def pretend_accelerators() -> None:
    """accelerate has FSDP2 for processes with accelerators alone, and does nothing there that
    CPUs cannot do.
    """
    AcceleratorState._reset_state()  # of an earlier Trainer
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class CastAll(TrainerCallback):
    """Casts all masters after a step, with one all-reduce."""

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        zerocast.sharded.precompute_scales_for_fsdp(model)


def trained(arguments: list[str], seed: int, resume: str | None) -> torch.nn.Module:
    """The sharded model after training; on every rank."""
    folder, recipe, kind, ram_efficient, given = arguments
    changes = json.loads(given)
    fused, compiled = changes.pop("fused", False), changes.pop("compile", False)
    pretend_accelerators()
    options = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": kind,
            "cpu_ram_efficient_loading": ram_efficient == "yes",
            **changes.pop("fsdp_config", {}),
        },
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        report_to=[],
        seed=0,
        **changes,
    )
    model = llama(HIDDEN_96, seed=seed)
    zerocast.nn.convert(model, RECIPES[recipe], weights="master", filter_fqns=["lm_head"])
    for layer in model.model.layers if compiled else ():
        layer.compile(backend="eager")
    rows = [{"input_ids": row, "labels": row} for step in range(8) for row in tokens(step)]
    trainer = Trainer(
        model=model,
        args=options,
        train_dataset=rows,
        callbacks=[CastAll()] if fused else [],
        optimizer_cls_and_kwargs=(zerocast.optim.FusedAdamW, {"lr": 3e-3}) if fused else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    report = zerocast.sharded.report(trainer.model)
    assert sum(p.recipe is not None for p in report.parameters) == 14
    return trainer.model


if __name__ == "__main__":
    folder, whole = sys.argv[1], StateDictOptions(full_state_dict=True)
    expected = get_model_state_dict(trained(sys.argv[1:], 0, None), options=whole)
    resumed = trained(sys.argv[1:], 1, f"{folder}/checkpoint-2")
    actual = get_model_state_dict(resumed, options=whole)
    assert actual.keys() == expected.keys()
    states = [name for name in expected if name.endswith("weight_state")]
    assert len(states) == (14 if RECIPES[sys.argv[2]].state else 0)
    for name, tensor in expected.items():
        assert_same_bytes(actual[name], tensor, name)
    print(f"the same bytes after resuming: {len(expected)} tensors, {len(states)} states")
    if not states:
        print(zerocast.export.save_pretrained(resumed, f"{folder}/served", dialect=DIALECT))
