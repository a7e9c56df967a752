"""Megatron-Core as it is installed trains weights of zerocast on CPU ranks."""

import re
import textwrap
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.programs import on_torchrun_ranks, output_of

megatron = pytest.importorskip("megatron.core", reason="needs pip install '.[megatron]'")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]

HERE = Path(__file__).parent
VERSION = Version(megatron.__version__)
PACKS_4_BITS = HAS_HYBRID_MODEL = Version("0.18") <= VERSION
HYBRID = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=f"megatron-core {VERSION} has no HybridModel"),
]
RECIPES = (
    "delayed", "current", "block", "rowwise", "mxfp8", "mxfp8-2d",
    *["nvfp4", "mxfp4"] * PACKS_4_BITS,
)  # fmt: skip
ELEMENTS, OTHERS = 98_304, 20_224
"""Of the program's model with 64 hidden values: in codes, and in BF16."""


def train(ranks: int, *arguments: object) -> dict[str, str]:
    """By recipe, what the program says; it ends in an error where a byte is wrong."""
    command = on_torchrun_ranks(ranks, HERE / "train_by_megatron.py", *arguments)
    said = re.split(r"^recipe (\S+)\n", output_of(command, timeout=900), flags=re.MULTILINE)
    return dict(zip(said[1::2], said[2::2], strict=True))


def digests(said: str) -> list[str]:
    """Of what the ranks hold together: masters, codes and scales, in the order of the output."""
    return re.findall(r"weights, 0 bytes, (\w+)", said)


UNEVEN = ["--hidden", 80, "--ffn", 208]  # a packed 4-bit layout lost bytes of 80 x 208 on 3 ranks
SPLITS = [(2, []), (3, UNEVEN), (4, []), (2, ["--tp", 2]), (4, ["--tp", 2])]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        *SPLITS,
        (2, ["--overlap"]),
        (4, ["--tp", 2, "--overlap"]),
        *(pytest.param(ranks, [*given, "--hybrid"], marks=HYBRID) for ranks, given in SPLITS),
    ],
    ids=lambda value: value if isinstance(value, int) else "".join(map(str, value)) or "plain",
)
def test_every_byte_is_the_cast_of_the_gathered_masters(ranks, arguments):
    """Twenty steps of an unmodified GPTModel or HybridModel and DistributedOptimizer, every byte of
    every weight after each, with every recipe; the loss ends within two percent of that of BF16
    weights.
    """
    said = train(ranks, "bf16", *RECIPES, *arguments)
    losses = {
        name: [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
        for name, text in said.items()
    }
    assert list(losses) == ["bf16", *RECIPES]
    for name in RECIPES:
        assert len(losses[name]) == len(digests(said[name])) == 20
        assert losses[name][-1] < losses[name][0]
        assert losses[name][-1] == pytest.approx(losses["bf16"][-1], rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "others", "arguments"), [(2, 4, []), (4, 2, ["--tp", 2, "--overlap"])]
)
def test_a_checkpoint_continues_bit_for_bit(ranks, others, arguments, tmp_path):
    """A torch_dist checkpoint: another model continues as if nothing had been, on as many ranks and
    on twice or half as many data-parallel ones, where gradients are the same to the bit. Three hold
    the same masters, codes and scales.
    """
    names = ["delayed", "block", "mxfp8", *["nvfp4"] * PACKS_4_BITS]
    arguments = [*names, *arguments, "--alike", "--steps", 6]
    written = train(ranks, *arguments, "--save", tmp_path)
    continued = train(others, *arguments, "--load", tmp_path)
    on_three = train(3, *arguments, "--load", tmp_path) if ranks == 2 else None
    for name in names:
        *steps, loaded, fourth, fifth, sixth = digests(written[name])
        assert [loaded, fourth, fifth, sixth] == steps[2:]
        assert digests(continued[name]) == steps[2:]
        assert on_three is None or digests(on_three[name])[0] == loaded


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    """Its fields are named on both sides."""
    train(2, "delayed", "--alike", "--steps", 2, "--save", tmp_path)
    (tmp_path / "delayed").rename(tmp_path / "delayed-margin")
    said = "was saved under one of margin 0, and the weight's is of margin 1; build the model"
    with pytest.raises(AssertionError, match=said):
        train(2, "delayed-margin", "--alike", "--steps", 2, "--load", tmp_path)


@pytest.mark.parametrize("way", ["--offload", "--precision-aware"])
def test_masters_stay_those_that_are_cast(way):
    """Half of them updated in copies on the CPU, or beside moments in BF16."""
    said = train(2, "bf16", "block", RECIPES[-1], way, "--steps", 6)
    losses = [re.findall(r"loss ([\d.]+)", text) for text in said.values()]
    assert all(len(digests(said[name])) == 6 for name in ("block", RECIPES[-1]))
    assert [float(each[-1]) for each in losses[1:]] == pytest.approx(
        [float(losses[0][-1])] * 2, 0.02
    )


