"""A call with something wrong in it, on some ranks: every rank raises one error, no byte of a
weight changes, and the right call works afterwards.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zerocast
from tests.cast.test_tp_shards import two_groups
from tests.optim.training import make_params, named
from tests.support.claims import assert_same_tensors, message_of, stored, told_all
from tests.support.recipes import RECIPES
from zerocast import CastPlan, TensorParallelShard, quantize_master_weights
from zerocast.comm import Communicator
from zerocast.errors import InputError, NonFiniteError, RankMismatchError, ZerocastError
from zerocast.optim import ZeroOptimizer

NVFP4, FP8, MXFP8 = RECIPES["nvfp4"], RECIPES["current"], RECIPES["mxfp8"]
SHAPE = (32, 96)
NUMEL = 32 * 96

Given = dict[str, Any]
Run = Callable[[Given], Any]

# --- who is called ---


def weight(recipe: zerocast.Recipe = NVFP4, seed: int = 0) -> zerocast.QuantizedTensor:
    """A quantized weight whose every byte is known."""
    g = torch.Generator().manual_seed(seed)
    return zerocast.quantize(torch.randn(SHAPE, generator=g), recipe, dtype=torch.bfloat16)


def of_weights(comm: Communicator, *recipes: zerocast.Recipe) -> Given:
    """Weights, each cut evenly over the ranks: of NVFP4 and FP8, where no recipes are given."""
    cut = [NUMEL * r // comm.size for r in range(comm.size + 1)]
    start, end = cut[comm.rank], cut[comm.rank + 1]
    recipes = recipes or (NVFP4, FP8)
    return {
        "model_weights": [weight(recipe, i) for i, recipe in enumerate(recipes)],
        "master_weights": [torch.ones(end - start) for _ in recipes],
        "start_offsets": [start for _ in recipes],
        "group": comm,
    }


def of_shards(comm: Communicator, recipe: zerocast.Recipe = NVFP4) -> Given:
    """A weight [64, 32] by rows on 2 x 2 ranks: t and d are those of both groups."""
    tp, dp = two_groups(comm, 2)
    part = TensorParallelShard.chunk((64, 32), 0, tp)
    return {
        "part": part, "recipe": recipe, "name": "w", "value": 1.0, "dtype": None,
        "t": tp.rank, "d": dp.rank, "tp": tp, "dp": dp,
    }  # fmt: skip


def of_optimizer(comm: Communicator) -> Given:
    """Weights of every kind of storage."""
    return {"params": named(make_params(NVFP4)), "group": comm, "lr": 0.1}


def cast_shards(given: Given) -> None:
    """A plan of the part, and its cast."""
    part, dp = given["part"], given["dp"]
    half = part.shape.numel() // 2
    held = zerocast.empty(part.shape, given["recipe"], tp_shard=part)
    master = torch.full((half,), given["value"], dtype=given["dtype"])
    CastPlan([held], [master], [half * dp.rank], dp, names=[given["name"]],
             check_finite=True).cast()  # fmt: skip


def of_a_plan(call: str, **options: Any) -> Callable[[Given], Run]:
    """A call of a plan that was made of right arguments, with other masters."""

    def prepare(right: Given) -> Run:
        plan = CastPlan(**right, **options)
        return lambda given: getattr(plan, call)(given["master_weights"])

    return prepare


def of_a_plan_of_shards(right: Given) -> Run:
    """A cast of other masters by a plan of a part."""
    part, dp = right["part"], right["dp"]
    half = part.shape.numel() // 2
    held = zerocast.empty(part.shape, right["recipe"], tp_shard=part)
    plan = CastPlan([held], [torch.ones(half)], [half * dp.rank], dp)
    return lambda given: plan.cast(given.get("masters"))


def front(cast: Callable[..., None]) -> Run:
    """A call that takes weights of one kind."""
    names = ("model_weights", "master_weights", "start_offsets", "group")
    return lambda given: cast(*(given[name] for name in names))


@dataclass(frozen=True)
class Call:
    """Right arguments, and what is called with them once they were spoiled."""

    right: Callable[[Communicator], Given]
    prepare: Callable[[Given], Run]


def made_at_once(run: Run) -> Callable[[Given], Run]:
    """A call that needs nothing made before."""
    return lambda right: run


CALLS = {
    "plan": Call(of_weights, made_at_once(lambda given: CastPlan(**given))),
    "function": Call(of_weights, made_at_once(lambda given: quantize_master_weights(**given))),
    "cast": Call(of_weights, of_a_plan("cast")),
    "bind": Call(of_weights, of_a_plan("bind")),
    "checked cast": Call(of_weights, of_a_plan("cast", check_finite=True)),
    "checked function": Call(
        of_weights, made_at_once(lambda given: quantize_master_weights(**given, check_finite=True))
    ),
    "nvfp4 front": Call(
        lambda comm: of_weights(comm, NVFP4),
        made_at_once(front(zerocast.cast_master_weights_to_nvfp4)),
    ),
    "fp8 front": Call(
        lambda comm: of_weights(comm, FP8), made_at_once(front(zerocast.cast_master_weights_to_fp8))
    ),
    "shards": Call(of_shards, made_at_once(cast_shards)),
    "cast of shards": Call(of_shards, of_a_plan_of_shards),
    "cast of shards without an amax": Call(
        lambda comm: of_shards(comm, MXFP8), of_a_plan_of_shards
    ),
    "ZeroOptimizer": Call(of_optimizer, made_at_once(lambda given: ZeroOptimizer(**given))),
}
BOTH = ("plan", "function")
CAST_LATER = ("cast", "bind")

# --- what is wrong, and on which ranks ---

Spoil = Callable[[Given, Communicator], object]


def entry(key: str, index: int, value: object) -> Spoil:
    """Spoils one entry of one list."""
    return lambda given, comm: given[key].__setitem__(index, value)


def master(make: Callable[[int], object]) -> Spoil:
    """Another first master, made of its number of elements."""
    return lambda given, comm: entry("master_weights", 0, make(given["master_weights"][0].numel()))(
        given, comm
    )


def arguments(**values: object) -> Spoil:
    """Spoils whole arguments."""
    return lambda given, comm: given.update(values)


def made(**makers: Callable[[Any], object]) -> Spoil:
    """Spoils arguments by values made of the rank's communicator."""
    return lambda given, comm: given.update({k: make(comm) for k, make in makers.items()})


