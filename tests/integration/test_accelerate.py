"""transformers' Trainer, accelerate, peft and torchao's optimizers, as they are, on 2 CPU ranks."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.exports import assert_served
from tests.support.programs import on_torchrun_ranks, output_of
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]

HERE = Path(__file__).parent


def needs(*packages: str) -> None:
    """A skip that names what is missing."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}; pip install '.[integration]' brings it")


def on_two_ranks(program: str, *arguments: object) -> str:
    """What it printed, once it has ended well."""
    return output_of(on_torchrun_ranks(2, HERE / program, *arguments), timeout=900)


@pytest.mark.parametrize(
    ("recipe", "kind", "ram_efficient"),
    [
        ("delayed", "FULL_STATE_DICT", "yes"),
        ("delayed", "SHARDED_STATE_DICT", "no"),
        ("nvfp4-drawn", "SHARDED_STATE_DICT", "yes"),
    ],
)
def test_the_trainer_saves_and_resumes_under_fsdp2(recipe, kind, ram_efficient, tmp_path):
    """A run of transformers' Trainer that is resumed from its checkpoint, full or sharded, ends
    with the bytes of the uninterrupted one: masters, and what the recipe remembers of them.
    """
    needs("transformers", "accelerate")
    out = on_two_ranks("train_by_trainer.py", tmp_path, recipe, kind, ram_efficient, "{}")
    assert "the same bytes after resuming: " in out
    assert "14 states" in out


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True, "fused": True}, torch.bfloat16),
        ({"fsdp_config": {"activation_checkpointing": True}}, torch.float32),
        ({"compile": True}, torch.float32),
    ],
    ids=["plain", "bf16-fused", "checkpointing", "compile"],
)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_the_trainer_leads_from_a_model_to_a_servers_folder(options, dtype, tmp_path):
    """Trained under FSDP2 in NVFP4, resumed, exported from two ranks: the folder's codes are those
    of one cast of the masters in the Trainer's last checkpoint, where weights that servers fuse
    share an amax; transformers loads their values through compressed-tensors.
    """
    needs("transformers", "accelerate", "compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    arguments = ("nvfp4", "FULL_STATE_DICT", "no", json.dumps(options))
    out = on_two_ranks("train_by_trainer.py", tmp_path, *arguments)
    assert "the same bytes after resuming: " in out
    masters = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    stored = assert_served(tmp_path / "served", masters, RECIPES["nvfp4"], dtype)
    as_values = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "served", dtype=torch.bfloat16, quantization_config=as_values
    )
    for name, weight in loaded.named_parameters():
        assert_same_bytes(weight, stored[name].bfloat16(), name)


@pytest.mark.parametrize(("package", "kind"), [("peft", "peft"), ("torchao", "adamw8bit")])
def test_what_others_bring_trains_under_fsdp2(package, kind, tmp_path):
    """A converted Llama, sharded by accelerate. peft's LoRA around it: the adapters stay in high
    precision and train, and the frozen base is gathered in the codes of the unsharded cast; merged,
    they are in what is exported.
    torchao's AdamW8bit, whose step is compiled, writes masters, and what is gathered follows them.
    """
    needs("transformers", "accelerate", package)
    said = on_two_ranks("train_by_accelerate.py", kind, "nvfp4", tmp_path)
    assert ("the adapters are in what is served" in said) == (kind == "peft")
    assert "14 weights are the unsharded cast" in said


def test_ddp_reduces_gradients_once():
    """``accelerator.prepare(model)`` alone puts DDP around it: a ``ZeroOptimizer`` refuses to take
    gradients during backward beside it, or has the mean of the ranks.
    """
    needs("accelerate")
    out = on_two_ranks("ddp_by_accelerate.py")
    assert out.count("refused: this gradient was taken during backward") == 2
    assert out.count("moved by -0.800 and -0.800") == 2


PLUGIN_ALONE = """
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

import zerocast

model = torch.nn.Sequential(torch.nn.Linear(32, 32))
zerocast.nn.convert(model, "nvfp4", weights="master")
accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = accelerator.prepare(model)
assert not any(isinstance(module, FSDPModule) for module in model.modules())
try:
    model(torch.randn(4, 32))
except zerocast.UnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plugin_that_shards_nothing_is_named(tmp_path, ranks):
    """On CPUs accelerate's FSDP2 plugin does nothing: the error of the first forward says so."""
    needs("accelerate")
    program = tmp_path / "plugin_alone.py"
    program.write_text(PLUGIN_ALONE)
    assert output_of(on_torchrun_ranks(ranks, program)).count("nothing on CPUs") == ranks


BY_ZERO = """
import sys
from transformers import Trainer, TrainingArguments
import zerocast
from tests.support.llama import HIDDEN_96, llama, tokens

args = TrainingArguments(sys.argv[1], max_steps=2, save_steps=1, report_to=[], use_cpu=True)
model = llama(HIDDEN_96).to(args.device)
zerocast.nn.convert(model, "nvfp4", weights="quantized", filter_fqns=["lm_head"])
optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters(), lr=1e-3)
rows = [{"input_ids": row, "labels": row} for row in tokens(0)]
try:
    Trainer(model, args, train_dataset=rows, optimizers=(optimizer, None)).train()
except zerocast.errors.ZerocastError as error:
    print(error)
"""


def test_what_the_trainer_cannot_do_with_a_zero_optimizer_is_refused(tmp_path):
    """The Trainer cannot save codes; on several CPU ranks it copies the model that it is given."""
    needs("transformers", "accelerate")
    program = tmp_path / "by_zero.py"
    program.write_text(BY_ZERO)
    alone = output_of([sys.executable, program, tmp_path])
    assert "a quantized weight has no memory of its nominal dtype" in alone
    together = output_of(on_torchrun_ranks(2, program, tmp_path))
    assert together.count("must stay in the buffer") == 2