@pytest.mark.parametrize("model", ["GPTModel", pytest.param("HybridModel", marks=HYBRID[1:])])
def test_the_page_trains(model, tmp_path):
    """The program of docs/megatron.md, and what it says of HybridModel in place of its model."""
    page = (HERE.parents[1] / "docs/megatron.md").read_text()
    program, hybrid = (part.partition("```")[0] for part in page.split("```py\n")[1:])
    if model == "HybridModel":
        program = re.sub(r"^model = GPTModel.*\n", lambda _: hybrid, program, flags=re.MULTILINE)
    assert "import zerocast.adapters.megatron" in program
    assert f"model = {model}(" in program
    on_cpu = "from tests.support.megatron_on_cpu import on_cpu\n\nwith on_cpu():\n"
    (tmp_path / "page.py").write_text(on_cpu + textwrap.indent(program, "    "))
    out = output_of(on_torchrun_ranks(2, tmp_path / "page.py"))
    # Anywhere in a line: torchrun may put two ranks' lines in one.
    assert sorted(re.findall(r"rank (\d) step (\d): loss", out)) == [
        (rank, step) for rank in "01" for step in "012"
    ]


def test_a_step_sends_codes():
    """What one step sends on 2 ranks, byte by byte: docs/megatron.md tells it as a table."""
    said = train(2, "bf16", *RECIPES, "--steps", 1)
    sent = {
        name: {kind: int(count) for kind, count in re.findall(r"(\w+:\w+) (\d+)", text)}
        for name, text in said.items()
    }
    whole = 2 * (ELEMENTS + OTHERS)
    gathered, reduced = (
        "allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced:bfloat16",
    )
    clipping = sent["bf16"]["allreduce:float32"]
    assert sent["bf16"] == {
        f"{gathered}:bfloat16": whole, reduced: whole, "allreduce:float32": clipping
    }  # fmt: skip
    block, row = ELEMENTS // 32, 4 * (64 + 192 + 256 + 64) * 2
    scales = {
        "delayed": 0, "current": 0, "block": 128, "rowwise": row, "mxfp8": block, "mxfp8-2d": 128,
        "nvfp4": ELEMENTS // 256, "mxfp4": block,
    }  # fmt: skip
    for name in RECIPES:
        codes = ELEMENTS // 2 if name.endswith("fp4") else ELEMENTS
        assert sent[name].pop(f"{gathered}:uint8") == codes + 2 * OTHERS
        assert sent[name].pop(reduced) == whole
        assert sent[name].pop("allreduce:float32") == clipping
        assert sent[name].pop("allgather_base:uint8", 0) == scales[name]
        # an amax a weight, and the number of the step, by which ranks notice that one left it out
        assert sent[name] == {"allreduce:int32": 4 * 8 + 8}


def test_what_is_not_served_is_refused_by_name():
    """Two planes of codes, masters elsewhere, whole matrices, flags without which masters are not
    cast, Megatron-FSDP of Megatron-Core and of its own package: each says why. What has no weights
    of zerocast is served.
    """
    out = output_of(on_torchrun_ranks(1, HERE / "refused_by_megatron.py"))
    below = f"need megatron-core 0.18 or newer, got {VERSION},"
    values = "reuse_grad_buf_for_mxfp8_param_ag=True.*leave it False"
    fsdp = r"UnsupportedError.*got Megatron-FSDP, which frees the planes"
    for way, reason in {
        "two_planes": "holds one plane of codes.*enable_2d_quantization=True",
        "masters_in_bf16": "masters that Megatron-Core holds.*does not expose its masters",
        "values_in_buffers": values,
        "plain_values_in_buffers": "served",
        "values_in_the_optimizer": values,
        "frozen": "served",
        "layer_wise": "got its layer-wise one.*shard='matrix'",
        "undistributed": r"\(use_distributed_optimizer=True\), got False",
        "ungathered": r"\(fp8_param_gather=True\), got False",
        "ungathered_4_bits": r"\(fp4_param_gather=True\), got False" if PACKS_4_BITS else below,
        "four_bits": "served" if PACKS_4_BITS else below,
        "two_sizes": "must hold nothing else" if PACKS_4_BITS else below,
        "megatron_fsdp": fsdp,
        "megatron_fsdp_2": fsdp if Version("0.19") <= VERSION else "ModuleNotFoundError",
    }.items():
        assert re.search(f"^{way}: .*{reason}", out, flags=re.MULTILINE), out


def test_the_package_of_megatron_fsdp_is_refused_by_name():
    """Both of its versions, where zerocast is installed in Megatron-Core."""
    pytest.importorskip("megatron_fsdp", reason="needs pip install megatron-fsdp")
    out = output_of(on_torchrun_ranks(1, HERE / "refused_by_megatron.py"))
    for way in ("fsdp_package", "fsdp_package_2"):
        said = f"^{way}: UnsupportedError.*got Megatron-FSDP"
        assert re.search(said, out, flags=re.MULTILINE), out
