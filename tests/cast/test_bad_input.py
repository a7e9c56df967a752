"""Bad input is refused with the reason, on every rank or on none, and nothing is written."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator, InProcessCommunicator, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError, ZerocastError

SHAPE = (32, 48)
NUMEL = 32 * 48
NVFP4 = zerocast.NVFP4BlockScaling()
FP8 = zerocast.Float8CurrentScaling()


def weight(recipe: zerocast.Recipe = NVFP4, seed: int = 0) -> zerocast.QuantizedTensor:
    """A quantized weight whose every byte is known."""
    g = torch.Generator().manual_seed(seed)
    return zerocast.quantize(torch.randn(SHAPE, generator=g), recipe, dtype=torch.bfloat16)


def arguments(comm: Communicator) -> dict[str, Any]:
    """A correct call: two weights, each cut evenly over the ranks."""
    cut = [NUMEL * r // comm.size for r in range(comm.size + 1)]
    start, end = cut[comm.rank], cut[comm.rank + 1]
    return {
        "model_weights": [weight(NVFP4, 1), weight(FP8, 2)],
        "master_weights": [torch.ones(end - start), torch.ones(end - start)],
        "start_offsets": [start, start],
        "group": comm,
    }


def refuse(
    world_size: int,
    spoil: Callable[[dict[str, Any], Communicator], None],
    error: type[ZerocastError],
    *texts: str,
) -> None:
    """``spoil`` makes the call of some ranks wrong: all ranks raise the same error with ``texts``;
    no byte changes.

    Said of the functional call and of the plan.
    """
    for call in (zerocast.quantize_master_weights, zerocast.CastPlan):

        def on_rank(comm: Communicator, call: Callable[..., object] = call) -> str:
            kwargs = arguments(comm)
            held = [w for w in kwargs["model_weights"] if isinstance(w, zerocast.QuantizedTensor)]
            before = [{k: v.clone() for k, v in w.quantized_storage.buffers.items()} for w in held]
            spoil(kwargs, comm)
            with pytest.raises(error) as raised:
                call(**kwargs)
            for w, buffers in zip(held, before, strict=True):
                for name, buffer in buffers.items():
                    assert_same_bytes(w.quantized_storage.buffers[name], buffer, name)
            return str(raised.value)

        messages = run_in_process(world_size, on_rank)
        assert len(set(messages)) == 1, messages
        for text in texts:
            assert text in messages[0], messages[0]


def set_entry(
    key: str, index: int, value: object, rank: int | None = None
) -> Callable[[dict[str, Any], Communicator], None]:
    """Spoils one entry of one list, on one rank or on all."""

    def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
        if rank is None or rank == comm.rank:
            kwargs[key][index] = value

    return spoil


@pytest.mark.parametrize("world_size", [1, 3])
class TestOneRankIsWrong:
    """The last rank gives a wrong argument; every rank hears of it."""

    def test_master_dtype(self, world_size: int) -> None:
        """A float64 master is refused, with the dtypes that are read."""
        bad = set_entry("master_weights", 1, torch.ones(4, dtype=torch.float64), world_size - 1)
        texts = "model_weights[1]", "torch.float32, torch.bfloat16 or torch.float16, got", "float64"
        refuse(world_size, bad, InputError, *texts)

    def test_master_device(self, world_size: int) -> None:
        """A master on another device than its weight is refused."""
        bad = set_entry("master_weights", 0, torch.ones(4, device="meta"), world_size - 1)
        refuse(world_size, bad, InputError, "model_weights[0]", "device cpu", "meta")

    def test_master_not_contiguous(self, world_size: int) -> None:
        """A strided master is refused with its strides."""
        bad = set_entry("master_weights", 0, torch.ones(8, 8).t(), world_size - 1)
        refuse(world_size, bad, InputError, "contiguous", "(1, 8)")

    def test_start_offset_missing(self, world_size: int) -> None:
        """A master without a start offset is refused."""
        bad = set_entry("start_offsets", 0, None, world_size - 1)
        refuse(world_size, bad, InputError, "start_offsets must say", "got None")

    def test_start_offset_without_master(self, world_size: int) -> None:
        """A start offset without a master is refused."""
        bad = set_entry("master_weights", 0, None, world_size - 1)
        refuse(world_size, bad, InputError, "no master weight")

    def test_start_offset_negative(self, world_size: int) -> None:
        """A negative start offset is refused."""
        bad = set_entry("start_offsets", 1, -1, world_size - 1)
        refuse(world_size, bad, InputError, "start offset -1", f"{NUMEL} elements")

    def test_start_offset_is_no_int(self, world_size: int) -> None:
        """A start offset of another type is refused."""
        bad = set_entry("start_offsets", 1, 0.5, world_size - 1)
        refuse(world_size, bad, InputError, "as an int", "0.5")

    def test_past_the_end(self, world_size: int) -> None:
        """A master that reaches past the end of its weight is refused."""
        bad = set_entry("start_offsets", 0, NUMEL - 1, world_size - 1)
        refuse(world_size, bad, InputError, f"inside the weight's {NUMEL} elements")

    def test_list_lengths(self, world_size: int) -> None:
        """Lists of different lengths are refused, and the message names the list."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == world_size - 1:
                kwargs["start_offsets"].pop()

        refuse(world_size, spoil, InputError, "start_offsets", "2 model_weights", "1 entries")

    @pytest.mark.parametrize("value", [None, 0, iter(())], ids=["None", "number", "iterator"])
    @pytest.mark.parametrize("argument", ["model_weights", "master_weights", "start_offsets"])
    def test_no_list(self, world_size: int, argument: str, value: object) -> None:
        """What has no entries is refused by name on every rank, not by a TypeError on one."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == world_size - 1:
                kwargs[argument] = value

        refuse(world_size, spoil, InputError, f"{argument} must be a list", type(value).__name__)

    def test_not_a_quantized_weight(self, world_size: int) -> None:
        """A plain tensor among the weights is refused."""
        bad = set_entry("model_weights", 0, torch.ones(SHAPE), world_size - 1)
        refuse(world_size, bad, InputError, "model_weights[0]", "QuantizedTensor", "got Tensor")

    def test_weight_twice(self, world_size: int) -> None:
        """The same weight twice is refused, an alias of it too."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == world_size - 1:
                kwargs["model_weights"][1] = kwargs["model_weights"][0].detach()

        refuse(
            world_size, spoil, InputError, "model_weights[1] is the same weight as model_weights[0]"
        )

    @pytest.mark.parametrize(
        ("codes", "text"),
        [
            (torch.zeros(3, dtype=torch.uint8), "got 3"),
            (torch.zeros(4, dtype=torch.int8), "torch.uint8"),
            (torch.zeros(8, dtype=torch.uint8)[::2], "contiguous"),
            (b"codes", "got bytes"),
        ],
    )
    def test_shard_buffer(self, world_size: int, codes: object, text: str) -> None:
        """A shard's own code buffer of another type, size, dtype or stride is refused."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            kwargs["fsdp_shard_model_weights"] = [None, None]
            if comm.rank == world_size - 1:
                kwargs["fsdp_shard_model_weights"][0] = codes

        refuse(world_size, spoil, InputError, "fsdp_shard_model_weights", text)


def test_every_communicator_raises_on_all_ranks(ranks: Any) -> None:
    """A wrong master on the last rank, a gap, and a NaN: the same error on all ranks, no hang."""

    def on_rank(comm: Communicator) -> list[str]:
        messages = []
        last = comm.rank == comm.size - 1
        for spoil in (
            lambda k: k["master_weights"].__setitem__(1, torch.ones(2, dtype=torch.float64)),
            lambda k: k["master_weights"].__setitem__(0, k["master_weights"][0][:-1]),
            lambda k: k["master_weights"][0].fill_(torch.nan),
        ):
            kwargs = arguments(comm)
            if last:
                spoil(kwargs)
            with pytest.raises(ZerocastError) as raised:
                zerocast.quantize_master_weights(**kwargs, check_finite=True)
            messages.append(str(raised.value))
        return messages

    by_rank = ranks.run(on_rank)
    assert by_rank == [by_rank[0]] * ranks.size
    for message, text in zip(by_rank[0], ("float64", "owned by no rank", "a NaN"), strict=True):
        assert text in message


class TestRanksDisagree:
    """Each rank's call is right by itself, but they do not fit together."""

    def test_overlap(self) -> None:
        """Two ranks that own the same elements are both named, with their extents."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 1:
                kwargs["start_offsets"][0] -= 1

        refuse(
            3,
            spoil,
            RankMismatchError,
            "[511, 512) are owned twice",
            "rank 0 holds",
            "rank 1 holds",
        )

    def test_gap(self) -> None:
        """Elements that nobody owns are named."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 2:
                kwargs["master_weights"][1] = torch.ones(511)

        refuse(
            3,
            spoil,
            RankMismatchError,
            "model_weights[1]",
            f"[{NUMEL - 1}, {NUMEL}) are owned by no rank",
        )

    def test_absent_everywhere(self) -> None:
        """A weight that no rank owns is a gap, not a cast of nothing."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            kwargs["master_weights"][0] = kwargs["start_offsets"][0] = None

        refuse(2, spoil, RankMismatchError, f"[0, {NUMEL}) are owned by no rank")

    def test_recipes(self) -> None:
        """Ranks with other recipes for a weight hear both."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 1:
                kwargs["model_weights"][0] = weight(replace(NVFP4, round_master=False))

        refuse(2, spoil, RankMismatchError, "round_master=True", "rank 1", "round_master=False")

    def test_shapes(self) -> None:
        """Ranks with another shape for a weight hear both."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 1:
                kwargs["model_weights"][1] = zerocast.empty((48, 32), FP8)

        refuse(2, spoil, RankMismatchError, "(32, 48)", "(48, 32)")

    def test_order(self) -> None:
        """The same weights in another order are recognised as that."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 2:
                kwargs["model_weights"].reverse()

        refuse(3, spoil, RankMismatchError, "rank 2", "another order")

    def test_count(self) -> None:
        """Ranks with a weight less are named."""

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            if comm.rank == 1:
                for key in ("model_weights", "master_weights", "start_offsets"):
                    kwargs[key].pop()

        refuse(2, spoil, RankMismatchError, "rank 0 has 2 weights and rank 1 has 1")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("world_size", [1, 2])
