"""DeepSpeed as it is installed trains weights of zerocast on CPU ranks."""

import os
import re
from pathlib import Path

import pytest

from tests.support.programs import on_torchrun_ranks, output_of

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="needs DeepSpeed; pip install '.[deepspeed]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]

HERE = Path(__file__).parent
RECIPES = ["current", "block", "rowwise", "mxfp8", "mxfp8-2d", "mxfp4", "nvfp4", "delayed"]
OPTIONS = [
    "fp16", "fp32", "accumulate", "clip", "scattered", "round-robin", "overlap", "aligned",
    "groups", "frozen", "bf16-masters", "autocast", "fp32-gradients",
]  # fmt: skip


def train(ranks: int, cases: list[str], steps: int = 20) -> dict[str, list[float]]:
    """The losses of each case, once every byte of every step was right."""
    program = HERE / "train_by_deepspeed.py"
    out = output_of(on_torchrun_ranks(ranks, program, *cases, "--steps", steps), timeout=900)
    rows = re.findall(r"(\S+) step \d+: loss ([\d.]+), (\d+) weights, (\d+) bytes", out)
    assert len(rows) == steps * len(cases)
    for case, _, weights, wrong in rows:
        quantized = "0" if case.startswith("bf16:") else "2"
        assert (weights, wrong) == (quantized, "0"), rows
    return {case: [float(row[1]) for row in rows if row[0] == case] for case in cases}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_byte_is_the_cast_of_the_gathered_masters(ranks, stage):
    """Twenty steps under each recipe; every byte after each, and losses as under BF16."""
    losses = train(ranks, [f"{recipe}:{stage}" for recipe in ["bf16", *RECIPES]])
    bf16 = losses.pop(f"bf16:{stage}")
    for case, each in losses.items():
        assert each[-1] < each[0]
        assert each[-1] == pytest.approx(bf16[-1], rel=0.05), case


def test_settings_of_deepspeed():
    """Dtypes, accumulation, clipping, and each way to keep and to send gradients."""
    cases = ["mxfp8:1:frozen", *(f"nvfp4:2:{option}" for option in OPTIONS)]
    cases += [f"block:1:{option}" for option in OPTIONS if option != "fp32-gradients"]
    train(3, cases, steps=4)


@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoints_continue_bit_for_bit(stage, tmp_path):
    """Weights, masters and moments of a training that goes on from a checkpoint, after loading and
    three steps later. From a checkpoint of BF16 weights, codes are the cast of its masters; from
    weights alone, masters are the values of its codes.
    """
    program = HERE / "resume_by_deepspeed.py"
    recipes = ["bf16", "current", "nvfp4", "delayed", "mxfp8"]
    out = output_of(on_torchrun_ranks(2, program, tmp_path, stage, *recipes), timeout=900)
    rows = re.findall(r"(\S+): loaded (\d+), continued (\d+), others (\d+)", out)
    assert [row[0] for row in rows] == recipes
    assert {number for row in rows for number in row[1:]} == {"0"}, rows


def test_universal_checkpoints_continue_on_other_ranks(tmp_path):
    """Saved on 2 ranks and loaded on 3: masters and bytes of weights are those that were saved."""
    program = HERE / "universal_by_deepspeed.py"
    arguments = [tmp_path, 2, "current", "nvfp4", "mxfp8"]
    output_of(on_torchrun_ranks(2, program, *arguments), timeout=900)
    out = output_of(on_torchrun_ranks(3, program, *arguments), timeout=900)
    assert re.findall(r"(\S+): (\d+) wrong", out) == [
        ("current", "0"), ("nvfp4", "0"), ("mxfp8", "0")
    ]  # fmt: skip


def test_codes_are_what_travels():
    """An NVFP4 step gathers little more than a quarter of the bytes of BF16, FP8 half of them."""
    program = HERE / "bytes_by_deepspeed.py"
    out = output_of(on_torchrun_ranks(2, program, "bf16:2", "block:2", "nvfp4:2"), timeout=900)
    gathered = {
        case: sum(map(int, re.findall(r"(?:all_gather|broadcast)\w* torch\.\w+ (\d+)", row)))
        for case, row in re.findall(r"(\S+:2): (.*)", out)
    }
    assert gathered["nvfp4:2"] < 0.26 * gathered["bf16:2"]
    assert gathered["block:2"] < 0.51 * gathered["bf16:2"]


