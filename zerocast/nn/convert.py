"""convert: a model's ``torch.nn.Linear`` layers become quantized ones, in place.

A converted layer keeps its identity: it is the same module object with the same hooks, mode and
bias, whose class is now :class:`zerocast.nn.Linear` and whose weight is a new, quantized parameter.
So references to it hold, and a model that is itself a Linear can be converted. What cannot be
converted without changing what the model means stays as it is, and the report says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from zerocast.arguments import check_flag, check_module
from zerocast.cast import CastPlan
from zerocast.cast.amax_groups import Patterns, amax_group_labels, check_patterns
from zerocast.comm import SingleRank
from zerocast.errors import InputError
from zerocast.layout import FULL, Source
from zerocast.nn.linear import Linear, master_parameter, quantized_parameter
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.reports import Coverage, check_initialized, coverage
from zerocast.nn.saved_state import reserve_state
from zerocast.nn.traced_layer import new_handle
from zerocast.recipes import NOMINAL_DTYPES, Recipe, as_recipe
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.casts import AmaxGroup
from zerocast.sharded.placement import is_sharded
from zerocast.sharded.report import note_reason
from zerocast.tensors import QuantizedTensor, rebuild_derived

AUTO_FILTER = "auto_filter_small_kn"
"""Among ``filter_fqns``: leave out the layers that are too small."""

_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))
_TENSORWISE = ((4096, 1024),)
"""No gain where K is at most the first and N at most the second; None is any. For recipes whose
scales belong to rows, and for all others. Known of NVIDIA's H100: torchao, ``float8/README.md``
("Performance"), and the thresholds that its ``_auto_filter_for_recipe`` draws from it."""

Filter: TypeAlias = Sequence[str] | Callable[[torch.nn.Module, str], bool]
"""Parts of the names of layers to leave out; or a function (layer, name) that says whether to
convert it, as torchao's ``module_filter_fn``."""


class LayerFilter:
    """What ``filter_fqns`` says of each layer of ``model``, in any form that users give it.

    Attributes:
        leaves_small: whether layers are left out that are too small to gain.

    Raises:
        InputError: for anything else, and a part that no name contains; that would be a layer which
            was meant to stay as it is and is converted.
    """

    def __init__(self, given: Filter, model: torch.nn.Module) -> None:
        self._parts: tuple[str, ...] = ()
        self._says = None
        self.leaves_small = False
        if callable(given):
            self._says = given
            return
        is_list = isinstance(given, list | tuple | set | frozenset)
        if not is_list or not all(isinstance(part, str) for part in given):
            raise InputError(
                f"filter_fqns must be a sequence of strings such as ['head'], or a function of a "
                f"layer and its name that says whether to convert it, got {given!r}."
            )
        self._parts, self.leaves_small = read_filter(tuple(given))
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for part in self._parts:
            if not any(part in name for name in names):
                raise _matches_nothing(part, names)

    def why_not(self, layer: torch.nn.Module, names: Sequence[str]) -> str | None:
        """Why a layer of these names stays as it is; None where it does not."""
        for part in self._parts:
            if any(part in name for name in names):
                return f"its name contains {part!r} of filter_fqns"
        if self._says is not None and not all(self._says(layer, name) for name in names):
            return "the function that was given as filter_fqns says so"
        return None