def test_check_finite(world_size: int, value: float) -> None:
    """check_finite names the weight on every rank and leaves every byte as it was, plans and
    functions alike.
    """

    def on_rank(comm: Communicator) -> list[str]:
        kwargs = arguments(comm)
        held = [
            {k: v.clone() for k, v in w.quantized_storage.buffers.items()}
            for w in kwargs["model_weights"]
        ]
        plan = zerocast.CastPlan(**kwargs, check_finite=True)
        if comm.rank == comm.size - 1:
            kwargs["master_weights"][1][3] = value
        messages = []
        for cast in (
            plan.cast,
            lambda: zerocast.quantize_master_weights(**kwargs, check_finite=True),
        ):
            with pytest.raises(NonFiniteError) as raised:
                cast()
            messages.append(str(raised.value))
        for w, buffers in zip(kwargs["model_weights"], held, strict=True):
            for name, buffer in buffers.items():
                # Derived copies are readable, since no cast happened.
                assert_same_bytes(getattr(w, name), buffer, name)
        return messages

    messages = [m for rank in run_in_process(world_size, on_rank) for m in rank]
    assert len(set(messages)) == 1, messages
    assert "model_weights[1] holds" in messages[0]
    assert ("a NaN" if value != value else "an infinity") in messages[0]
    assert "model_weights[0]" not in messages[0]


