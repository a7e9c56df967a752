"""Trains torchtitan's Llama debug model by its own Trainer, on CPU ranks, cell by cell.

    train_by_torchtitan.py FOLDER [PATTERN]

A cell is a recipe, activation checkpoints, and a mode; PATTERN, a regular expression, chooses cells
by these three words. What follows a slash is torchtitan's ``spmd_backend``, where that is not its
default. Each cell prints one line::

    nvfp4 full eager: trained loss=8.0447 8.0536 7.9530; 8 of 15 parameters are all-gathered in ...
    delayed no eager: refused: UnsupportedError: recipe_name='delayed' is not supported: ...
    tensorwise no tp: FAILED: RuntimeError: ...

It has trained if every loss is finite and near that of the unconverted model, activation
checkpoints change none, and every gathered weight is its part of the cast of the whole masters. It
is refused by an error of zerocast before the first step. ``resumed`` is a run of 6 steps, and the
last 3 again from its checkpoint. Ranks are forked from one process, which has imported what they
need.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import queue
import re
import socket
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule

import zerocast
from tests.sharded.sharded import gathered, multiplied, reshard, whole_masters
from tests.support.claims import assert_unsharded_cast
from zerocast.recipes import RECIPES
from zerocast.sharded.all_gather import gather_of
from zerocast.tensors.wrapped_names import without_wrappers


def prepare_cpu() -> None:
    """Let torchtitan, which is imported after this, take the CPU for its device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=2**30),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)


prepare_cpu()

from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from zerocast.adapters.torchtitan import LinearConverter, recipe_named  # noqa: E402

SECONDS = 600
"""That a rank may take."""
SOME = ("tensorwise", "mxfp8_rceil", "nvfp4")
NAMES = sorted(
    {
        *RECIPES,
        *("tensorwise", "mxfp8_rceil", "mxfp8_cublas_rceil"),
        *("rowwise_with_gw_hp", "mxfp8_rceil_wgrad_with_hp", "mxfp8_cublas"),
    }
)
"""Every recipe_name that the converter knows, served or refused."""

CHECKPOINTS = ("no", "selective", "full")
BACKENDS = ("", "/partial_dtensor", "/full_dtensor")


class Stopped(Exception):
    """A cell's line, for one that has not trained."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration."""

    recipe: str
    checkpoints: str
    mode: str

    def __str__(self) -> str:
        return f"{self.recipe} {self.checkpoints} {self.mode}"


def cells() -> Iterator[Cell]:
    """All, those that need little first."""
    for name in NAMES:
        yield from (Cell(name, checkpoints, "eager") for checkpoints in CHECKPOINTS)
    for name in SOME:
        yield from (Cell(name, "no", f"eager{backend}") for backend in BACKENDS[1:])
        yield Cell(name, "no", "resumed")
        yield from (Cell(name, "no", f"tp{backend}") for backend in BACKENDS)
        yield Cell(name, "no", "tp-quantized-by-forwards")
        yield from (Cell(name, "no", f"fsdp+tp{backend}") for backend in BACKENDS)
        yield from (Cell(name, checkpoints, "compiled") for checkpoints in CHECKPOINTS)
    yield from (Cell("nvfp4", checkpoints, "compiled-weights-only") for checkpoints in CHECKPOINTS)


# --- its configuration ---


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and two that begin and end a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<begin>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def texts() -> Any:
    """Of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:8]
    return Dataset.from_dict({"text": [file.read_text()[:8000] for file in files]})


def configuration(cell: Cell, folder: Path) -> Any:
    """torchtitan's Llama debug model with two blocks, as ``cell`` says."""
    DATASETS["texts"] = DatasetConfig("", lambda path: texts(), lambda sample: sample["text"])
    own = folder / f"rank{os.environ['RANK']}"
    write_tokenizer(own)
    mode, _, backend = cell.mode.partition("/")
    converter = LinearConverter.Config(
        recipe_name=cell.recipe,
        enable_fsdp_float8_all_gather=mode != "tp-quantized-by-forwards",
        precompute_float8_dynamic_scale_for_fsdp=mode == "fsdp+tp",
        filter_fqns=["lm_head"],
        model_compile_enabled="compiled" in mode,
        weights_only=mode == "compiled-weights-only",
    )
    config = llama3_debugmodel()
    converters = None if cell.recipe == "none" else [converter]
    config.model_spec = model_registry("debugmodel", converters=converters)
    layers = config.model_spec.model.layers
    del layers[2:]
    for layer in layers:  # FlexAttention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    checkpoints = {"no": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    config.activation_checkpoint = checkpoints[cell.checkpoints]
    config.compile = CompileConfig(enable="compiled" in mode)
    config.parallelism.tensor_parallel_degree = 2 if "tp" in mode else 1
    config.parallelism.spmd_backend = backend or "spmd_types"
    config.training.local_batch_size, config.training.seq_len = 2, 128
    config.training.steps = 6 if mode == "resumed" else 3
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable = mode == "resumed"
    config.checkpoint.interval = 3
    config.validator.enable = False
    config.debug.seed = 0
    config.dataloader.dataset = "texts"
    config.hf_assets_path, config.dump_folder = str(own), str(folder / str(cell).replace(" ", "-"))
    return config