def read_filter(filter_fqns: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The parts of names to leave out, and whether small layers are, too."""
    return tuple(p for p in filter_fqns if p != AUTO_FILTER), AUTO_FILTER in filter_fqns


def why_small(recipe: Recipe, shape: Sequence[int]) -> str | None:
    """Why a layer whose weight is of this shape [N, K] does not gain; None where it may."""
    n, k = shape
    for most_k, most_n in _ROWWISE if recipe.block == (1, FULL) else _TENSORWISE:
        if (most_k is None or k <= most_k) and (most_n is None or n <= most_n):
            named = (("K", most_k), ("N", most_n))
            bounds = " and ".join(f"{name} <= {most}" for name, most in named if most is not None)
            return (
                f"too small to gain by quantized products: K = {k} and N = {n}, and the H100 table "
                f"that torchao publishes has no gain where {bounds}"
            )
    return None


def _matches_nothing(part: str, names: Sequence[str]) -> InputError:
    known = {piece for name in names for piece in (name, name.rpartition(".")[2]) if piece}
    near = difflib.get_close_matches(part, sorted(known), n=4, cutoff=0.5)
    return InputError(
        f"each part of a name in filter_fqns must be in one of the model's names, got {part!r}, "
        f"which is in none of them (near it: {', '.join(near) or 'nothing'}); correct it, or take "
        f"it out. {AUTO_FILTER!r} filters by size."
    )


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        recipe: the scheme of the converted weights.
        converted: the fully qualified names of the layers that are quantized now.
        left: the names of the ``torch.nn.Linear`` layers that stay as they are, each with the
            reason.
        coverage: all parameters of the model, those that belong to no linear layer, too; None where
            no model was converted but its configuration (:mod:`zerocast.integrations.torchtitan`).
    """

    recipe: Recipe
    converted: tuple[str, ...]
    left: dict[str, str]
    coverage: Coverage | None = None

    def __str__(self) -> str:
        layers = len(self.converted) + len(self.left)
        head = f"{len(self.converted)} of {layers} linear layers converted, with {self.recipe}"
        return head if self.coverage is None else f"{head}\n{self.coverage}"


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str,
    *,
    weights: str = "quantized",
    filter_fqns: Filter = (),
    amax_groups: Patterns = (),
    low_bit_all_gather: bool = True,
) -> ConversionReport:
    """Quantize the weights of a model's ``torch.nn.Linear`` layers, in place.

    Call it before the optimizer and any wrapper take hold of the parameters: converted weights are
    new parameters. Each keeps its value before quantization on the CPU until an optimizer has made
    its masters from it. Weights that several layers share stay shared. Gradients and attributes of
    the parameters are carried over. Layers of zerocast that have no name take their name in the
    model, by which stochastic rounding tells them apart.

    Args:
        model: any module, the Linear itself included.
        recipe: the scheme, or its name.
        weights: ``"quantized"``: the parameters themselves hold codes; ``"high_precision"``: they
            stay as they are, and are quantized by each forward under :class:`zerocast.autocast`;
            ``"master"``: they stay in high precision, sharded by torch's ``fully_shard``, and are
            all-gathered in codes (:mod:`zerocast.sharded`).
        filter_fqns: a layer stays as it is where its fully qualified name contains any of these;
            each must be in a name of the model. ``"auto_filter_small_kn"`` among them leaves out
            the layers that are too small to gain by quantized products on an H100, by torchao's
            published table. Or a function of a layer and its name, which says whether to convert
            it.
        amax_groups: layers that a server will fuse and whose weights therefore share one tensor
            amax, from this conversion on and in every cast: patterns of fully qualified names,
            ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; see
            :mod:`zerocast.cast.amax_groups`. With ``weights="master"`` they must be sharded over
            the same ranks and gathered in one dtype.
        low_bit_all_gather: for ``"master"``; False gathers in high precision, and then it is what
            ``"high_precision"`` is.

    Returns:
        What was converted, and what was left and why: filtered, too small, an adapter of peft's
        (what it adapts is converted), a shape that the recipe cannot hold, a subclass of
        ``torch.nn.Linear``, a weight that is computed, shared with another kind of layer, has
        gradient hooks, or is of a dtype that a quantized weight cannot present.

    Raises:
        InputError: for a wrong argument, or under ``"master"`` for a layer whose weight is sharded
            already. Nothing has been changed.
    """
    check_flag("low_bit_all_gather", low_bit_all_gather)
    if weights == "master" and not low_bit_all_gather:
        weights = "high_precision"
    recipe = as_recipe(recipe)
    check_initialized(check_module("model", model))
    if weights not in ("quantized", "high_precision", "master"):
        raise InputError(
            f"weights must be 'quantized' (the parameters hold codes), 'high_precision' (they are "
            f"quantized under autocast) or 'master' (FSDP2 gathers them in codes), got {weights!r}."
        )
    if weights == "master" and recipe.columnwise_source is Source.TRANSPOSED_MASTER:
        raise InputError(
            f"a weight that is all-gathered in codes needs a recipe whose columnwise copy follows "
            f"from shards of the master, got {recipe}, which casts the transposed tensor; give "
            f"weights blocks of two dimensions."
        )
    wanted = LayerFilter(filter_fqns, model)
    check_patterns(amax_groups)
    if amax_groups and weights == "high_precision":
        raise InputError(
            "amax_groups are for weights that hold codes (weights='quantized') or are gathered in "
            "codes ('master'), got weights='high_precision'; those are quantized one by one."
        )
    linears: dict[torch.nn.Linear, list[str]] = {}  # a module may have several names
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            linears.setdefault(module, []).append(fqn)
    adapters = _adapters(model)
    reasons = {
        module: "is part of an adapter, which is trained in high precision"
        if module in adapters
        else _why_not(module, names, recipe, wanted, weights)
        for module, names in linears.items()
    }
    if weights != "high_precision":
        _keep_tied_with_the_rest(model, reasons)
    converted = {linears[module][0]: module for module, why in reasons.items() if why is None}
    labels = amax_group_labels(amax_groups, list(converted))
    replacements: dict[torch.Tensor, torch.nn.Parameter] = {}
    groups: dict[torch.Tensor, AmaxGroup] = {}  # of masters
    by_label: dict[str, AmaxGroup] = {}
    for (fqn, module), label in zip(converted.items(), labels, strict=True):
        old = module.weight
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module._handle = new_handle(module)
        if weights == "high_precision":
            note_reason(module, "it is quantized by each forward under autocast, not before")
            continue
        if old not in replacements:
            make = master_parameter if weights == "master" else quantized_parameter
            replacements[old] = new = make(old, recipe, name=f"{fqn}.weight".lstrip("."))
            if isinstance(new, QuantizedTensor):
                new.quantized_storage.amax_group = label
            elif label is not None and recipe.scales_tensor:
                groups[old] = by_label.setdefault(label, AmaxGroup())
                by_label[label].layers.append(module)
            vars(new).update(vars(old))
            new.grad = old.grad
        module.weight = replacements[old]
        module.low_bit_all_gather = weights == "master"
        module.amax_group = groups.get(old)
        if weights == "master" and recipe.state:
            reserve_state(module)
    left = {module: reason for module, reason in reasons.items() if reason is not None}
    for module, reason in left.items():
        note_reason(module, reason)
    _share_amaxes([new for new in replacements.values() if isinstance(new, QuantizedTensor)])
    for fqn, layer in model.named_modules():
        if isinstance(layer, QuantizedModule):
            layer.name = layer.name or fqn
    named = {linears[module][0]: reason for module, reason in left.items()}
    return ConversionReport(recipe, tuple(converted), named, coverage(model))


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules of peft's adapters, by the attribute in which its layers name their own."""
    return {
        part
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
        if isinstance(adapter := getattr(module, name, None), torch.nn.Module)
        for part in adapter.modules()
    }


