"""Parts: rows or columns of a weight, whose casts give the bytes that they have in the whole."""

import copy
import pickle

import pytest
import torch

import zerocast
from tests.support.claims import assert_unsharded_cast
from tests.support.ranks import on_ranks
from tests.support.recipes import VARIANTS
from tests.support.same_bytes import assert_same_bytes
from tests.support.tp_shards import shape_of, unit
from tests.support.values import draw_values
from zerocast import TensorParallelShard
from zerocast.comm import RecordingCommunicator, SingleRank
from zerocast.errors import InputError, RankMismatchError
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import RecipeState

NVFP4, MXFP8 = zerocast.NVFP4BlockScaling(), zerocast.MXFP8BlockScaling()
CURRENT, DELAYED = zerocast.Float8CurrentScaling(), zerocast.DelayedScaling(amax_history_len=3)
ROWWISE, BLOCK = zerocast.Float8RowwiseScaling(), zerocast.Float8BlockScaling()


on_two_ranks = on_ranks("in_process", 2)


class Rank(SingleRank):
    """One rank of a group of ``size``, of which it is asked the numbers only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


# --- which part ---


@pytest.mark.parametrize("shape", [(7, 5), (2, 9), (12,), (6, 3, 4), (1, 1)])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chunks_are_those_of_torch(shape, dim, size):
    """Rank r has the r-th piece of torch.chunk, and nothing where there are fewer pieces."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [*torch.chunk(whole, size, dim)]
    pieces += [whole.narrow(dim, 0, 0)] * (size - len(pieces))
    for rank, piece in enumerate(pieces):
        tp_shard = TensorParallelShard.chunk(shape, dim, Rank(rank, size))
        assert tp_shard.shape == piece.shape
        assert torch.equal(tp_shard.slice_of(whole), piece)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TensorParallelShard((4, 4), 2, 0, 2, SingleRank()),
            r"dim must be 0 \(rows are sharded\) or 1 \(columns are\), of the weight as a matrix "
            r"\[M, K\], got 2\.$",
        ),
        (
            lambda: TensorParallelShard((4,), 0, 0, 1, SingleRank()),
            r"rows are sharded of a weight of two dimensions or more, got shape \(4,\), one row; "
            r"shard its columns, dim=1\.$",
        ),
        (
            lambda: TensorParallelShard((4, 6), 1, 4, 3, SingleRank()),
            r"a shard must lie inside its whole, 6 columns of shape \(4, 6\), got start 4 and size "
            r"3\.$",
        ),
        (
            lambda: TensorParallelShard((4, 3, 2), 0, 0, 4, SingleRank()),
            r"a shard of shape \(4, 3, 2\) must be whole entries of its first dimension, 3 rows "
            r"each, got rows \[0, 4\) of \(4, 3, 2\)\.$",
        ),
        (
            lambda: TensorParallelShard.chunk((4, 5, 3, 2), 1, SingleRank()),
            r"a weight can be sharded in its first dimension or in one of its last two, got "
            r"dimension 1 of shape \(4, 5, 3, 2\); reshape it first\.$",
        ),
    ],
)
def test_what_is_no_part_is_refused(make, message):
    """With what is required and what was given."""
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("recipe", "dim", "unit"),
    [
        (NVFP4, 0, 16), (NVFP4, 1, 16), (MXFP8, 0, 32), (MXFP8, 1, 32), (BLOCK, 0, 128),
        (BLOCK, 1, 128), (CURRENT, 0, 1), (CURRENT, 1, 1), (ROWWISE, 0, 1), (ROWWISE, 1, 1),
    ],
)  # fmt: skip
def test_parts_begin_and_end_between_blocks(recipe, dim, unit):
    """The last one ends where the whole does; blocks that reach across are sharded anywhere; an
    empty shard may lie inside a block.
    """
    whole = torch.Size((300, 256) if dim == 0 else (96, 288))
    lines = whole[dim]
    for start, size in ((0, unit), (unit, lines - unit), (0, lines), (7, 0)):
        tp_shard = TensorParallelShard(whole, dim, start, size, SingleRank())
        assert zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard).shape == tp_shard.shape
    for start, size in () if unit == 1 else ((0, unit + 1), (unit // 2, unit), (1, lines - 1)):
        tp_shard = TensorParallelShard(whole, dim, start, size, SingleRank())
        lines_name = ("rows", "columns")[dim]
        message = (
            f"a shard of a weight under {type(recipe).__name__} must begin and end between blocks, "
            f"at multiples of {unit} {lines_name}, got {lines_name} [{start}, {start + size}) of "
            f"{tuple(whole)}; choose another number of ranks, or leave the weight whole or in high "
            f"precision."
        )
        with pytest.raises(InputError) as refusal:
            zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard)
        assert str(refusal.value) == message


def test_a_copy_less_is_a_block_less():
    """Without the columnwise copy MXFP8 has no block of several rows, and takes any rows."""
    tp_shard = TensorParallelShard((70, 64), 0, 3, 30, SingleRank())
    assert zerocast.empty((30, 64), MXFP8, tp_shard=tp_shard, columnwise=False).shape == (30, 64)
    with pytest.raises(InputError, match="at multiples of 32 rows"):
        zerocast.empty((30, 64), MXFP8, tp_shard=tp_shard)


def test_a_tensor_of_another_shape_is_refused():
    """And so is a whole that the recipe cannot hold."""
    tp_shard = TensorParallelShard((64, 64), 0, 16, 32, SingleRank())
    with pytest.raises(
        InputError, match=r"^rows \[16, 48\) of \(64, 64\) have shape \(32, 64\), got "
    ):
        zerocast.empty((16, 64), NVFP4, tp_shard=tp_shard)
    tp_shard = TensorParallelShard((64, 72), 1, 0, 16, SingleRank())
    with pytest.raises(InputError, match="K, the last dimension, to be a multiple of 16"):
        zerocast.empty((64, 16), NVFP4, tp_shard=tp_shard)


# --- which amaxes parts have in common ---


@pytest.mark.parametrize(
    ("recipe", "dim", "columnwise", "shared"),
    [
        (CURRENT, 0, True, [range(1)]),
        (DELAYED, 1, True, [range(1)]),
        (NVFP4, 0, True, [range(8, 9)]),  # 2x4 blocks, then the tensor
        (NVFP4, 1, True, [range(8, 9)]),
        (zerocast.NVFP4BlockScaling(disable_2d_quantization=True), 0, True, [range(256, 257)]),
        (ROWWISE, 0, True, [range(32, 96)]),  # 32 rows, 64 columns, the tensor
        (ROWWISE, 1, True, [range(32)]),
        (ROWWISE, 0, False, []),
        (MXFP8, 0, True, []),
        (MXFP8, 1, True, []),
        (BLOCK, 0, True, []),
    ],
)
def test_shared_amaxes(recipe, dim, columnwise, shared):
    """The tensor's where a scale depends on it, and those of blocks that reach across parts."""
    whole = (256, 64) if dim == 0 else (32, 256)
    tp_shard = TensorParallelShard(
        whole, dim, 0, 128 if recipe is BLOCK else (32, 64)[dim], SingleRank()
    )
    weight = zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard, columnwise=columnwise)
    assert weight.quantized_storage.shared_amaxes() == shared


