"""Bad input is refused with the reason, on every rank or on none, and nothing is written."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, stored, told_all
from tests.support.ranks import on_ranks
from tests.support.recipes import CAST_COLUMNWISE, RECIPES, each
from zerocast.cast.consistency import _likely_cause
from zerocast.comm import Communicator, InProcessCommunicator, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError, ZerocastError
from zerocast.layout import Extent

SHAPE = (32, 48)
NUMEL = 32 * 48
NVFP4 = zerocast.NVFP4BlockScaling()
FP8 = zerocast.Float8CurrentScaling()
UNROUNDED = zerocast.NVFP4BlockScaling(round_master=False)


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
        "fsdp_shard_model_weights": [None, None],
        "group": comm,
    }


Spoil = Callable[[dict[str, Any], Communicator], None]


def refuse(world_size: int, spoil: Spoil, error: type[ZerocastError], *texts: str) -> None:
    """``spoil`` makes the call of some ranks wrong: all ranks raise the same error with ``texts``;
    no byte changes.

    Said of the functional call and of the plan.
    """

    def on_rank(comm: Communicator) -> None:
        for call in (zerocast.quantize_master_weights, zerocast.CastPlan):
            kwargs = arguments(comm)
            held = {str(i): w for i, w in enumerate(kwargs["model_weights"])}
            before = stored(held)
            spoil(kwargs, comm)
            message = told_all(comm, error, call, **kwargs)
            assert_same_tensors(stored(held), before, "after the refusal")
            for text in texts:
                assert text in message

    run_in_process(world_size, on_rank)


def entry(key: str, index: int, value: object) -> Callable[[dict[str, Any]], None]:
    """Spoils one entry of one list."""
    return lambda kwargs: kwargs[key].__setitem__(index, value)


def argument(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Spoils one argument."""
    return lambda kwargs: kwargs.update({key: value})


CODES = "fsdp_shard_model_weights"

NO_LIST = {
    f"{key} is {type(value).__name__}": (
        argument(key, value), f"{key} must be a list", type(value).__name__,
    )
    for key in ("model_weights", "master_weights", "start_offsets")
    for value in (None, 0, iter(()))
}  # fmt: skip

WRONG: dict[str, tuple[Any, ...]] = {
    "a float64 master, and the dtypes that are read": (
        entry("master_weights", 1, torch.ones(4, dtype=torch.float64)),
        "model_weights[1]", "torch.float32, torch.bfloat16 or torch.float16, got", "float64",
    ),
    "a master on another device than its weight": (
        entry("master_weights", 0, torch.ones(4, device="meta")),
        "model_weights[0]", "device cpu", "meta",
    ),
    "a strided master, with its strides": (
        entry("master_weights", 0, torch.ones(8, 8).t()), "contiguous", "(1, 8)",
    ),
    "a master without a start offset": (
        entry("start_offsets", 0, None), "start_offsets must say", "got None",
    ),
    "a start offset without a master": (entry("master_weights", 0, None), "no master weight"),
    "a negative start offset": (
        entry("start_offsets", 1, -1), "start offset -1", f"{NUMEL} elements",
    ),
    "a start offset of another type": (entry("start_offsets", 1, 0.5), "as an int", "0.5"),
    "a start offset that is a bool": (entry("start_offsets", 1, True), "as an int", "True"),
    "start offsets without an order": (
        argument("start_offsets", {0, 1}), "start_offsets must be a list", "got set",
    ),
    "a master that reaches past the end of its weight": (
        entry("start_offsets", 0, NUMEL - 1), f"inside the weight's {NUMEL} elements",
    ),
    "lists of different lengths, by name": (
        lambda kwargs: kwargs["start_offsets"].pop(),
        "start_offsets", "2 model_weights", "1 entries",
    ),
    "a plain tensor among the weights": (
        entry("model_weights", 0, torch.ones(SHAPE)),
        "model_weights[0]", "QuantizedTensor", "got Tensor",
    ),
    "the same weight twice, by an alias": (
        lambda kwargs: entry("model_weights", 1, kwargs["model_weights"][0].detach())(kwargs),
        "model_weights[1] is the same weight as model_weights[0]",
    ),
    "a shard's code buffer of another size": (
        entry(CODES, 0, torch.zeros(3, dtype=torch.uint8)), CODES, "got 3",
    ),
    "of another dtype": (
        entry(CODES, 0, torch.zeros(4, dtype=torch.int8)), CODES, "torch.uint8",
    ),
    "of another stride": (
        entry(CODES, 0, torch.zeros(8, dtype=torch.uint8)[::2]),
        CODES, "contiguous",
    ),
    "of another type": (entry(CODES, 0, b"codes"), CODES, "got bytes"),
    **NO_LIST,
}  # fmt: skip
"""What is refused: how it is made of the right arguments, and what the message says."""


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("what", WRONG)
def test_one_rank_is_wrong(what: str, world_size: int) -> None:
    """The last rank gives a wrong argument; every rank hears of it, by its name and with what was
    given.
    """
    spoil, *texts = WRONG[what]

    def spoil_last(kwargs: dict[str, Any], comm: Communicator) -> None:
        if comm.rank == world_size - 1:
            spoil(kwargs)

    refuse(world_size, spoil_last, InputError, *texts)