# --- one rank of a cell ---


def train(trainer: Any, recipe_name: str) -> tuple[list[float], str]:
    """The loss of each step, and what is gathered in codes."""
    try:
        (model,) = trainer.model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):  # else gloo is asked for an operation that it lacks
                module.set_force_sum_reduction_for_comms(True)
        losses: list[float] = []
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        trainer.train()
        said = "" if recipe_name == "none" else check_codes(model, recipe_name)
        return losses, said
    finally:
        trainer.close()


def check_codes(model: torch.nn.Module, recipe_name: str) -> str:
    """Compare every weight that is gathered in codes with its part of the cast of the whole
    masters; what zerocast's report says of the gathers. Collective.
    """
    report = zerocast.sharded.report(model)
    in_codes = [p.name for p in report.parameters if p.recipe is not None]
    masters = whole_masters(model)
    gathers = {name: gather_of(p) for name, p in model.named_parameters() if gather_of(p)}
    assert in_codes == list(map(without_wrappers, gathers)), (in_codes, list(gathers))
    for name, weight in gathered(model).items():
        if name in gathers:
            recipe, gather = recipe_named(recipe_name), gathers[name]
            whole = zerocast.quantize(masters[name], recipe, dtype=torch.bfloat16, name=gather.name)
            own = multiplied(weight)
            assert_unsharded_cast(own, whole, name, with_state=False, tp_shard=gather.tp_shard)
    reshard(model)
    return str(report).partition(",")[0]


# --- ranks ---


def _rank(send: Any, rank: int, ranks: int, port: int, cell: Cell, folder: Path, load: int) -> None:
    """Train as one rank, in a process of its own; send what came of it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    trains = False
    try:
        config = configuration(cell, folder)
        if load:
            config.checkpoint.load_step, config.checkpoint.load_only = load, True
        trainer = config.build()
        trains = True
        send.put(train(trainer, cell.recipe))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        is_refusal = not trains and isinstance(error, zerocast.errors.ZerocastError)
        send.put(f"{'refused' if is_refusal else 'FAILED'}: {text}")


@functools.cache
def result_of(cell: Cell, folder: Path, load: int = 0) -> tuple[list[float], str]:
    """The losses of a cell, and what is gathered in codes; from the checkpoint of step ``load``, if
    that is given.

    Raises:
        Stopped: if a rank has raised an error, or none has said anything for long.
    """
    fork = multiprocessing.get_context("fork")
    ranks, said = 4 if "fsdp+tp" in cell.mode else 2, fork.Queue()
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    each = [
        fork.Process(target=_rank, args=(said, rank, ranks, port, cell, folder, load))
        for rank in range(ranks)
    ]
    for process in each:
        process.start()
    try:
        for _ in each:
            found = said.get(timeout=SECONDS)
            if isinstance(found, str):
                raise Stopped(found)
        for process in each:
            process.join()
    except queue.Empty:
        raise Stopped(f"FAILED: no rank has ended in {SECONDS} s") from None
    finally:
        for process in each:
            process.kill()
            process.join()
    return found


# --- cells ---


def near(losses: list[float], expected: list[float], *, rel: float) -> None:
    """Compare step by step."""
    assert len(losses) == len(expected), (losses, expected)
    for loss, other in zip(losses, expected, strict=True):
        assert abs(loss - other) <= rel * abs(other), (losses, expected)


def run(cell: Cell, folder: Path) -> str:
    """Train it, and compare it with what it must be near to, or equal."""
    losses, said = result_of(cell, folder)
    mode = cell.mode.partition("/")[0]
    compiled = mode.startswith("compiled")
    plain = "eager" if compiled else mode.removesuffix("-quantized-by-forwards")
    near(losses, result_of(Cell("none", "no", plain), folder)[0], rel=0.01)
    if plain != mode and not compiled:  # the parts of one scale for the whole weight, however made
        near(losses, result_of(dataclasses.replace(cell, mode=plain), folder)[0], rel=1e-4)
    if cell.checkpoints != "no":
        kept = result_of(dataclasses.replace(cell, checkpoints="no"), folder)[0]
        near(losses, kept, rel=1e-3 if compiled else 0)
    if mode == "resumed":
        again = result_of(cell, folder, load=3)[0]
        # torchtitan saves tensors alone, so draws of gradients begin anew.
        draws = recipe_named(cell.recipe).for_role("grad_output").state
        near(again[:1], losses[3:4], rel=0)
        near(again, losses[3:], rel=1e-3 if draws else 0)
    return f"trained loss={' '.join(f'{loss:.4f}' for loss in losses)}; {said}"


def outcome(cell: Cell, folder: Path) -> str:
    """What its line says."""
    try:
        return run(cell, folder)
    except Stopped as error:
        return str(error)
    except AssertionError as error:
        return f"FAILED: {error}"


def main(folder: str, pattern: str = "") -> None:
    """Run the cells."""
    counted = dict.fromkeys(("trained", "refused", "FAILED"), 0)
    for cell in cells():
        if re.search(pattern, str(cell)):
            said = outcome(cell, Path(folder))
            counted[re.split("[ :]", said)[0]] += 1
            print(f"{cell}: {said[:400]}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counted.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
