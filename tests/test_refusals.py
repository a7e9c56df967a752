"""What is refused, in one table: who is called, what is wrong, on which ranks, the error and what
it says.

Every rank raises the same error, no byte of a weight changes, and the right call works afterwards.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import zerocast
from tests.support.ranks import on_ranks
from tests.support.recipes import CAST_COLUMNWISE, RECIPES, VARIANTS
from tests.support.refusals import (
    BOTH,
    CAST_LATER,
    CODES,
    F32,
    FP8,
    NUMEL,
    NVFP4,
    SHAPE,
    Given,
    Spoil,
    alike,
    arguments,
    codes,
    differs,
    entry,
    made,
    master,
    of_rank,
    options,
    part,
    refuse,
    together,
    weights_of_optimizer,
    written,
    wrong,
)
from zerocast import TensorParallelShard
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, NonFiniteError
from zerocast.optim import FusedAdamW


def one_weight_less(given: Given, comm: Communicator) -> None:
    """The last one of each list is gone."""
    for key in ("model_weights", "master_weights", "start_offsets"):
        given[key].pop()


def cut(sizes: list[int], starts: list[int]) -> Spoil:
    """The first weight is owned like this."""

    def spoil(given: Given, comm: Communicator) -> None:
        given["master_weights"][0] = torch.ones(sizes[comm.rank])
        given["start_offsets"][0] = starts[comm.rank]

    return spoil


def another_recipe(recipe: zerocast.Recipe, **options: Any) -> Spoil:
    """The first weight is of it."""
    return lambda given, comm: entry("model_weights", 0, zerocast.empty(SHAPE, recipe, **options))(
        given, comm
    )


def columnwise_copies_of_each_other(recipe: zerocast.Recipe) -> Spoil:
    """Sizes balance: without a comparison all ranks would write wrong bytes."""

    def spoil(given: Given, comm: Communicator) -> None:
        given["model_weights"] = [
            zerocast.empty((32, 64), recipe, columnwise=comm.rank == k) for k in (0, 1)
        ]
        given["master_weights"] = [torch.ones(1024), torch.ones(1024)]
        given["start_offsets"] = [1024 * comm.rank] * 2

    return spoil


def amax_function(make: Callable[[int], Callable[..., Any]]) -> Spoil:
    """The first weight's amax is what it makes of the history, by rank."""
    return lambda given, comm: another_recipe(
        zerocast.DelayedScaling(amax_compute_algo=make(comm.rank))
    )(given, comm)


def broken(history: torch.Tensor) -> torch.Tensor:
    """An exception."""
    raise KeyError("amax")


def remembers_otherwise(recipe: zerocast.Recipe, buffer: str) -> Spoil:
    """A weight whose recipe remembers other casts on another rank."""

    def spoil(given: Given, comm: Communicator) -> None:
        given["model_weights"][0] = held = zerocast.empty(SHAPE, recipe, name="w")
        held.quantized_storage.buffers[buffer] += comm.rank

    return spoil


