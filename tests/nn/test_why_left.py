"""The table of docs/recipes.md, "Why a layer was left": what it says is printed, and helps."""

import re
from pathlib import Path

import torch
from torch import nn

from tests.nn.test_included import Conv1D
from zerocast.nn import convert

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def model() -> nn.ModuleDict:
    """A weight for each row."""
    layers = nn.ModuleDict(
        {
            "embed": nn.Embedding(48, 32),
            "head": nn.Linear(32, 48, bias=False),
            "mix": Conv1D(32, 48),
            "odd": nn.Linear(40, 32),
            "attn": nn.MultiheadAttention(32, 2),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "hooked": nn.Linear(32, 32),
            "wide": nn.Linear(32, 32, dtype=torch.float64),
            "conv": nn.Conv1d(32, 32, 1),
            "skipped": nn.Linear(32, 32),
        }
    )
    layers["head"].weight = layers["embed"].weight
    layers["hooked"].weight.register_hook(lambda gradient: None)
    return layers


def test_every_reason_of_the_table_is_printed_and_every_remedy_helps():
    """Of one model: first all of them are left, then all are converted but the convolution."""
    section = PAGE.read_text().split("## Why a layer was left")[1].split("\n## ")[0]
    printed = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    report = convert(model(), "nvfp4", filter_fqns=["skip"])
    reasons = [p.why for p in report.coverage.parameters] + list(report.left.values())
    embedding = nn.ModuleDict({"embed": nn.Embedding(48, 32)})
    reasons += [p.why for p in convert(embedding, "nvfp4").coverage.parameters]
    assert len(printed) == 10
    assert [text for text in printed if not any(text in reason for reason in reasons)] == []
    mended = model()
    nn.utils.parametrize.remove_parametrizations(mended["norm"], "weight")
    mended["attn"].out_proj = nn.Linear(32, 32)
    mended["hooked"].weight._backward_hooks.clear()
    mended["wide"].float()
    include = ["embed", "mix", "attn.in_proj_weight", "conv"]
    report = convert(mended, {"odd": "fp8-block", "*": "nvfp4"}, include=include)
    assert list(report.left) == ["conv.weight"]