@pytest.mark.parametrize("sizes", [(16, 16), (16, 48), (0, 64)])
@on_two_ranks
def test_a_part_of_one_block(comm, sizes):
    """Its block's amax is its own, and the tensor's is that of the whole."""
    x = torch.ones(64, 16)
    x[-1] = 100.0
    whole = x[: sum(sizes)]
    tp_shard = TensorParallelShard(whole.shape, 0, comm.rank * sizes[0], sizes[comm.rank], comm)
    weight = zerocast.quantize(tp_shard.slice_of(whole), NVFP4, tp_shard=tp_shard)
    assert_unsharded_cast(weight, zerocast.quantize(whole, NVFP4), "a shard")


# --- casts of one tensor ---

ONE_DIMENSION = {
    "nvfp4 gradients": zerocast.NVFP4BlockScaling().for_role("grad_output"),
    "nvfp4 inputs": zerocast.NVFP4BlockScaling().for_role("input"),
    "block inputs": zerocast.Float8BlockScaling().for_role("input"),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("recipe", [*VARIANTS.values(), *ONE_DIMENSION.values()])
@on_ranks("in_process", 4)
def test_quantize_gives_the_slices_of_the_whole(comm, recipe, dim):
    """Three parts and an empty one between them; the last rows are no whole block and odd, and
    copies that are cast from the transposed tensor are there, too.
    """
    shape, step = shape_of(recipe), unit(recipe)
    x = draw_values("wide", shape.numel(), 3).view(shape)
    cuts = [0, step, step, 2 * step, shape[dim]]
    whole = zerocast.quantize(x, recipe, dtype=torch.bfloat16, name="w")
    start, end = cuts[comm.rank : comm.rank + 2]
    tp_shard = TensorParallelShard(shape, dim, start, end - start, comm)
    mine = tp_shard.slice_of(x)
    weight = zerocast.quantize(mine, recipe, dtype=torch.bfloat16, name="w", tp_shard=tp_shard)
    assert_unsharded_cast(weight, whole, "a shard")
    assert torch.equal(weight.dequantize(), tp_shard.slice_of(whole.dequantize()))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("role", ["input", "grad_output"])
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8, CURRENT, ROWWISE, BLOCK])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@on_two_ranks
def test_a_quantizer_casts_parts(comm, recipe, role, dim):
    """What a quantizer makes of a part is the part of what it makes of the whole, cast after cast;
    drawn words of gradients, too.
    """
    shape, step = shape_of(recipe), unit(recipe)
    x = draw_values("normal", shape.numel(), 4).view(shape)
    mode = "forward" if role == "input" else "backward"
    alone, parted = (
        RecipeState.create(recipe, mode, 1, name="layer").make_quantizers()[0] for _ in range(2)
    )
    start, end = (0, step, shape[dim])[comm.rank : comm.rank + 2]
    parted.tp_shard = TensorParallelShard(shape, dim, start, end - start, comm)
    out = None
    for step_size in (1.0, 0.3):
        whole = alone.quantize(x * step_size)
        out = parted.quantize(parted.tp_shard.slice_of(x * step_size), out=out)
        assert_unsharded_cast(out, whole, "a shard")


