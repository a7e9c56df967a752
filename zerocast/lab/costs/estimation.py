"""Estimate: the bytes, launches and memory of a step of ZeroOptimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerocast import InputError, Recipe
from zerocast.arguments import check_choice, check_integer
from zerocast.comm import RecordingCommunicator, Traffic
from zerocast.lab.costs.counted_launches import BACKENDS
from zerocast.lab.costs.dry_run import DryRun, StepOptions
from zerocast.lab.costs.models import Params, model_of, params_of, quantize_model
from zerocast.lab.costs.one_of_many import OneOfMany
from zerocast.recipes import describe_recipe


@dataclass(frozen=True)
class Estimate:
    """The costs of one step on one rank.

    Attributes:
        dp, tp: the numbers of data-parallel and tensor-parallel ranks.
        elements: the number of elements of the weights of a data-parallel rank.
        traffic: the traffic to data-parallel ranks, by label and kind of collective.
        tp_traffic: the same to ranks of tensor parallelism.
        launches: the launches of zerocast's kernels by phase, without those of torch.
        memory: the bytes that the rank holds, by kind.
    """

    dp: int
    tp: int
    elements: int
    traffic: Mapping[tuple[str, str], Traffic]
    tp_traffic: Mapping[tuple[str, str], Traffic]
    launches: Mapping[str, int]
    memory: Mapping[str, int]

    @property
    def collectives(self) -> int:
        """The number of collectives, including those of tensor parallelism."""
        return sum(t.calls for of in (self.traffic, self.tp_traffic) for t in of.values())

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes sent to data-parallel and tensor-parallel ranks, by label."""
        found: dict[str, int] = {}
        for of in (self.traffic, self.tp_traffic):
            for (label, _), traffic in of.items():
                found[label] = found.get(label, 0) + traffic.sent_bytes
        return found


def estimate(
    params: Params, dp: int, *, rank: int = 0, tp: int = 1, options: StepOptions | None = None
) -> Estimate:
    """Estimate a step without memory and without other ranks.

    Args:
        params: names and weights on the meta device, such as ``model.named_parameters()`` after
            :func:`zerocast.nn.convert`.
        dp: the data-parallel ranks, 1 to 2^20.
        rank: the rank to estimate.
        tp: the number of tensor-parallel ranks; ``params`` must be the part of one of them.
        options: the options of the optimizer and its step.

    Raises:
        InputError: for a wrong argument, or a weight that ZeroOptimizer would refuse.
    """
    options = options or StepOptions()
    check_integer("dp", dp, 1, 1 << 20)
    check_integer("rank", rank, 0, dp - 1)
    check_integer("backward_passes", options.backward_passes, 1, 1 << 20)
    check_choice("device", options.device, list(BACKENDS))
    if not params:
        raise InputError("a step needs at least one weight that requires a gradient, got none.")
    for name, param in params:
        if not param.is_meta:
            raise InputError(
                f"an estimate needs weights on the meta device, which takes no memory, got {name} "
                f'on {param.device}; make the model under torch.device("meta").'
            )
    run = DryRun(params, rank, dp, options)
    tp_traffic: dict[tuple[str, str], Traffic] = {}
    for comm in run.tp_comms:
        for key, traffic in comm.traffic.items():
            tp_traffic.setdefault(key, Traffic()).add(traffic)
    elements = sum(param.numel() for _, param in params)
    return Estimate(dp, tp, elements, run.comm.traffic, tp_traffic, run.launches, run.memory)


def estimate_model(
    model: str | Path,
    recipe: Recipe | str | None,
    dp: int,
    *,
    rank: int = 0,
    tp: int = 1,
    filter_fqns: Sequence[str] = (),
    options: StepOptions | None = None,
) -> Estimate:
    """Estimate a step of a model by its name.

    Args:
        model: one of :data:`zerocast.lab.costs.MODELS`, or a ``config.json`` of transformers.
        recipe: the recipe of its linear layers and experts; None leaves all weights BF16.
        dp, rank, options: see :func:`estimate`.
        tp: the number of tensor-parallel ranks, of which the first one is estimated.
        filter_fqns: the layers that stay BF16, as for :func:`zerocast.nn.convert`.

    Raises:
        InputError: for a wrong argument, or a model or shard that the recipe cannot quantize.
        BackendError: if a ``config.json`` is given and transformers is not installed.
    """
    check_integer("tp", tp, 1, 1 << 20)
    made = model_of(model)
    if recipe is not None:
        quantize_model(made, recipe, filter_fqns)
    device = (options or StepOptions()).device
    params = params_of(made, RecordingCommunicator(OneOfMany(0, tp, device)))
    return estimate(params, dp, rank=rank, tp=tp, options=options)


def compare_gathers(
    model: str | Path,
    recipe: Recipe | str,
    dp: int,
    *,
    done: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> dict[str, Estimate]:
    """Estimate a step with ``recipe``, with BF16 weights, and with FP8 weights with one scale each.

    The arguments are those of :func:`estimate_model`, and a function that is called with 1 after
    each estimate; the result is by name of the configuration.
    """
    name = recipe if isinstance(recipe, str) else describe_recipe(recipe)
    recipes: dict[str, Recipe | str | None] = {name: recipe, "BF16": None, "FP8": "current"}
    found = {}
    for name, each in recipes.items():
        found[name] = estimate_model(model, each, dp, **options)
        done(1)
    return found
