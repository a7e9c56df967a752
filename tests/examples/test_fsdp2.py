"""The FSDP2 example runs under both launchers, and would say so if a gathered byte were wrong."""

import sys

import pytest

from tests.examples.test_examples import ROOT, mpiexec, run

FSDP2 = ROOT / "examples" / "fsdp2.py"
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("delayed", "mxfp8")]

WRONGLY = """
import runpy, sys
from zerocast.comm import TorchDistributedCommunicator as Ranks

all_reduce = Ranks.all_reduce_max_

def all_reduce_wrongly(self, amaxes):
    all_reduce(self, amaxes)
    amaxes[amaxes > 0] += 1 << 23  # twice as large

Ranks.all_reduce_max_ = all_reduce_wrongly
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_fsdp2_gathers_codes_on_mpi_ranks() -> None:
    """On 3 ranks, over which no weight divides, the loss falls, an all-gather moves less than a
    third of BF16, and every byte is that of the unsharded cast.
    """
    options = ["--recipe", "nvfp4", "--steps", 3, "--batch", 6]
    finished = run([mpiexec(), "-n", 3, sys.executable, FSDP2, *options])
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    first, last = (float(line.split()[3]) for line in lines if line.startswith("step "))
    assert last < first
    assert "16 of 37 parameters are all-gathered in codes" in finished.stdout
    (moved,) = [line.split() for line in lines if line.startswith("an all-gather of all weights")]
    kilobytes = [float(word.replace(",", "")) for word in moved if word[0].isdigit()]
    assert kilobytes[0] < kilobytes[1] / 3
    assert "equal the unsharded cast on every rank" in finished.stdout
    assert "compared on each of 3" in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*NIGHTLY, "nvfp4-4over6"])
def test_fsdp2_runs_under_torchrun(recipe: str) -> None:
    """With quantized activations and gradients, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, FSDP2]
    finished = run([*command, "--recipe", recipe, "--steps", 2, "--autocast"])
    assert finished.returncode == 0, finished.stderr
    assert "equal the unsharded cast on every rank" in finished.stdout
    assert "compared on each of 2" in finished.stdout


def test_a_wrong_gathered_scale_is_found() -> None:
    """With a wrong scale planted the check names weight, element and both values; exit code 1."""
    options = ["--recipe", "nvfp4", "--steps", 1]
    finished = run([sys.executable, "-c", WRONGLY, FSDP2, *options])
    assert finished.returncode == 1, finished.stderr
    assert "WRONG: blocks.0.attention_in.weight.rowwise_data[0" in finished.stdout
    assert "and the unsharded cast gives" in finished.stdout
