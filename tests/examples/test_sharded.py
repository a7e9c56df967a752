"""The examples of FSDP2 and of tensor parallelism run under both launchers, and would say so if a
byte were wrong.
"""

import sys

import pytest

from tests.examples.test_examples import EXAMPLES, WITH_WRONG_SCALE
from tests.support.nightly import nightly
from tests.support.programs import on_mpi_ranks, on_torchrun_ranks, output_of

FSDP2, TENSOR_PARALLEL = EXAMPLES / "fsdp2.py", EXAMPLES / "tensor_parallel.py"
REFIT = EXAMPLES / "refit.py"


def moved(output: str, what: str) -> tuple[float, float]:
    """The kilobytes that ``what`` moves, and those that it would move in BF16."""
    (line,) = [line for line in output.splitlines() if line.startswith(what)]
    before = [words[-1] for words in (part.split() for part in line.split(" kB")) if words]
    codes, bf16 = (float(word.replace(",", "")) for word in before)
    return codes, bf16


def is_wide(output: str) -> bool:
    """Whether what is not quantized is sent in FP32, in which programs compute where BF16 is slow:
    on a processor without AVX-512.
    """
    return "an element, torch.float32" in output


@pytest.mark.parametrize(
    ("ranks", "program", "over"),
    [
        (3, (FSDP2, "--batch", 6), ""),
        (4, (TENSOR_PARALLEL, "--tensor-parallel", 2), ", split over 2 ranks"),
    ],
    ids=["fsdp2", "tensor_parallel"],
)
def test_codes_are_gathered_on_mpi_ranks(
    ranks: int, program: tuple[object, ...], over: str
) -> None:
    """On 3 ranks, over which no weight divides, and on 2 x 2 the loss falls, an all-gather of the
    weights moves less than a third of BF16 (less than 0.4 of it where the rest is FP32), and every
    code and value is the unsharded cast's.
    """
    said = output_of(on_mpi_ranks(ranks, *program, "--recipe", "nvfp4", "--steps", 3))
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    first, last = (float(line.split()[3]) for line in steps)
    assert last < first
    assert "16 of 37 parameters are all-gathered in codes" in said
    codes, bf16 = moved(said, f"an all-gather of all weights{over}")
    assert codes < (0.4 if is_wide(said) else 1 / 3) * bf16
    assert "equal the unsharded cast on every rank" in said
    assert f"compared on each of {ranks}" in said


def with_quantized_operands(*program: object) -> str:
    """What two steps on two ranks of torchrun print, whose weights are right."""
    said = output_of(on_torchrun_ranks(2, *program, "--steps", 2, "--autocast"))
    assert "equal the unsharded cast on every rank" in said
    assert "compared on each of 2" in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [*map(nightly, ("delayed", "mxfp8")),
     "nvfp4-4over6"],
)  # fmt: skip
def test_fsdp2_runs_under_torchrun(recipe: str) -> None:
    """With quantized activations and gradients, too."""
    with_quantized_operands(FSDP2, "--recipe", recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", nightly("mxfp8")])
def test_quantized_inputs_run_under_torchrun(recipe: str) -> None:
    """With quantized activations and gradients, too; recipes of one scale a tensor gather most
    inputs in codes: four fifths of them.
    """
    said = with_quantized_operands(TENSOR_PARALLEL, "--recipe", recipe, "--tensor-parallel", 2)
    codes, bf16 = moved(said, "all-gathers of the inputs of a forward")
    most = 0.8 if is_wide(said) else 0.6
    assert codes <= most * bf16 if recipe != "mxfp8" else codes >= bf16


@pytest.mark.parametrize("program", [(FSDP2,), (TENSOR_PARALLEL, "--tensor-parallel", 1)])
def test_a_wrong_scale_is_found(program: tuple[object, ...]) -> None:
    """With a wrong scale planted the check names weight, element and both values; exit code 1."""
    options = ["--recipe", "nvfp4", "--steps", 1]
    said = output_of([sys.executable, WITH_WRONG_SCALE, *program, *options], code=1)
    assert "WRONG: blocks.0.attention_in.weight.rowwise_data[0" in said
    assert "and the unsharded cast gives" in said


def test_receivers_have_the_trainer_s_loss() -> None:
    """Two ranks train and one receives, after a delta was lost, too: it refuses the next one, and
    its loss is the trainer's in every step.
    """
    said = output_of(on_mpi_ranks(3, REFIT, "--receivers", 1, "--steps", 3, "--lose", 1))
    assert said.count("the same at 1 receivers") == 3
    assert "step 1: a receiver refused: bytes.weight: this delta follows version 2" in said
    sizes = [float(line.split()[-4]) for line in said.splitlines() if "bytes an element" in line]
    assert sizes[0] == sizes[1] > 2 * sizes[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dialect",
    ["compressed-tensors/nvfp4", nightly("modelopt/mxfp8")],
)
def test_receivers_are_fed_under_torchrun(dialect: str) -> None:
    """Two ranks train and two receive; of FP8, the receiver of the test before."""
    said = output_of(on_torchrun_ranks(4, REFIT, "--dialect", dialect, "--steps", 2))
    assert said.count("the same at 2 receivers") == 2
