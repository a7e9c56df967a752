"""The tensor-parallel example runs under both launchers, and would say so if a byte were wrong."""

import sys

import pytest

from tests.examples.test_examples import ROOT, mpiexec, run
from tests.examples.test_fsdp2 import WRONGLY

TENSOR_PARALLEL = ROOT / "examples" / "tensor_parallel.py"


def moved(output: str, what: str) -> tuple[float, float]:
    """The kilobytes that ``what`` moves, and those that it would move in BF16."""
    (line,) = [line for line in output.splitlines() if line.startswith(what)]
    before = [words[-1] for words in (part.split() for part in line.split(" kB")) if words]
    codes, bf16 = (float(word.replace(",", "")) for word in before)
    return codes, bf16


def test_parts_of_weights_are_cast_and_gathered_on_mpi_ranks() -> None:
    """On 2 x 2 ranks the loss falls, gathers of weights move less than a third of BF16, and every
    code and value is that of the unsharded cast.
    """
    options = ["--recipe", "nvfp4", "--steps", 3, "--tensor-parallel", 2]
    finished = run([mpiexec(), "-n", 4, sys.executable, TENSOR_PARALLEL, *options])
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    first, last = (float(line.split()[3]) for line in lines if line.startswith("step "))
    assert last < first
    assert "16 of 37 parameters are all-gathered in codes" in finished.stdout
    codes, bf16 = moved(finished.stdout, "an all-gather of all weights, split over 2 ranks")
    assert codes < bf16 / 3
    assert "equal the unsharded cast on every rank" in finished.stdout
    assert "compared on each of 4" in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", pytest.param("mxfp8", marks=pytest.mark.nightly)])
def test_quantized_inputs_run_under_torchrun(recipe: str) -> None:
    """With quantized activations and gradients, too; recipes of one scale a tensor gather most
    inputs in codes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    options = ["--recipe", recipe, "--steps", 2, "--autocast", "--tensor-parallel", 2]
    finished = run([*command, TENSOR_PARALLEL, *options])
    assert finished.returncode == 0, finished.stderr
    codes, bf16 = moved(finished.stdout, "all-gathers of the inputs of a forward")
    assert codes <= 0.6 * bf16 if recipe != "mxfp8" else codes >= bf16
    assert "equal the unsharded cast on every rank" in finished.stdout
    assert "compared on each of 2" in finished.stdout


def test_a_wrong_scale_of_a_part_is_found() -> None:
    """With a wrong scale planted the check names weight, element and both values; exit code 1."""
    options = ["--recipe", "nvfp4", "--steps", 1, "--tensor-parallel", 1]
    finished = run([sys.executable, "-c", WRONGLY, TENSOR_PARALLEL, *options])
    assert finished.returncode == 1, finished.stderr
    assert "WRONG: blocks.0.attention_in.weight.rowwise_data[0" in finished.stdout
    assert "and the unsharded cast gives" in finished.stdout