def part(make: Callable[[Any, int, int], Any], key: str = "part") -> Spoil:
    """Spoils what is given of a part, by its group and its ranks in both."""
    return lambda given, comm: given.update({key: make(given["tp"], given["t"], given["d"])})


def written(index: int, value: float) -> Spoil:
    """A master that holds ``value``."""

    def spoil(given: Given, comm: Communicator) -> None:
        given["master_weights"][index] = given["master_weights"][index].clone()
        given["master_weights"][index][3] = value

    return spoil


def together(*spoils: Spoil) -> Spoil:
    """One after the other."""
    return lambda given, comm: [spoil(given, comm) for spoil in spoils]


def alike(given: Given, comm: Communicator) -> None:
    """Both weights are of NVFP4."""
    given["model_weights"] = [zerocast.empty(SHAPE, NVFP4) for _ in range(2)]


@dataclass(frozen=True)
class Refused:
    """One row.

    Attributes:
        calls: those that are refused, by name.
        on: the rank that is spoiled, or None for all, and of how many.
        words: what the message says.
    """

    spoil: Spoil
    words: tuple[str, ...]
    error: type[ZerocastError] = InputError
    calls: tuple[str, ...] = BOTH
    on: tuple[tuple[int | None, int], ...] = ((0, 1), (2, 3))


F32, CODES = torch.float32, "fsdp_shard_model_weights"


def codes(*values: object) -> Spoil:
    """Buffers for the shard's codes."""
    return arguments(**{CODES: list(values)})


def wrong(spoil: Spoil, *words: str, **options: Any) -> Refused:
    """What one rank of one or of three gets wrong."""
    return Refused(spoil, words, **options)


def differs(spoil: Spoil, *words: str, world: int = 2, **options: Any) -> Refused:
    """What is right on each rank, and does not fit together."""
    return Refused(spoil, words, **{"error": RankMismatchError, "on": ((None, world),)} | options)


def options(words: str, **values: object) -> Refused:
    """Of a ZeroOptimizer, on all ranks."""
    return Refused(arguments(**values), (words,), calls=("ZeroOptimizer",), on=((None, 2),))


def of_rank(rank: int, spoil: Spoil) -> Spoil:
    """Spoils the call of one rank."""
    return lambda given, comm: spoil(given, comm) if comm.rank == rank else None


def weights_of_optimizer(make: Callable[[Communicator], Any], *words: str) -> Refused:
    """Wrong on one rank of three."""
    return wrong(made(params=make), *words, calls=("ZeroOptimizer",), on=((1, 3),))


def weights_in(given: Given) -> dict[str, torch.Tensor]:
    """Those whose bytes must stay."""
    if "params" in given:
        return dict(given["params"])
    return {str(i): held for i, held in enumerate(given.get("model_weights", ()))}


def refuse(comm: Communicator, row: Refused, rank: int | None) -> None:
    """Every call of the row is refused on every rank, by one message, and writes nothing."""
    messages = []
    for name in row.calls:
        call = CALLS[name]
        right = call.right(comm)
        run, held = call.prepare(right), weights_in(right)
        before = stored(held)
        given = {k: list(v) if isinstance(v, list) else v for k, v in right.items()}
        if rank in (None, comm.rank):
            row.spoil(given, comm)
        in_two_groups = "part" in given  # which have messages of their own
        told = message_of if in_two_groups else functools.partial(told_all, comm)
        messages.append(told(row.error, run, given))
        for words in row.words:
            assert words in messages[-1], name
        where = {InputError: f"on rank {rank}: ", NonFiniteError: f"rank {rank} of the group"}
        if rank is not None and comm.size > 1 and not in_two_groups:
            assert where.get(row.error, "") in messages[-1]
        assert_same_tensors(stored(held), before, "after the refusal")
        for weight in held.values():
            assert not isinstance(weight, zerocast.QuantizedTensor) or not is_stale(weight)
        run(right)
    assert row.error is not NonFiniteError or len({*messages}) == 1


def is_stale(weight: zerocast.QuantizedTensor) -> bool:
    """Whether it waits for its columnwise copy."""
    return weight.quantized_storage.is_stale