@on_two_ranks
def test_delayed_quantizers_record_the_amax_of_the_whole(comm):
    """All ranks of a part note the same amax, by a cast and by a calibration; so their next scales
    are the same.
    """
    x = torch.tensor([[1.0, -3.0], [0.5, 8.0]])
    for record in ("quantize", "calibrate"):
        state = RecipeState.create(DELAYED, "forward", 1)
        quantizer = state.make_quantizers()[0]
        quantizer.tp_shard = TensorParallelShard.chunk((2, 2), 0, comm)
        getattr(quantizer, record)(quantizer.tp_shard.slice_of(x))
        assert state.amaxes.view(torch.float32).tolist() == [8.0]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, MXFP8, NVFP4], ids=str)
@on_two_ranks
def test_a_fused_function_casts_parts(comm, recipe):
    """What gelu makes of a part is the part of what it makes of the whole; so is its amax."""
    x = draw_values("normal", 128 * 64, 5).view(128, 64).bfloat16()
    x[100:] *= 50
    states = [RecipeState.create(recipe, "forward", 1, name="layer") for _ in range(2)]
    alone, parted = (state.make_quantizers()[0] for state in states)
    parted.tp_shard = TensorParallelShard.chunk(x.shape, 0, comm)
    whole = zerocast.nn.functional.gelu(x, alone)
    made = zerocast.nn.functional.gelu(parted.tp_shard.slice_of(x), parted)
    assert_unsharded_cast(made, whole, "a shard")
    assert_same_bytes(states[1].amaxes, states[0].amaxes, "amaxes")


@on_two_ranks
def test_one_collective_a_cast(comm):
    """Of the shared amaxes alone, and none where parts share none."""
    recorded = RecordingCommunicator(comm)
    quantizer, payload = Quantizer(NVFP4), {NVFP4: 4, CURRENT: 4, ROWWISE: 4 * 96, BLOCK: 0}
    for recipe, nbytes in payload.items():
        quantizer = Quantizer(recipe)
        quantizer.tp_shard = TensorParallelShard.chunk((256, 96), 0, recorded)
        recorded.reset()
        quantizer.quantize(torch.randn(128, 96))
        total = recorded.total()
        assert (total.calls, total.payload_bytes) == (int(nbytes > 0), nbytes)


# --- errors that all ranks hear of ---