@on_ranks()
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (entry("master_weights", 1, torch.ones(2, dtype=torch.float64)), "float64"),
        (lambda k: entry("master_weights", 0, k["master_weights"][0][:-1])(k), "owned by no rank"),
        (lambda k: k["master_weights"][0].fill_(torch.nan), "a NaN"),
    ],
    ids=["wrong", "gap", "NaN"],
)
def test_every_communicator_raises_on_all_ranks(
    comm: Communicator, spoil: Callable[[dict[str, Any]], None], text: str
) -> None:
    """A wrong master on the last rank, a gap, and a NaN: the same error on all ranks, no hang."""
    kwargs = arguments(comm)
    if comm.rank == comm.size - 1:
        spoil(kwargs)
    call = zerocast.quantize_master_weights
    assert text in told_all(comm, ZerocastError, call, **kwargs, check_finite=True)


def of_rank(rank: int, change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Spoils the call of one rank."""
    return lambda kwargs, comm: change(kwargs) if comm.rank == rank else None


def one_weight_less(kwargs: dict[str, Any]) -> None:
    """The last one of each list is gone."""
    for key in ("model_weights", "master_weights", "start_offsets", CODES):
        kwargs[key].pop()


@pytest.mark.parametrize(
    ("world_size", "spoil", "texts"),
    {
        "an overlap, with both ranks and their extents": (
            3, of_rank(1, entry("start_offsets", 0, 511)),
            ("[511, 512) are owned twice", "rank 0 holds", "rank 1 holds"),
        ),
        "a gap": (
            3, of_rank(2, entry("master_weights", 1, torch.ones(511))),
            ("model_weights[1]", f"[{NUMEL - 1}, {NUMEL}) are owned by no rank"),
        ),
        "a weight that no rank owns is a gap, not a cast of nothing": (
            2,
            lambda k, comm: k.update(master_weights=[None, k["master_weights"][1]],
                                     start_offsets=[None, k["start_offsets"][1]]),
            (f"[0, {NUMEL}) are owned by no rank",),
        ),
        "other recipes, with both": (
            2, of_rank(1, entry("model_weights", 0, weight(UNROUNDED))),
            ("round_master=True", "rank 1", "round_master=False"),
        ),
        "other shapes, with both": (
            2, of_rank(1, entry("model_weights", 1, zerocast.empty((48, 32), FP8))),
            ("(32, 48)", "(48, 32)"),
        ),
        "another order of the same weights": (
            3, of_rank(2, lambda k: k["model_weights"].reverse()), ("rank 2", "another order"),
        ),
        "a weight less": (
            2, of_rank(1, one_weight_less), ("rank 0 has 2 weights and rank 1 has 1",),
        ),
    }.values(),
)  # fmt: skip
def test_ranks_disagree(world_size: int, spoil: Spoil, texts: tuple[str, ...]) -> None:
    """Each rank's call is right by itself, but they do not fit together: every rank hears how."""
    refuse(world_size, spoil, RankMismatchError, *texts)


@on_ranks("in_process")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("world_size", [1, 2])
def test_check_finite(comm: Communicator, value: float) -> None:
    """check_finite names the weight on every rank and leaves every byte as it was, plans and
    functions alike.
    """
    kwargs = arguments(comm)
    weights = {str(i): w for i, w in enumerate(kwargs["model_weights"])}
    before = stored(weights)
    plan = zerocast.CastPlan(**kwargs, check_finite=True)
    if comm.rank == comm.size - 1:
        kwargs["master_weights"][1][3] = value
    of_plan = told_all(comm, NonFiniteError, plan.cast)
    call = zerocast.quantize_master_weights
    message = told_all(comm, NonFiniteError, call, **kwargs, check_finite=True)
    assert message == of_plan
    assert_same_tensors(stored(weights), before, "after the refusals")
    for w in weights.values():
        assert w.columnwise_data is not None  # readable, since no cast happened
    assert "model_weights[1] holds" in message
    assert ("a NaN" if value != value else "an infinity") in message
    assert f"rank {comm.size - 1} of the group" in message
    assert "model_weights[0]" not in message


@on_ranks("in_process", 2)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-4over6"])
def test_check_finite_names_what_nvfp4_decodes_to_infinities(comm, recipe) -> None:
    """Of the largest value that decoding can scale all elements are finite; of the next one the
    cast is refused on every rank, though servers, which divide first, decode what it would write.
    """
    largest = torch.tensor(torch.finfo(torch.float32).max / 448)
    values = torch.zeros(2, 32)
    values[0, :3] = torch.stack([largest, -largest / 2, largest / 6])
    weight = zerocast.empty((2, 32), RECIPES[recipe], dtype=torch.float32)
    own = values.view(-1)[32 * comm.rank : 32 * comm.rank + 32]
    plan = zerocast.CastPlan(
        [weight], [own], [32 * comm.rank], comm, names=["a.weight"], check_finite=True
    )
    plan.cast()
    plan.all_gather()
    assert weight.dequantize(torch.float32).isfinite().all()
    assert weight.dequantize(torch.float32)[0, 0] == largest
    values[0, 0] = torch.nextafter(largest, torch.tensor(torch.inf))
    text = told_all(comm, NonFiniteError, plan.cast)
    assert "but a.weight holds finite values above 7.596e+35, of which NVFP4 decodes inf" in text
    assert "Found on rank 0" in text
    if recipe == "nvfp4":
        whole = zerocast.quantize(values, RECIPES[recipe], dtype=torch.float32)
        assert not whole.dequantize(torch.float32).isfinite().all()
        scale = whole.rowwise_scale_inv[0, :1].view(torch.float8_e4m3fn).float()
        for served in (scale * (whole.amax / 2688), scale / (2688 / whole.amax)):
            torch.testing.assert_close(6 * served, values[0, :1])


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


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    ("cast", "recipe", "wanted"),
    [
        (zerocast.cast_master_weights_to_nvfp4, FP8, "NVFP4 weights only"),
        (zerocast.cast_master_weights_to_fp8, NVFP4, "FP8 weights only"),
    ],
)
def test_fronts_refuse_the_other_kind(
    comm: Communicator, cast: Callable[..., None], recipe: zerocast.Recipe, wanted: str
) -> None:
    """Each front refuses weights of the other kind on every rank, though one rank alone was given
    such a weight.
    """
    other = FP8 if recipe is NVFP4 else NVFP4
    w = weight(recipe if comm.rank == 1 else other)
    start = comm.rank * NUMEL // 2
    args = [w], [torch.ones(NUMEL // 2)], [start], comm
    assert wanted in told_all(comm, InputError, cast, *args)


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    ("cast", "recipe"),
    [(zerocast.cast_master_weights_to_nvfp4, NVFP4), (zerocast.cast_master_weights_to_fp8, FP8)],
)
def test_fronts_cast_their_own_kind(
    comm: Communicator, cast: Callable[..., None], recipe: zerocast.Recipe
) -> None:
    """Each front gives the scales of the call that takes all kinds, and leaves the copies to
    post_all_gather_processing, as that does.
    """
    expected, got = weight(recipe), weight(recipe)
    start = comm.rank * NUMEL // 2
    args = [torch.full((NUMEL // 2,), 3.0)], [start], comm
    zerocast.quantize_master_weights([expected], *args)
    cast([got], *args)
    assert_same_tensors(stored({"": got}), stored({"": expected}), "after the cast")
    for made in (expected, got):
        with pytest.raises(zerocast.StaleCopyError):
            _ = made.columnwise_data


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    ("master", "text"),
    [
        (torch.ones(5), "the plan was made for a master of 768 elements, got 5"),
        (3.0, "torch.bfloat16 or torch.float16, got float."),
    ],
    ids=["size", "no tensor"],
)
def test_rebinding_is_checked_on_all_ranks(comm: Communicator, master: Any, text: str) -> None:
    """Masters of another size or type handed to cast() on one rank are refused on every rank, and
    the plan still works.
    """
    kwargs = arguments(comm)
    plan = zerocast.CastPlan(**kwargs)
    masters = [m.clone() for m in kwargs["master_weights"]]
    if comm.rank == 1:
        masters[0] = master
    assert text in told_all(comm, InputError, plan.cast, masters)
    plan.cast()


@on_ranks("in_process", 4)
def test_ranks_outside_the_group_of_the_error_hear_the_same(comm: InProcessCommunicator) -> None:
    """A wrong offset of an expert, and a NaN in it, are one message for all ranks of the plan."""
    pair = comm.split(comm.rank % 2)
    weights, groups = [weight(NVFP4), weight(FP8)], [comm, pair]
    quarter, half = NUMEL // 4, NUMEL // 2
    masters = [torch.ones(quarter), torch.ones(half)]
    starts = [comm.rank * quarter, pair.rank * half]
    wrong = [starts[0], -1 if comm.rank == 3 else starts[1]]
    message = told_all(comm, InputError, zerocast.CastPlan, weights, masters, wrong, groups)
    assert message.startswith("on rank 3: model_weights[1]")
    plan = zerocast.CastPlan(weights, masters, starts, groups, check_finite=True)
    if comm.rank == 3:
        masters[1][0] = torch.nan
    assert "model_weights[1] holds a NaN" in told_all(comm, NonFiniteError, plan.cast)


def test_a_group_for_each_weight() -> None:
    """A list of groups of another length than the weights is refused."""
    with pytest.raises(InputError, match="one entry for each of the 2 model_weights, got 1"):
        zerocast.CastPlan([weight(), weight()], [None, None], [None, None], [None])


@on_ranks("in_process", 2)
def test_a_message_holds_what_differs_only(comm: Communicator) -> None:
    """Other recipes at one place: their names on both sides, and not their fields."""
    kwargs = arguments(comm)
    if comm.rank == 1:
        kwargs["model_weights"].reverse()
    message = told_all(comm, RankMismatchError, zerocast.CastPlan, **kwargs)
    assert "recipe=NVFP4BlockScaling where rank 1 has recipe=Float8CurrentScaling" in message
    assert len(message) < 300


@each(*CAST_COLUMNWISE)
def test_columnwise_copies(recipe: zerocast.Recipe) -> None:
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


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: (lambda h: h.max()) if rank else (lambda h: h.sum()),
        lambda rank: (lambda h: h.max() * 2) if rank else (lambda h: h.max() * 3),
        lambda rank: lambda h: h.max() * (rank + 1),
        lambda rank: lambda h, factor=rank + 1: h.max() * factor,
        lambda rank: functools.partial(torch.quantile, q=0.5 + rank / 4),
    ],
    ids=["code", "constant", "closure", "default", "partial"],
)
def test_functions(make: Callable[[int], Callable[..., torch.Tensor]]) -> None:
    """Functions that print alike and compute other amaxes are told apart."""

    def spoil(kwargs: dict[str, Any], comm: Communicator) -> None:
        recipe = zerocast.DelayedScaling(amax_compute_algo=make(comm.rank))
        kwargs["model_weights"][0] = zerocast.empty(SHAPE, recipe)

    refuse(2, spoil, RankMismatchError, "amax_compute_algo=")


@on_ranks("in_process", 2)
def test_the_same_function_made_twice_is_the_same(comm: Communicator) -> None:
    """Ranks that run the same source hold equal functions that are other objects."""
    scale = torch.tensor([2.0])
    recipe = zerocast.DelayedScaling(amax_compute_algo=lambda h: h.max() * scale)
    kwargs = arguments(comm)
    kwargs["model_weights"][0] = zerocast.empty(SHAPE, recipe)
    zerocast.CastPlan(**kwargs).cast()


def test_names_are_texts() -> None:
    """What is none is named by its place."""
    kwargs = arguments(zerocast.comm.SingleRank())
    with pytest.raises(InputError, match=r"names\[1\] must be a text, got 3"):
        zerocast.CastPlan(**kwargs, names=["a", 3])  # type: ignore[list-item]


def test_no_two_weights_have_one_name() -> None:
    """An export or a refit of the plan would have one of them only."""
    kwargs = arguments(zerocast.comm.SingleRank())
    with pytest.raises(InputError, match=r"names must give each weight another name, got \['a'\]"):
        zerocast.CastPlan(**kwargs, names=["a", "a"])


@on_ranks("in_process", 2)
def test_an_empty_master_needs_no_offset(comm: Communicator) -> None:
    """A rank that owns nothing may give a master without elements, and no offset."""
    w = weight()
    master = torch.ones(NUMEL * (1 - comm.rank))
    plan = zerocast.CastPlan([w], [master], [None if comm.rank else 0], comm)
    plan.cast()
    plan.all_gather()
    expected = zerocast.quantize(torch.ones(SHAPE), NVFP4, dtype=torch.bfloat16)
    assert_same_tensors(stored({"": w}), stored({"": expected}), "after the gather")


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


@pytest.mark.parametrize(
    "owned",
    [[(0, 4), (0, 4)], [(0, 8), (4, 16)], [(2, 10), (8, 16)], [(4, 16), (0, 0)]],
    ids=["too few at 0", "too many", "shifted", "one of two"],
)
def test_no_cause_is_guessed_for_other_wrong_partitions(owned: list[tuple[int, int]]) -> None:
    """Where sizes do not add up, or starts are no multiple of the right ones, none is named."""
    assert _likely_cause(16, [Extent(start, end) for start, end in owned]) == ""