class Wrapped(torch.Tensor):
    """A tensor that stands for another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def fake(numel: int) -> torch.Tensor:
    """A FakeTensor."""
    with FakeTensorMode():
        return torch.ones(numel)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Without its memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


def overlapping_codes(given: Given, comm: Communicator) -> None:
    """By a byte."""
    half, flat = NUMEL // 2, torch.zeros(NUMEL, dtype=torch.uint8)
    given["model_weights"] = [zerocast.empty(SHAPE, NVFP4) for _ in range(2)]
    zerocast.replace_raw_data(given["model_weights"][0], flat[:half])
    zerocast.replace_raw_data(given["model_weights"][1], flat[half - 1 : NUMEL - 1])


def a_master_in_codes(given: Given, comm: Communicator) -> None:
    """In those of another weight."""
    flat, second = torch.zeros(4 * NUMEL), zerocast.empty(SHAPE, NVFP4)
    zerocast.replace_raw_data(second, flat.view(torch.uint8)[16 : 16 + NUMEL // 2])
    given["model_weights"][1], given["master_weights"][0] = second, flat[:NUMEL]


def parameters(*dtypes: torch.dtype, **options: Any) -> list[torch.nn.Parameter]:
    """Of three elements each."""
    return [torch.nn.Parameter(torch.ones(3, dtype=d, **options)) for d in dtypes]


def sharing_an_element(comm: Communicator) -> list[torch.nn.Parameter]:
    """Two parameters in one memory."""
    memory = torch.zeros(10)
    return [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[5:])]


def in_two_groups(comm: Communicator) -> list[dict[str, Any]]:
    """One parameter."""
    (param,) = parameters(torch.float32)
    return [{"params": [param]}, {"params": [param]}]


MEMORY = {"calls": (*BOTH, *CAST_LATER), "on": ((1, 2),)}
NO_LIST = {
    f"{key} is {type(value).__name__}": wrong(
        arguments(**{key: value}), f"{key} must be a list", type(value).__name__
    )
    for key in ("model_weights", "master_weights", "start_offsets")
    for value in (None, 0, iter(()))
}
NOT_FINITE = {
    f"a master that holds {value}": wrong(
        written(1, value),
        f"weights, but model_weights[1] holds {'a NaN' if value != value else 'an infinity'}",
        error=NonFiniteError, calls=("checked cast", "checked function"),
    )
    for value in (torch.nan, torch.inf, -torch.inf)
}  # fmt: skip
ALONE = {
    "no tensor": (lambda n: 3.0, "torch.bfloat16 or torch.float16, got float."),
    "a wrapper": (lambda n: Wrapped(torch.ones(n)), "to_local"),
    "quantized": (
        lambda n: zerocast.quantize(torch.ones(32, n // 32), NVFP4, dtype=F32),
        "FP32 master in place of a quantized weight",
    ),
    "fake": (fake, "FakeTensor"),
    "functional": (lambda n: torch._to_functional_tensor(torch.ones(n)), "torch.func"),
    "nested": (lambda n: torch.nested.nested_tensor([torch.ones(n)]), "nested"),
    "sparse": (lambda n: torch.ones(n).to_sparse(), "to_dense"),
    "csr": (lambda n: torch.ones(32, n // 32).to_sparse_csr(), "to_dense"),
    "mkldnn": (lambda n: torch.ones(n).to_mkldnn(), "to_dense"),
    "negative": (lambda n: torch._neg_view(torch.ones(n)), "resolve_neg"),
    "freed": (lambda n: freed(torch.ones(n)), "storage was freed"),
}
MASTERS = {
    f"a master that is {name}": wrong(master(make), "model_weights[0]", text, **MEMORY)
    for name, (make, text) in ALONE.items()
}
FUNCTIONS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "code": lambda rank: (lambda h: h.max()) if rank else (lambda h: h.sum()),
    "constant": lambda rank: (lambda h: h.max() * 2) if rank else (lambda h: h.max() * 3),
    "closure": lambda rank: lambda h: h.max() * (rank + 1),
    "default": lambda rank: lambda h, factor=rank + 1: h.max() * factor,
    "partial": lambda rank: functools.partial(torch.quantile, q=0.5 + rank / 4),
}
NO_AMAX: dict[str, Any] = {
    "no tensor": lambda history: float(history.max()), "the whole history": lambda history: history,
    "an exception": broken, "it takes none": object,
}  # fmt: skip
RECIPE_ROWS = {
    **{f"amax functions that differ in {name}": differs(amax_function(make), "amax_compute_algo=")
       for name, make in FUNCTIONS.items()},
    **{f"an amax function that gives none: {name}": differs(
        amax_function(lambda rank, f=function: f), error=InputError)
       for name, function in NO_AMAX.items()},
    **{f"columnwise copies of each other in {name}": differs(
        columnwise_copies_of_each_other(VARIANTS[name]), "columnwise copy=yes",
        "columnwise copy=none") for name in CAST_COLUMNWISE},
    **{f"one shard buffer for two planes of {name}": wrong(
        together(another_recipe(VARIANTS[name]),
                 codes([torch.zeros(NUMEL, dtype=torch.uint8)], None)),
        "rowwise_data and columnwise_data, got 1", on=((0, 1),)) for name in CAST_COLUMNWISE},
    **{f"recipes that remember another {buffer}": differs(
        remembers_otherwise(RECIPES[name], buffer), f"rank 0 has {buffer}=#",
        f"where rank 1 has {buffer}=#", calls=("plan",))
       for name, buffer in (("delayed", "scale"), ("nvfp4-drawn", "rounding_counter"))},
}  # fmt: skip
SHARDS = {"calls": ("shards",), "world": 4}
SHARD_ROWS = {
    "shards' recipes": differs(
        part(lambda tp, t, d: FP8 if t else NVFP4, "recipe"),
        "recipe=NVFP4BlockScaling where rank 1 has recipe=Float8CurrentScaling for weight 0",
        **SHARDS),
    "shards' names": differs(part(lambda tp, t, d: f"w{t}", "name"),
                             "rank 0 has name=w0 where rank 1 has name=w1", **SHARDS),
    "shards' dimensions": differs(
        part(lambda tp, t, d: TensorParallelShard.chunk((32, 32), t, tp)),
        "sharded dimension=rows where rank 1 has sharded dimension=columns", **SHARDS),
    "shards' wholes": differs(
        part(lambda tp, t, d: TensorParallelShard((32 + 32 * t, 32), 0, 16 * t, 16, tp)),
        "shape=(32, 32) where rank 1 has shape=(64, 32)", **SHARDS),
    "weights that are sharded differently": differs(
        part(lambda tp, t, d: TensorParallelShard((64, 32), 0, 16 * ((t + d) % 2), 16, tp)),
        "rows [0, 16) of (64, 32)", **SHARDS),
    "a gap between shards": differs(
        part(lambda tp, t, d: TensorParallelShard((64, 32), 0, 32 * t, 16, tp)),
        "the shards of w must cover each of the 64 rows of (64, 32) exactly once: rows [16, 32) "
        "are owned by no rank.", **SHARDS),
    "a shard's master of another dtype": wrong(
        arguments(dtype=torch.float64),
        "w: the master weight must be contiguous, with allocated storage on the weight's device "
        "cpu, and of torch.float32, torch.bfloat16 or torch.float16, got torch.float64; convert it "
        "first.", calls=("shards",), on=((3, 4),)),
    "a shard's master of another size": wrong(
        arguments(masters=[torch.ones(5)]),
        "the plan was made for a master of 512 elements, got 5",
        calls=("cast of shards", "cast of shards without an amax"), on=((3, 4),)),
    **{f"a NaN in a shard under {name}": wrong(
        lambda given, comm, recipe=recipe: given.update(
            recipe=recipe, value=torch.nan if (given["t"], given["d"]) == (1, 0) else 1.0),
        "check_finite requires finite master weights, but w holds a NaN.",
        error=NonFiniteError, calls=("shards",), on=((None, 4),))
       for name, recipe in (("nvfp4", NVFP4), ("current", FP8), ("mxfp8", RECIPES["mxfp8"]))},
}  # fmt: skip

DISAGREE = {
    "an overlap, with both ranks and their extents": differs(
        of_rank(1, entry("start_offsets", 0, 1023)), "[1023, 1024) are owned twice", "rank 0 holds",
        "rank 1 holds", world=3),
    "a gap": differs(
        of_rank(2, entry("master_weights", 1, torch.ones(1023))), "model_weights[1]",
        f"[{NUMEL - 1}, {NUMEL}) are owned by no rank", world=3),
    "a weight that no rank owns": differs(
        together(entry("master_weights", 0, None), entry("start_offsets", 0, None)),
        f"[0, {NUMEL}) are owned by no rank"),
    "other recipes, with both": differs(
        of_rank(1, another_recipe(VARIANTS["nvfp4-unrounded"])), "round_master=True", "rank 1",
        "round_master=False"),
    "other shapes, with both": differs(
        of_rank(1, entry("model_weights", 1, zerocast.empty((96, 32), FP8))), "(32, 96)",
        "(96, 32)"),
    "another order of the same weights": differs(
        of_rank(2, lambda given, comm: given["model_weights"].reverse()), "rank 2",
        "another order", world=3),
    "a weight less": differs(of_rank(1, one_weight_less), "rank 0 has 2 weights and rank 1 has 1"),
    "no group": differs(cut([NUMEL // 2], [0]), "model_weights[0]",
                        "The group has one rank; give group=", world=1),
    "masters that are whole": differs(cut([NUMEL, NUMEL], [0, 0]), "model_weights[0]",
                                      "group=zerocast.comm.SingleRank()"),
    "no offsets": differs(cut([NUMEL // 2] * 2, [0, 0]), "model_weights[0]",
                          "Every start offset is 0"),
    "offsets in bytes": differs(cut([NUMEL // 2] * 2, [0, NUMEL // 4]), "model_weights[0]",
                                "The start offsets are bytes"),
}  # fmt: skip
CASTS = {
    "a float64 master": wrong(
        entry("master_weights", 1, torch.ones(4, dtype=torch.float64)), "model_weights[1]",
        "torch.float32, torch.bfloat16 or torch.float16, got", "float64"),
    "a master on another device than its weight": wrong(
        entry("master_weights", 0, torch.ones(4, device="meta")), "model_weights[0]", "device cpu",
        "meta"),
    "a strided master": wrong(
        entry("master_weights", 0, torch.ones(8, 8).t()), "contiguous", "(1, 8)"),
    "a master without a start offset": wrong(
        entry("start_offsets", 0, None), "start_offsets must say", "got None"),
    "a start offset without a master": wrong(entry("master_weights", 0, None), "no master weight"),
    "a negative start offset": wrong(
        entry("start_offsets", 1, -1), "start offset -1", f"{NUMEL} elements"),
    "a start offset of another type": wrong(entry("start_offsets", 1, 0.5), "as an int", "0.5"),
    "a start offset that is a bool": wrong(entry("start_offsets", 1, True), "as an int", "True"),
    "start offsets without an order": wrong(
        arguments(start_offsets={0, 1}), "start_offsets must be a list", "got set"),
    "a master past the end of its weight": wrong(
        entry("start_offsets", 0, NUMEL - 1), f"inside the weight's {NUMEL} elements"),
    "lists of different lengths": wrong(
        lambda given, comm: given["start_offsets"].pop(), "start_offsets", "2 model_weights",
        "1 entries"),
    "a plain tensor among the weights": wrong(
        entry("model_weights", 0, torch.ones(SHAPE)), "model_weights[0]", "QuantizedTensor",
        "got Tensor"),
    "the same weight twice, by an alias": wrong(
        lambda given, comm: entry("model_weights", 1, given["model_weights"][0].detach())(
            given, comm),
        "model_weights[1] is the same weight as model_weights[0]"),
    "a shard's code buffer of another size": wrong(
        codes(torch.zeros(3, dtype=torch.uint8), None), CODES, "got 3"),
    "of another dtype": wrong(codes(torch.zeros(4, dtype=torch.int8), None), CODES, "torch.uint8"),
    "of another stride": wrong(
        codes(torch.zeros(8, dtype=torch.uint8)[::2], None), CODES, "contiguous"),
    "of another type": wrong(codes(b"codes", None), CODES, "got bytes"),
    "codes that overlap": wrong(overlapping_codes, "overlap", on=((0, 1),)),
    "a master in codes": wrong(a_master_in_codes, "overlap", on=((0, 1),)),
    "one shard buffer for two weights": wrong(
        together(alike, codes(*[torch.zeros(NUMEL // 2, dtype=torch.uint8)] * 2)), "overlap",
        on=((0, 1),)),
    "a shard buffer in another weight's codes": wrong(
        together(alike, lambda given, comm: codes(given["model_weights"][1].rowwise_data, None)(
            given, comm)), "overlap", on=((0, 1),)),
    "weights on the meta device": wrong(
        together(another_recipe(NVFP4, device="meta"),
                 master(lambda n: torch.ones(n, device="meta"))),
        "meta", on=((0, 1),)),
    "new masters of another size": wrong(
        entry("master_weights", 0, torch.ones(5)),
        "the plan was made for a master of 1536 elements, got 5", calls=CAST_LATER, on=((1, 2),)),
    "names that are no texts": wrong(
        arguments(names=["a", 3]), "names[1] must be a string, got 3", calls=("plan",)),
    "names that are equal": wrong(
        arguments(names=["a", "a"]), "names must give each weight a unique name, got ['a']",
        calls=("plan",)),
    "groups of another number": wrong(
        arguments(group=[None]), "one entry for each of the 2 model_weights, got 1",
        calls=("plan",), on=((0, 1),)),
    "FP8 weights for NVFP4": wrong(
        another_recipe(FP8), "NVFP4 weights only", calls=("nvfp4 front",), on=((1, 2),)),
    "NVFP4 weights for FP8": wrong(
        another_recipe(NVFP4), "FP8 weights only", calls=("fp8 front",), on=((1, 2),)),
}  # fmt: skip
OPTIMIZERS = {
    "no weights": weights_of_optimizer(
        lambda comm: [], "at least one parameter that requires a gradient"),
    "frozen weights alone": weights_of_optimizer(
        lambda comm: parameters(F32) and [torch.nn.Parameter(torch.ones(3), False)],
        "requires a gradient, got none"),
    "a weight in float64": weights_of_optimizer(
        lambda comm: parameters(torch.float64), "torch.float64"),
    "a weight that is no leaf": weights_of_optimizer(
        lambda comm: [torch.ones(3, requires_grad=True) * 2], "can't optimize a non-leaf Tensor"),
    "what is no weight": weights_of_optimizer(
        lambda comm: ["weight"], "optimizer can only optimize Tensors"),
    "a group without weights": weights_of_optimizer(
        lambda comm: [{"lr": 1e-3}], "must be a dict with the key 'params', got {'lr': 0.001}"),
    "weights that share an element": weights_of_optimizer(
        sharing_an_element, "different parameters in the same memory"),
    "a weight in two groups": weights_of_optimizer(
        in_two_groups, "appear in more than one parameter group"),
    "weights on two devices": weights_of_optimizer(
        lambda comm: [torch.nn.Parameter(torch.ones(3, device=d)) for d in ("cpu", "meta")],
        "must be on one device: ", " is on cpu and ", " on meta"),
    **{f"weights without memory: {name}": weights_of_optimizer(
        lambda comm, make=make: [("w", torch.nn.Parameter(make()))], words)
       for name, words, make in (
           ("freed", "storage was freed", lambda: freed(torch.ones(8, 8))),
           ("freed and turned", "storage was freed", lambda: freed(torch.ones(8, 4).t())),
           ("a wrapper", "TwoTensor", lambda: TwoTensor(torch.ones(4), torch.ones(4))),
           ("signs", "resolve_neg", lambda: torch._neg_view(torch.ones(4))),
       )},
    "weights of other shapes": differs(
        made(params=lambda comm: [torch.nn.Parameter(torch.ones(3 + comm.rank))]), "(3,)",
        "rank 1", "(4,)", calls=("ZeroOptimizer",), world=3),
    "other options": differs(
        made(lr=lambda comm: 0.1 + comm.rank), "'lr': 0.1", "1.1", calls=("ZeroOptimizer",),
        world=3),
    "another number of weights": differs(
        made(params=lambda comm: parameters(*[F32] * (1 + comm.rank))), "nothing more",
        calls=("ZeroOptimizer",), world=3),
    "overlap_all_gather": options(
        "overlap_all_gather must be True or False, got [0]", overlap_all_gather=[0]),
    "overlap_cast": options("overlap_cast must be True or False, got 1", overlap_cast=1),
    "overlap_grad_reduce": options(
        "overlap_grad_reduce must be True or False, got 1", overlap_grad_reduce=1),
    "no elements in a bucket": options("got 0", overlap_all_gather=True, bucket_size=0),
    "True elements in a bucket": options(
        "positive number of elements, or None, got True", bucket_size=True),
    "a float of elements in a bucket": options(
        "positive number of elements, or None, got 1000000.0", bucket_size=1e6),
    "gradients in float64": options("got torch.float64", gradient_dtype=torch.float64),
    "gradients in text": options("got 'bfloat16'", gradient_dtype="bfloat16"),
}  # fmt: skip
NAMES = ["a.wq", "a.wk"]
PLAN_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no such exchange": (
        {"exchange": "edges"}, "exchange must be 'full' or 'boundary', got 'edges'"),
    "no such verify": ({"verify": "all"}, "verify must be 'off', 'hash' or 'full', got 'all'"),
    "a pattern of no weight": (
        {"names": NAMES, "amax_groups": [["*.wx"]]}, "got '*.wx', which matches none of a.wq"),
    "a weight in two groups": (
        {"names": NAMES, "amax_groups": [["*.wq", "*.wk"], ["*.wq"]]}, "got a.wq in two of them"),
    "a group that is no list": (
        {"names": NAMES, "amax_groups": ["*.wq"]}, "amax_groups[0] must be a list of patterns"),
    "groups without names": ({"amax_groups": [["*.wq"]]}, "needs the names of the weights"),
    "a group of two recipes": (
        {"names": NAMES, "amax_groups": [["*.wq", "*.wk"]]},
        "must have one recipe and one dtype"),
}  # fmt: skip
PLANS = {
    **{what: wrong(arguments(**given), words, calls=("plan",), on=((None, 2),))
       for what, (given, words) in PLAN_OPTIONS.items()},
    "another exchange": differs(
        made(exchange=lambda comm: ("full", "boundary")[comm.rank]), "exchange=full",
        "exchange=boundary", calls=("plan",)),
    "another verify": differs(
        made(verify=lambda comm: ("hash", "off")[comm.rank]), "verify=hash", "verify=off",
        calls=("plan",)),
    "a group on one rank": differs(
        together(alike, arguments(names=NAMES),
                 made(amax_groups=lambda comm: [["*.wq", "*.wk"]][: comm.rank])),
        "none where rank 1 has amax group=a.wq", calls=("plan",)),
}  # fmt: skip
OPTIMIZERS |= {
    "verify without codes": options(
        "verify='hash' compares the codes", params=parameters(F32), verify="hash"),
    "a weight in float64, by its name": options(
        "weight must be a quantized weight, or plain bfloat16",
        params=[("weight", *parameters(torch.float64))]),
    **{f"an optimizer that is no class: {i}": wrong(
        arguments(optimizer_class=given), "must be a class of torch optimizers",
        calls=("ZeroOptimizer",), on=((1, 2),))
       for i, given in enumerate(
           ("AdamW", torch.nn.Linear, torch.optim.AdamW([torch.ones(1)])))},
    "a rate that the class refuses": options(
        "AdamW refused its options: Invalid learning rate: -3", lr=-3),
    "an option that the class has not": options("'momentum'", momentum=0.9),
}  # fmt: skip
ROWS = (
    CASTS
    | PLANS
    | NO_LIST
    | MASTERS
    | NOT_FINITE
    | DISAGREE
    | RECIPE_ROWS
    | SHARD_ROWS
    | OPTIMIZERS
)
"""What is refused, by what is wrong."""


@pytest.mark.filterwarnings("ignore:.*(nested|CSR).*:UserWarning")
@pytest.mark.parametrize(
    ("what", "on"), [(what, on) for what, row in ROWS.items() for on in row.on], ids=str
)
def test_it_is_refused(what: str, on: tuple[int | None, int]) -> None:
    """As the table says."""
    rank, world_size = on
    run_in_process(world_size, lambda comm: refuse(comm, ROWS[what], rank))


@on_ranks()
@pytest.mark.parametrize("what", ["a float64 master", "a gap of one", "a master that holds nan"])
def test_every_communicator_raises_on_all_ranks(comm: Communicator, what: str) -> None:
    """A wrong master on the last rank, a gap, and a NaN: the same error on all ranks, no hang."""
    short = differs(master(lambda n: torch.ones(n - 1)), "owned by no rank")
    refuse(comm, (ROWS | {"a gap of one": short})[what], comm.size - 1)


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (zerocast.UnsupportedError, "capturable=True", {"capturable": True}),
        (zerocast.UnsupportedError, "foreach=True", {"foreach": True}),
        (zerocast.UnsupportedError, "fused=False", {"fused": False}),
        (zerocast.UnsupportedError, "differentiable=True", {"differentiable": True}),
        (InputError, "'momentum'", {"momentum": 0.9}),
        (InputError, "lr must be 0 or more, got -1", {"lr": -1}),
        (InputError, "one element", {"lr": torch.ones(2)}),
        (InputError, "betas must be two numbers", {"betas": (0.9, 1.0)}),
        (InputError, "eps must be", {"eps": float("nan")}),
    ],
)
def test_options_of_fused_adamw(error: type[Exception], words: str, options: Given) -> None:
    """By name, and a group's as well as the optimizer's."""
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(error, match=words):
        FusedAdamW([param], **options)
    if error is InputError and "momentum" not in options:
        with pytest.raises(error, match=words):
            FusedAdamW([{"params": [param], **options}])
