"""Trains a small Llama by transformers' Trainer under accelerate's FSDP2, on CPU ranks of torchrun.

    train_by_trainer.py FOLDER RECIPE STATE_DICT_TYPE RAM_EFFICIENT

Four steps, saved after the second one. Another Trainer, around another model, resumes there and
must end with the same bytes: masters, and what the recipe remembers of them.
"""

import sys

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Trainer, TrainingArguments

import zerocast
from tests.support.llama import HIDDEN_96, llama, tokens
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes


def pretend_accelerators() -> None:
    """accelerate has FSDP2 for processes with accelerators alone, and does nothing there that
    CPUs cannot do.
    """
    AcceleratorState._reset_state()  # of an earlier Trainer
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def trained(arguments: list[str], seed: int, resume: str | None) -> dict[str, torch.Tensor]:
    """The full state dict after training; on every rank."""
    folder, recipe, kind, ram_efficient = arguments
    pretend_accelerators()
    options = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": kind,
            "cpu_ram_efficient_loading": ram_efficient == "yes",
        },
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        report_to=[],
        seed=0,
    )
    model = llama(HIDDEN_96, seed=seed)
    zerocast.nn.convert(model, RECIPES[recipe], weights="master", filter_fqns=["lm_head"])
    rows = [{"input_ids": row, "labels": row} for step in range(8) for row in tokens(step)]
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    report = zerocast.sharded.report(trainer.model)
    assert sum(p.recipe is not None for p in report.parameters) == 14
    return get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))


if __name__ == "__main__":
    expected = trained(sys.argv[1:], 0, None)
    actual = trained(sys.argv[1:], 1, f"{sys.argv[1]}/checkpoint-2")
    assert actual.keys() == expected.keys()
    states = [name for name in expected if name.endswith("weight_state")]
    assert len(states) == (14 if RECIPES[sys.argv[2]].state else 0)
    for name, tensor in expected.items():
        assert_same_bytes(actual[name], tensor, name)
    print(f"the same bytes after resuming: {len(expected)} tensors, {len(states)} states")