REFUSED = """
import torch
import deepspeed
deepspeed.ops.__compatible_ops__.clear()
import zerocast
import zerocast.adapters.deepspeed
zerocast.adapters.deepspeed.install()
torch.distributed.init_process_group("gloo")
for zero, more in [
    ({"stage": 0}, {}), ({"stage": 3}, {}), ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, {}),
    ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}),
    ({"stage": 1}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    ({"stage": 2}, {"compile": {"deepcompile": True}}),
    ({"stage": 2}, {"hybrid_engine": {"enabled": True}}),
    ({"stage": 2}, {"tensor_parallel": {"autotp_size": 2}}),
    ({"stage": 2}, {"expert_parallel": {"enabled": True}}), ({"stage": 2}, {}),
]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    zerocast.nn.convert(model, "nvfp4")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config |= {"zero_optimization": zero, **more}
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.offload_states()
    except zerocast.UnsupportedError as error:
        print(error)
torch.distributed.destroy_process_group()
"""


def test_what_cannot_be_right_is_refused(tmp_path):
    """Each setting is refused by its name, and so is to move masters and weights away."""
    program = tmp_path / "refused.py"
    program.write_text(REFUSED)
    out = output_of(on_torchrun_ranks(1, program), timeout=600)
    names = re.findall(r"hold codes under ([\w.]+)", out)
    assert names == [
        "zero_optimization.stage", "zero_optimization.stage", "zenflow", "offload_optimizer",
        "data_types.grad_accum_dtype", "compile.deepcompile", "hybrid_engine",
        "tensor_parallel.autotp_size", "expert_parallel",
    ]  # fmt: skip
    assert "got offload_states of hp_params, lp_params" in out


UNLIKE = """
import torch
import deepspeed
deepspeed.ops.__compatible_ops__.clear()
import zerocast
import zerocast.adapters.deepspeed
zerocast.adapters.deepspeed.install()
torch.distributed.init_process_group("gloo")
for second in ("current", None):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    recipe = second if torch.distributed.get_rank() else "nvfp4"
    if recipe:
        zerocast.nn.convert(model, recipe)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except zerocast.RankMismatchError as error:
        print(error)
torch.distributed.destroy_process_group()
"""


def test_unlike_models_are_refused_on_all_ranks(tmp_path):
    """A rank has weights of another recipe, or none that hold codes: every rank raises."""
    program = tmp_path / "unlike.py"
    program.write_text(UNLIKE)
    out = output_of(on_torchrun_ranks(2, program), timeout=600)
    pairs = re.findall(r"rank 0 has '(.*?)' where rank 1 has '(.*?)'", out)
    kinds = {"NVFP4BlockScaling", "Float8CurrentScaling", "nothing more"}
    found = [{kind for kind in kinds if kind in " ".join(pair)} for pair in pairs]
    assert sorted(found, key=sorted) == [
        *[{"NVFP4BlockScaling", "Float8CurrentScaling"}] * 2,
        *[{"NVFP4BlockScaling", "nothing more"}] * 2,
    ]  # fmt: skip


def test_the_guide_runs(tmp_path):
    """The program of docs/deepspeed.md, as it stands, on 2 ranks."""
    guide = HERE.parents[1].joinpath("docs/deepspeed.md").read_text()
    block = guide.split("```py\n")[1].split("```")[0]
    block = block.replace('"checkpoints"', repr(str(tmp_path / "checkpoints")))
    gloo_only = "import deepspeed.ops\ndeepspeed.ops.__compatible_ops__.clear()\n"
    program = tmp_path / "guide.py"
    program.write_text(gloo_only + block)
    output_of(on_torchrun_ranks(2, program), timeout=600)
    assert (tmp_path / "checkpoints" / "latest").exists()
