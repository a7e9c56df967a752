"""Which releases of torch are accepted; no older one is installed for it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.nightly import nightly
from zerocast.cli import doctor
from zerocast.errors import OLDEST_TORCH

ROOT = Path(__file__).resolve().parent.parent

# Of the older torch no name is read but its version: all others are gone.
IMPORT = """
import sys, types, torch
older = types.ModuleType("torch")
older.__version__, older.__path__ = torch.torch_version.TorchVersion({version!r}), ["the/folder"]
sys.modules["torch"] = older
try:
    import {module}
except ImportError as error:
    print(type(error).__name__, error, sep=": ")
"""


@pytest.mark.parametrize(
    ("version", "module"),
    [("2.6.0+cu124", "zerocast"), ("2.9.1", "zerocast.optim"),
     ("2.10.0+cpu", "zerocast.adapters.megatron")],
)  # fmt: skip
def test_an_older_torch_is_refused_by_name(version, module):
    """By an ImportError that says what is needed, what is installed and where, and what to do; no
    attribute of the older torch is read before.
    """
    code = IMPORT.format(version=version, module=module)
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stdout.strip() == (
        f"TorchVersionError: zerocast needs torch {OLDEST_TORCH} or newer, and torch {version} is "
        f"installed in the/folder; install a newer one: pip install 'torch>={OLDEST_TORCH}'"
    ), run.stderr


def test_every_place_names_the_same_oldest_torch():
    """pyproject.toml, README.md and doctor name the release that import compares with, and the
    constraints install no older one.
    """
    declared = re.findall(
        r'^dependencies = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert declared == [f"torch>={OLDEST_TORCH}"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert re.findall(r"torch ([\d.]+) or newer", readme) == [OLDEST_TORCH]
    (told,) = (finding for finding in doctor.versions() if finding.name == "torch")
    assert told.text.endswith(f"zerocast needs {OLDEST_TORCH} or newer")
    tested = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested
    assert torch.torch_version.TorchVersion(tested[1]) >= OLDEST_TORCH


COMPILE = """
import sys, torch
torch.__version__ = torch.torch_version.TorchVersion({version!r})
import zerocast
from zerocast.nn import Linear
layer, x, recipe = Linear(64, 64), torch.randn(32, 64), zerocast.MXFP8BlockScaling()
def entered(x):
    with zerocast.autocast(recipe=recipe):
        return layer(x)
def said(function, *args):
    torch._dynamo.reset()
    try:
        return function(*args)
    except (torch._dynamo.exc.Unsupported, zerocast.UnsupportedError) as error:
        return "torch 2.13" in str(error)
with zerocast.autocast(recipe=recipe):
    found = [
        torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x)),
        said(torch.compile(layer, backend="aot_eager", fullgraph=True), x),
        said(torch.compile(entered, backend="aot_eager", fullgraph=True), x),
        said(torch.export.export, layer, (x,)),
    ]
print(*(each if isinstance(each, bool) else "made" for each in found))
"""


@pytest.mark.parametrize("version", [nightly("2.11.0"), "2.12.1"])
def test_graphs_of_an_older_torch_hold_no_quantized_product(version):
    """It stays outside, with the same bytes; a graph that must be whole, and an export, are refused
    by an error that names the release they need.
    """
    command = [sys.executable, "-W", "ignore", "-c", COMPILE.format(version=version)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stdout.split() == ["True"] * 4, run.stdout + run.stderr
