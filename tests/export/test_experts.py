"""Experts in checkpoints: each projection of each expert as servers read linear layers."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.support.claims import message_of
from tests.support.exports import (
    assert_received,
    contents,
    of_masters,
    pieces_of,
    update,
)
from tests.support.ranks import on_gloo, shared_folder
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import run_in_process
from zerocast.errors import InputError
from zerocast.export import load_pretrained, save_pretrained
from zerocast.layout import Extent
from zerocast.refit import Receiver, Refit

ROWS = 32
"""Of a projection."""


class Experts(torch.nn.Module):
    """Three experts, fused as transformers keeps them."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        spread = torch.logspace(-2, 2, 3).view(3, 1, 1)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 2 * rows, 64) * spread)
        self.down_proj = torch.nn.Parameter(torch.randn(3, 64, rows) * spread)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate_up, down in zip(self.gate_up_proj, self.down_proj, strict=True):
            gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
            x = x + (gate * up) @ down.t()
        return x


class Transposed(torch.nn.Module):
    """One that keeps its matrices as [in, out]."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.randn(2, 32, 64))


def model(rows: int = ROWS) -> torch.nn.ModuleDict:
    """The same at every call."""
    torch.manual_seed(0)
    parts = {
        "embed": torch.nn.Embedding(16, 64),
        "experts": Experts(rows),
        "transposed": Transposed(),
    }
    return torch.nn.ModuleDict(parts | {"head": torch.nn.Linear(64, 16, bias=False)})


INCLUDE = ["embed", "experts", "transposed"]
OF_EXPERTS = {"include": INCLUDE, "filter_fqns": ["head"], "strict": True}
"""Without linear layers, which the dialect of gpt-oss has no codes of."""
NAMES = {
    f"experts.{e}.{part}.weight" for e in range(3) for part in ("gate_proj", "up_proj", "down_proj")
}


def projection(whole: torch.nn.ModuleDict, name: str) -> tuple[torch.Tensor, Extent]:
    """The matrix that holds the projection of this name, and its rows there."""
    _, expert, part, _ = name.split(".")
    if part == "down_proj":
        matrix = whole["experts"].down_proj[int(expert)]
        return matrix, Extent(0, len(matrix))
    matrix = whole["experts"].gate_up_proj[int(expert)]
    half = len(matrix) // 2
    return matrix, Extent(0, half) if part == "gate_proj" else Extent(half, 2 * half)


@pytest.mark.parametrize(
    ("recipe", "dialect"),
    [
        ("nvfp4", "compressed-tensors/nvfp4"),
        ("nvfp4", "modelopt/nvfp4"),
        ("mxfp8", "modelopt/mxfp8"),
        ("current", "compressed-tensors/fp8-tensor"),
        ("rowwise", "compressed-tensors/fp8-channel"),
        ({"experts": "mxfp4", "*": "block"}, "deepseek/v4"),
    ],
)
def test_the_bytes_of_experts_are_those_that_they_were_trained_with(recipe, dialect, tmp_path):
    """Decoded from the checkpoint each projection is the value that the model computes with; what
    has no place there has its value in high precision.
    """
    trained = model().bfloat16()
    zerocast.nn.convert(trained, recipe, include=INCLUDE, strict=True)
    save_pretrained(trained, tmp_path, dialect=dialect)
    loaded = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.keys() == NAMES | {"embed.weight", "transposed.down_proj", "head.weight"}
    for name in NAMES:
        matrix, rows = projection(trained, name)
        value = matrix.clone()[rows.start : rows.end]
        assert_same_bytes(loaded[name].dequantize(), value, name)
    for name in ("embed.weight", "transposed.down_proj"):
        assert_same_bytes(loaded[name], trained.get_parameter(name).dequantize(), name)


@pytest.mark.parametrize(
    "dialect",
    ["compressed-tensors/nvfp4", "deepseek/fp8", "deepseek/v4", "compressed-tensors/fp8-tensor"],
)
def test_experts_are_cast_from_masters_as_the_dialect_reads_them(dialect, tmp_path):
    """On 1, 2 and 3 ranks the same files; gate and up share their tensor amax, and in blocks of
    128x128, which would span both, each projection has its own. The layer beside them is cast by
    the same dialect, of DeepSeek-V4 in another format.
    """
    given = model()
    zerocast.nn.convert(given, "nvfp4", include=INCLUDE, strict=True)
    plain, found = model(), zerocast.export.DIALECTS[dialect]
    scheme = found.of("experts.0.down_proj.weight").recipe

    def save(comm):
        own = copy.deepcopy(given)
        options = {"dtype": torch.bfloat16, "bucket_bytes": 2048, **of_masters(own, comm)}
        save_pretrained(own, tmp_path / str(comm.size), dialect=dialect, **options)
        return contents(tmp_path / str(comm.size))

    one, two, three = (run_in_process(size, save)[0] for size in (1, 2, 3))
    assert one == two == three
    loaded = load_pretrained(tmp_path / "1")
    for name in NAMES:
        matrix, rows = projection(plain, name)
        shared = scheme.scales_tensor  # of one amax, and of blocks inside rows
        of = matrix if shared else matrix[rows.start : rows.end]
        expected = zerocast.quantize(of.bfloat16(), scheme, columnwise=False).dequantize()
        expected = expected[rows.start : rows.end] if shared else expected
        assert_same_bytes(loaded[name].dequantize(), expected, name)
    head = zerocast.quantize(plain["head"].weight.bfloat16(), found.recipe, columnwise=False)
    assert loaded["head.weight"].recipe == found.recipe
    assert_same_bytes(loaded["head.weight"].dequantize(), head.dequantize(), "head")


def test_deepseek_v4_has_experts_and_the_rest_in_one_checkpoint():
    """Named in one section; whole, and as deltas after a change: the same bytes on a receiver. A
    name that belongs to the other format is refused.
    """
    given = model()
    zerocast.nn.convert(given, "mxfp8", include=INCLUDE, strict=True)
    options = {"dtype": torch.bfloat16, **of_masters(given, lr=0.1)}
    refit, receiver = Refit(given, "deepseek/v4", **options), Receiver()
    for _ in range(2):
        update(refit, receiver)
        sent = assert_received(refit, receiver)
        for parameter in given.parameters():
            parameter.grad = torch.ones(parameter.shape)
        options["optimizer"].step()
    dtypes = {name: tensor.dtype for name, tensor in sent.items() if name.endswith(".weight")}
    assert dtypes.pop("head.weight") == torch.float8_e4m3fn
    assert dtypes.pop("embed.weight") == torch.bfloat16
    assert dtypes == dict.fromkeys(NAMES, torch.int8)
    assert {str(each.recipe) for each in refit.audit()} == {
        "MXFP4BlockScaling", "Float8BlockScaling", "None"
    }  # fmt: skip
    section = zerocast.export.DIALECTS["deepseek/v4"].quantization_config([])
    assert (section["weight_block_size"], section["expert_dtype"]) == ([128, 128], "fp4")
    message = message_of(
        InputError,
        lambda: Refit(
            given, "deepseek/v4", names={"head.weight": "experts.head.weight"}, **options
        ),
    )
    assert "head.weight is stored as deepseek/v4, and names gives it that of" in message


@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_that_lie_the_other_way_round_are_cast_turned(size):
    """For gpt-oss, whole, as shards and as deltas after a step: the casts of the matrices
    [out, in], from shards of an optimizer that end inside of matrices; three ranks have two.
    """
    dialect = zerocast.export.DIALECTS["gpt-oss/mxfp4"]
    given = model()
    zerocast.nn.convert(given, dialect.recipe, **OF_EXPERTS)

    def run(comm):
        own, receiver = copy.deepcopy(given), Receiver()
        options = {"dtype": torch.bfloat16, **of_masters(own, comm, lr=0.1)}
        optimizer = options["optimizer"]
        refit = Refit(own, dialect, bucket_bytes=2048, **options)
        for step in range(2):
            draw = torch.Generator().manual_seed(step)
            for parameter in own.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
            update(refit, receiver)
            pieces = pieces_of(refit, receiver.tensors)
            for name, parameter in own.named_parameters():
                value = optimizer.gather_master(parameter).bfloat16()
                if value.dim() < 3:
                    continue
                value = value.mT.contiguous() if "transposed" in name else value
                whole = zerocast.quantize(value, dialect.recipe, columnwise=False)
                for part, tensor in dialect.encode(whole.quantized_storage).items():
                    assert_same_bytes(receiver.tensors[name + part], tensor, name + part)
        own = (extents for name, extents in pieces.items() if name.endswith("down_proj_blocks"))
        return sum(extent.size for extents in own for extent in extents)

    assert sum(run_in_process(size, run)) == (3 * 64 * ROWS + 2 * 64 * 32) // 2


def test_trained_bytes_that_lie_the_other_way_round_are_refused(tmp_path):
    """Their scales are along the other side."""
    trained = model().bfloat16()
    recipe = zerocast.MXFP4BlockScaling(enable_2d_quantization=True)
    zerocast.nn.convert(trained, recipe, **OF_EXPERTS)
    assert message_of(InputError, save_pretrained, trained, tmp_path, dialect="gpt-oss/mxfp4") == (
        "transposed.down_proj has matrices [in, out], and the checkpoint needs scales along the "
        "other dimension than MXFP4BlockScaling(enable_2d_quantization=True); give "
        "from_masters=True to cast transposed masters."
    )


def test_trained_blocks_that_two_projections_share_are_refused(tmp_path):
    """A server reads each projection under blocks of its own."""
    trained = model(rows=24).bfloat16()
    zerocast.nn.convert(trained, "nvfp4", include=["experts"], filter_fqns=["head"])
    assert message_of(
        InputError, save_pretrained, trained, tmp_path, dialect="compressed-tensors/nvfp4"
    ) == (
        "experts.gate_up_proj has two projections of 24 rows, and a block of 16 rows has rows of "
        "both; give from_masters=True to cast each separately."
    )


@pytest.mark.mpi(min_size=4)
@on_gloo(4)
def test_masters_of_experts_that_fsdp2_shards_are_exported(comm):
    """Three experts on four ranks, by the bytes of training and anew from the masters: the values
    of the unsharded casts.
    """
    own = model()
    zerocast.nn.convert(own, "nvfp4", weights="master", include=INCLUDE, strict=True)
    for part in own.children():
        fully_shard(part)
    folder, plain = shared_folder(comm), model()
    for from_masters in (False, True):
        options = {"from_masters": from_masters, "dtype": torch.bfloat16}
        path = folder / str(from_masters)
        save_pretrained(own, path, dialect="compressed-tensors/nvfp4", group=comm, **options)
        loaded = load_pretrained(path)
        for name in NAMES:
            matrix, rows = projection(plain, name)
            scheme = zerocast.NVFP4BlockScaling(disable_2d_quantization=from_masters)
            expected = zerocast.quantize(matrix.bfloat16(), scheme, columnwise=False).dequantize()
            value = expected[rows.start : rows.end]
            assert_same_bytes(loaded[name].dequantize(), value, f"{name} {from_masters}")
        for name in ("embed.weight", "transposed.down_proj"):
            assert_same_bytes(loaded[name], plain.get_parameter(name).bfloat16(), name)


@pytest.mark.mpi(min_size=4)
@on_gloo(4)
def test_masters_that_fsdp2_shards_are_cast_turned(comm):
    """Two experts on four ranks for gpt-oss: the bytes of training, whose blocks are square, and
    those of a new cast.
    """
    own, plain = model(), model().transposed.down_proj.detach().bfloat16().mT.contiguous()
    square = zerocast.MXFP4BlockScaling(enable_2d_quantization=True)
    zerocast.nn.convert(own, square, weights="master", **OF_EXPERTS)
    for part in own.children():
        fully_shard(part)
    folder = shared_folder(comm)
    for from_masters, recipe in ((False, square), (True, zerocast.MXFP4BlockScaling())):
        options = {"from_masters": from_masters, "dtype": torch.bfloat16}
        path = folder / str(from_masters)
        save_pretrained(own, path, dialect="gpt-oss/mxfp4", group=comm, **options)
        expected = zerocast.quantize(plain, recipe, columnwise=False).dequantize()
        loaded = load_pretrained(path)["transposed.down_proj"]
        assert_same_bytes(loaded.dequantize(), expected, f"from_masters={from_masters}")


@pytest.mark.mpi(min_size=4)
@on_gloo(4)
def test_experts_that_are_not_converted_are_sent_by_projections(comm):
    """Three on four ranks under FSDP2, whole, as pieces and as deltas: the BF16 values of each
    projection, every element once.
    """
    own, plain = model(), model()
    zerocast.nn.convert(own, "mxfp8", weights="master")
    for part in own.children():
        fully_shard(part)
    options = {"dtype": torch.bfloat16, "from_masters": True, "group": comm}
    refit, receiver = Refit(own, "modelopt/mxfp8", **options), Receiver()
    update(refit, receiver)
    sent = assert_received(refit, receiver)
    pieces = pieces_of(refit, sent)
    for name in sorted(NAMES):  # in one order on all ranks
        matrix, rows = projection(plain, name)
        value = matrix.detach()[rows.start : rows.end].bfloat16()
        assert_same_bytes(sent[name], value, name)
        sizes = comm.all_gather_object(sum(piece.size for piece in pieces[name]))
        assert sum(sizes) == value.numel()
    assert sent.keys() == pieces.keys()