@on_two_ranks
def test_an_error_of_one_rank_is_raised_on_all(comm):
    """A part that rank 1 cannot cast is rank 0's error, too."""
    x = torch.randn(16, 32) if comm.rank == 0 else torch.randn(16, 32, dtype=torch.float64)
    with pytest.raises(
        InputError,
        match=r"^on rank 1: tensor must be of torch.float32, torch.bfloat16 or "
        r"torch.float16, got torch.float64; convert it first\.$",
    ):
        zerocast.quantize(x, NVFP4, tp_shard=TensorParallelShard.chunk((32, 32), 0, comm))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda comm: (
                NVFP4 if comm.rank else CURRENT,
                TensorParallelShard.chunk((32, 32), 0, comm),
            ),
            r"every rank must cast its shard of the same weight alike: rank 0 has "
            r"'\(32, 32\) sharded by rows, Float8CurrentScaling\(.*\) torch.float32 with "
            r"rowwise_data, .*' where rank 1 has "
            r"'\(32, 32\) sharded by rows, NVFP4BlockScaling\(.*'\.$",
        ),
        (
            lambda comm: (CURRENT, TensorParallelShard.chunk((32, 32), comm.rank, comm)),
            r"rank 0 has '\(32, 32\) sharded by rows, .*' where rank 1 has "
            r"'\(32, 32\) sharded by columns",
        ),
        (
            lambda comm: (CURRENT, TensorParallelShard((32, 32), 0, 0, 16, comm)),
            r"^the shards of the weight must cover each of the 32 rows of \(32, 32\) exactly once: "
            r"rows \[0, 16\) are owned twice: rank 0 holds \[0, 16\) and rank 1 holds \[0, 16\)\.$",
        ),
        (
            lambda comm: (CURRENT, TensorParallelShard((32, 32), 1, 8 * comm.rank, 8, comm)),
            r"each of the 32 columns of \(32, 32\) exactly once: columns \[16, 32\) are owned by "
            r"no rank\.$",
        ),
    ],
    ids=["recipes", "dimensions", "twice", "gap"],
)
@on_two_ranks
def test_parts_that_make_no_whole_are_refused(comm, given, message):
    """On every rank, with both sides of the disagreement."""
    recipe, tp_shard = given(comm)
    with pytest.raises(RankMismatchError, match=message):
        zerocast.quantize(torch.randn(tp_shard.shape), recipe, tp_shard=tp_shard)


def test_a_quantizer_decides_on_parts_itself():
    """Its shard is an attribute, and what it overwrites must be the same shard."""
    tp_shard = TensorParallelShard((16, 16), 0, 0, 16, SingleRank())
    other, quantizer = Quantizer(NVFP4).make_empty((16, 16)), Quantizer(NVFP4)
    quantizer.tp_shard = tp_shard
    with pytest.raises(
        InputError,
        match=r"out must have tensor-parallel shard rows \[0, 16\) of .*, got None; leave",
    ):
        quantizer.quantize(torch.randn(16, 16, dtype=torch.bfloat16), out=other)


# --- copies ---


def test_copies_stay_parts():
    """A clone, a copy on another device, a deep copy: the same part, of the same group."""
    tp_shard = TensorParallelShard((32, 32), 0, 16, 16, SingleRank())
    weight = zerocast.empty((16, 32), NVFP4, tp_shard=tp_shard)
    for other in (weight.clone(), weight.to("cpu", copy=True), copy.deepcopy(weight)):
        assert other.quantized_storage.tp_shard is tp_shard


def test_a_pickled_part_asks_for_its_group():
    """A group cannot be saved: the place is, and a cast that would need the group says so."""
    tp_shard = TensorParallelShard((32, 32), 0, 0, 32, SingleRank())
    weight = zerocast.quantize(torch.randn(32, 32), NVFP4, tp_shard=tp_shard)
    loaded = pickle.loads(pickle.dumps(weight))
    assert_same_bytes(loaded.rowwise_data, weight.rowwise_data, "codes")
    assert str(loaded.quantized_storage.tp_shard) == str(tp_shard)
    message = (
        r"^rows \[0, 32\) of \(32, 32\) was loaded, and a group cannot be saved; give it one "
        r"before the weight is cast: weight\.quantized_storage\.tp_shard = "
        r"dataclasses\.replace\(tp_shard, comm=\.\.\.\)\.$"
    )
    with pytest.raises(InputError, match=message):
        loaded.copy_(torch.randn(32, 32))
    with pytest.raises(InputError, match=message):
        zerocast.CastPlan([loaded], [torch.randn(32, 32)], [0])