def _why_not(
    module: torch.nn.Linear,
    names: Sequence[str],
    recipe: Recipe,
    wanted: LayerFilter,
    weights: str,
) -> str | None:
    """Why this layer stays as it is, judged by itself; None where it can be converted."""
    if (filtered := wanted.why_not(module, names)) is not None:
        return filtered
    weight = module._parameters.get("weight")
    if isinstance(weight, QuantizedTensor):
        return "is quantized already"
    if weight is None:
        return "its weight is computed from other parameters (a parametrization, pruning)"
    if gather_of(weight) is not None:
        return "is gathered in codes already"
    if weights == "master" and is_sharded(weight):
        # To leave it would be a gather in high precision where one in codes was asked for.
        raise InputError(
            f"weights='master' needs layers whose weights are whole, got {names[0]}, whose weight "
            f"is sharded; call zerocast.nn.convert before fully_shard or parallelize_module, or "
            f"leave the layer out by filter_fqns."
        )
    if type(module) not in (torch.nn.Linear, Linear):
        return f"is a {type(module).__name__}, a subclass that may use its weight in another way"
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in NOMINAL_DTYPES:
        return f"its weight is {weight.dtype}, and a quantized one presents FP32, BF16 or FP16"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has gradient hooks, which a new parameter would lose"
    try:
        recipe.check_shape(weight.shape)
    except InputError as error:
        return str(error)
    return why_small(recipe, weight.shape) if wanted.leaves_small else None


def _keep_tied_with_the_rest(
    model: torch.nn.Module, reasons: dict[torch.nn.Linear, str | None]
) -> None:
    """Give a reason to layers whose weight is also used where it stays in high precision."""
    elsewhere: dict[torch.Tensor, str] = {}
    converted = {module for module, reason in reasons.items() if reason is None}
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (name == "weight" and module in converted):
                elsewhere.setdefault(parameter, f"{fqn}.{name}".lstrip("."))
    for linear in converted:
        if linear.weight in elsewhere:
            tied = elsewhere[linear.weight]
            reasons[linear] = f"its weight is tied with {tied}, which stays as it is"


def _share_amaxes(weights: Sequence[QuantizedTensor]) -> None:
    """Cast those of ``weights`` that are in amax groups again from the same values, now with their
    groups' amaxes.
    """
    by_device: dict[torch.device, list[QuantizedTensor]] = {}
    for weight in weights:
        if not weight.is_meta and weight.quantized_storage.amax_group is not None:
            by_device.setdefault(weight.device, []).append(weight)
    for device, group in by_device.items():
        values = [weight.quantized_storage.high_precision_init_val for weight in group]
        masters = [None if v is None else v.to(device, torch.float32) for v in values]
        for weight in group:
            weight.recipe.rewind(weight.quantized_storage.buffers)  # the same cast, not one more
        CastPlan(group, masters, [0] * len(group), SingleRank()).cast()
        rebuild_derived([weight.quantized_storage for weight in group])
        for weight, value in zip(group, values, strict=True):
            weight.quantized_storage.high_precision_init_val = value