def test_check_finite_names_overflow() -> None:
    """A finite master that overflows FP16 is refused as an overflow, not as an infinity in the
    master.
    """
    w = zerocast.empty((16, 16), NVFP4, dtype=torch.float16)
    plan = zerocast.CastPlan(
        [w], [torch.full((256,), 7e4)], [0], check_finite=True, names=["layer.0.weight"]
    )
    with pytest.raises(
        NonFiniteError, match=r"layer\.0\.weight holds finite values that overflow torch\.float16"
    ):
        plan.cast()


@pytest.mark.parametrize(
    ("cast", "recipe", "wanted"),
    [
        (zerocast.cast_master_weights_to_nvfp4, FP8, "NVFP4 weights only"),
        (zerocast.cast_master_weights_to_fp8, NVFP4, "FP8 weights only"),
    ],
)
def test_fronts_refuse_the_other_kind(
    cast: Callable[..., None], recipe: zerocast.Recipe, wanted: str
) -> None:
    """Each front refuses weights of the other kind on every rank, though one rank alone was given
    such a weight.
    """

    def on_rank(comm: Communicator) -> str:
        other = FP8 if recipe is NVFP4 else NVFP4
        w = weight(recipe if comm.rank == 1 else other)
        start = comm.rank * NUMEL // 2
        with pytest.raises(InputError) as raised:
            cast([w], [torch.ones(NUMEL // 2)], [start], comm)
        return str(raised.value)

    messages = run_in_process(2, on_rank)
    assert messages[0] == messages[1]
    assert wanted in messages[0]


@pytest.mark.parametrize("recipe", [NVFP4])
@pytest.mark.parametrize("shape", [(4, 10), (4, 24), (16,), (2, 3, 16), (0, 16), (16, 0)])
def test_shapes_that_nvfp4_cannot_hold(recipe: zerocast.Recipe, shape: tuple[int, ...]) -> None:
    """K that is no multiple of 16, other than two dimensions, and no elements are refused with the
    shape.
    """
    with pytest.raises(InputError, match=str(shape[0])):
        zerocast.empty(shape, recipe)
    with pytest.raises(InputError):
        zerocast.quantize(torch.zeros(shape), recipe)


@pytest.mark.parametrize(
    ("master", "text"),
    [
        (torch.ones(5), "the plan was made for a master of 768 elements, got 5"),
        (3.0, "torch.bfloat16 or torch.float16, got float; keep it in one"),
    ],
    ids=["size", "no tensor"],
)
def test_rebinding_is_checked_on_all_ranks(master: Any, text: str) -> None:
    """Masters of another size or type handed to cast() on one rank are refused on every rank, and
    the plan still works.
    """

    def on_rank(comm: Communicator) -> str:
        kwargs = arguments(comm)
        plan = zerocast.CastPlan(**kwargs)
        masters = [m.clone() for m in kwargs["master_weights"]]
        if comm.rank == 1:
            masters[0] = master
        with pytest.raises(InputError) as raised:
            plan.cast(masters)
        plan.cast()
        return str(raised.value)

    messages = run_in_process(2, on_rank)
    assert messages[0] == messages[1]
    assert text in messages[0]


def test_ranks_outside_the_group_of_the_error_hear_the_same() -> None:
    """A wrong offset of an expert, and a NaN in it, are one message for all ranks of the plan."""

    def on_rank(world: InProcessCommunicator) -> list[str]:
        pair = world.split(world.rank % 2)
        weights, groups = [weight(NVFP4), weight(FP8)], [world, pair]
        quarter, half = NUMEL // 4, NUMEL // 2
        masters = [torch.ones(quarter), torch.ones(half)]
        starts = [world.rank * quarter, pair.rank * half]
        wrong = [starts[0], -1 if world.rank == 3 else starts[1]]
        with pytest.raises(InputError) as refused:
            zerocast.CastPlan(weights, masters, wrong, groups)
        plan = zerocast.CastPlan(weights, masters, starts, groups, check_finite=True)
        if world.rank == 3:
            masters[1][0] = torch.nan
        with pytest.raises(NonFiniteError) as not_finite:
            plan.cast()
        return [str(refused.value), str(not_finite.value)]

    by_rank = run_in_process(4, on_rank)
    assert by_rank == [by_rank[0]] * 4
    assert by_rank[0][0].startswith("on rank 3: model_weights[1]")
    assert "model_weights[1] holds a NaN" in by_rank[0][1]


def test_a_group_for_each_weight() -> None:
    """A list of groups of another length than the weights is refused."""
    with pytest.raises(InputError, match="one entry for each of the 2 model_weights, got 1"):
        zerocast.CastPlan([weight(), weight()], [None, None], [None, None], [None])


class TestWhatDiffers:
    """A disagreement names what differs, on both sides, and no more."""

    def test_a_message_holds_what_differs_only(self) -> None:
        """Other recipes at one place: their names, and not their fields."""

        def on_rank(comm: Communicator) -> str:
            kwargs = arguments(comm)
            if comm.rank == 1:
                kwargs["model_weights"].reverse()
            with pytest.raises(RankMismatchError) as raised:
                zerocast.CastPlan(**kwargs)
            return str(raised.value)

        message = run_in_process(2, on_rank)[0]
        assert "recipe=NVFP4BlockScaling where rank 1 has recipe=Float8CurrentScaling" in message
        assert len(message) < 300

    @pytest.mark.parametrize(
        "recipe", [zerocast.MXFP8BlockScaling(), zerocast.Float8RowwiseScaling()]
    )
    def test_columnwise_copies(self, recipe: zerocast.Recipe) -> None:
        """Two weights of which each rank holds another one's columnwise copy: sizes balance, and
        without a comparison all ranks would write wrong bytes.
        """

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            kwargs["model_weights"] = [
                zerocast.empty((32, 64), recipe, columnwise=comm.rank == k) for k in (0, 1)
            ]
            kwargs["master_weights"] = [torch.ones(1024), torch.ones(1024)]
            kwargs["start_offsets"] = [1024 * comm.rank] * 2

        refuse(2, spoil, RankMismatchError, "columnwise copy=yes", "columnwise copy=none")

    @pytest.mark.parametrize("differ", ["code", "constant", "closure", "default", "partial"])
    def test_functions(self, differ: str) -> None:
        """Functions that print alike and compute other amaxes are told apart."""

        def make(rank: int) -> Callable[..., torch.Tensor]:
            if differ == "code":
                return (lambda h: h.max()) if rank else (lambda h: h.sum())
            if differ == "constant":
                return (lambda h: h.max() * 2) if rank else (lambda h: h.max() * 3)
            if differ == "closure":
                return lambda h: h.max() * (rank + 1)
            if differ == "default":
                return lambda h, factor=rank + 1: h.max() * factor
            return functools.partial(torch.quantile, q=0.5 + rank / 4)

        def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
            recipe = zerocast.DelayedScaling(amax_compute_algo=make(comm.rank))
            kwargs["model_weights"][0] = zerocast.empty(SHAPE, recipe)

        refuse(2, spoil, RankMismatchError, "amax_compute_algo=")

    def test_the_same_function_made_twice_is_the_same(self) -> None:
        """Ranks that run the same source hold equal functions that are other objects."""

        def on_rank(comm: Communicator) -> None:
            scale = torch.tensor([2.0])
            recipe = zerocast.DelayedScaling(amax_compute_algo=lambda h: h.max() * scale)
            kwargs = arguments(comm)
            kwargs["model_weights"][0] = zerocast.empty(SHAPE, recipe)
            zerocast.CastPlan(**kwargs).cast()

        run_in_process(2, on_rank)


@pytest.mark.parametrize(
    ("world_size", "sizes", "starts", "cause"),
    [
        (1, [NUMEL // 2], [0], "The group has one rank; give group="),
        (2, [NUMEL, NUMEL], [0, 0], "group=zerocast.comm.SingleRank()"),
        (2, [NUMEL // 2] * 2, [0, 0], "Every start offset is 0"),
        (2, [NUMEL // 2] * 2, [0, NUMEL // 4], "The start offsets are bytes"),
    ],
    ids=["no group", "replicated", "no offsets", "bytes"],
)
def test_the_likely_cause_of_a_wrong_partition(
    world_size: int, sizes: list[int], starts: list[int], cause: str
) -> None:
    """What users get wrong most often is named with what to do."""

    def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
        kwargs["master_weights"][0] = torch.ones(sizes[comm.rank])
        kwargs["start_offsets"][0] = starts[comm.rank]

    refuse(world_size, spoil, RankMismatchError, "model_weights[0]", cause)
