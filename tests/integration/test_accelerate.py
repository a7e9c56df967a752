"""transformers' Trainer, accelerate, peft and torchao's optimizers, as they are, on 2 CPU ranks."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import on_torchrun_ranks, output_of

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
        ("nvfp4", "FULL_STATE_DICT", "no"),
    ],
)
def test_the_trainer_saves_and_resumes_under_fsdp2(recipe, kind, ram_efficient, tmp_path):
    """A run of transformers' Trainer that is resumed from its checkpoint, full or sharded, ends
    with the bytes of the uninterrupted one: masters, and what the recipe remembers of them.
    """
    needs("transformers", "accelerate")
    out = on_two_ranks("train_by_trainer.py", tmp_path, recipe, kind, ram_efficient)
    assert "the same bytes after resuming: " in out
    assert f"{0 if recipe == 'nvfp4' else 14} states" in out


@pytest.mark.parametrize(("package", "kind"), [("peft", "peft"), ("torchao", "adamw8bit")])
def test_what_others_bring_trains_under_fsdp2(package, kind):
    """A converted Llama, sharded by accelerate. peft's LoRA around it: the adapters stay in high
    precision and train, and the frozen base is gathered in the codes of the unsharded cast.
    torchao's AdamW8bit, whose step is compiled, writes masters, and what is gathered follows them.
    """
    needs("transformers", "accelerate", package)
    said = on_two_ranks("train_by_accelerate.py", kind, "nvfp4")
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
