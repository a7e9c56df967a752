"""convert: replaces a model's ``torch.nn.Linear`` layers by quantized ones, in place.

A converted layer keeps its identity: it is the same module object with the same hooks, mode and
bias, whose class is now :class:`zerocast.nn.Linear` and whose weight is a new, quantized parameter.
So references to it hold, and a model that is itself a Linear can be converted. A layer that cannot
be converted without changing the model in another way stays as it is, and the report says why.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag, check_module
from zerocast.cast.amax_groups import AUTO, Groups, check_patterns, is_auto
from zerocast.errors import InputError
from zerocast.layout import Source
from zerocast.nn.grouped import group_labels, grouped_names, share_amaxes
from zerocast.nn.included import (
    check_include,
    check_not_replaced,
    check_strict,
    included_weights,
    keep_state_dict_plain,
    note_replaced,
    places,
    recipe_of,
    why_not_included,
    why_not_weight,
)
from zerocast.nn.layer_filter import Filter, LayerFilter, why_small
from zerocast.nn.linear import Linear, master_parameter, quantized_parameter
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.reports import Coverage, check_initialized, coverage
from zerocast.nn.saved_state import reserve_state
from zerocast.nn.traced_layer import new_handle
from zerocast.recipes import Recipe, as_recipe
from zerocast.sharded.amax_group import AmaxGroup
from zerocast.sharded.report import note_reason
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_modules


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`.

    Attributes:
        recipe: the scheme of the converted weights.
        converted: the fully qualified names of the layers that are quantized now.
        left: the names of the ``torch.nn.Linear`` layers that stay as they are, and of included
            weights that do, each with the reason.
        included: the names of the other parameters that are converted, because ``include`` named
            them or their modules.
        coverage: all parameters of the model, those that belong to no linear layer, too; None where
            no model was converted but its configuration (:mod:`zerocast.adapters.torchtitan`).
        amax_groups: the names of the converted layers and weights that share a tensor amax, for
            each group.
    """

    recipe: Recipe
    converted: tuple[str, ...]
    left: dict[str, str]
    coverage: Coverage | None = None
    included: tuple[str, ...] = ()
    amax_groups: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        layers = len(self.converted) + len(self.left)
        head = f"{len(self.converted)} of {layers} linear layers converted, with {self.recipe}"
        if self.included:
            head += f", and {len(self.included)} weights of other modules"
        if self.amax_groups:
            head += f"; {len(self.amax_groups)} groups of weights share a tensor amax"
        return head if self.coverage is None else f"{head}\n{self.coverage}"


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str,
    *,
    weights: str = "quantized",
    filter_fqns: Filter = (),
    include: Sequence[str] = (),
    amax_groups: Groups = AUTO,
    low_bit_all_gather: bool = True,
    strict: bool = False,
) -> ConversionReport:
    """Quantize the weights of a model's ``torch.nn.Linear`` layers, and of modules that are named,
    in place.

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
        include: other modules whose weights are converted, too: experts, embeddings, GPT-2's
            Conv1D, by their fully qualified names or by patterns of them with ``*`` and ``?``, such
            as ``"model.layers.*.mlp.experts"``; or single parameters by their names. A module's
            weights are its parameters of three dimensions or more, each matrix of which is
            quantized separately, and its matrix ``weight``. Its forward stays as it is and works
            with the values of the codes.
        amax_groups: layers that a server will fuse and whose weights therefore share one tensor
            amax, from this conversion on and in every cast. ``"auto"``: those of models of
            transformers and torchtitan that servers are known to fuse
            (:mod:`zerocast.cast.amax_groups`), where the recipe has a scale of the tensor and its
            columnwise copy is not cast from the transposed tensor; of other classes none, and
            under ``"high_precision"`` none. Or patterns of fully
            qualified names, ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; ``()`` for no
            groups. With ``weights="master"`` the layers must be sharded over the same ranks and
            gathered in one dtype; those of ``"auto"`` that are not share nothing.
        low_bit_all_gather: whether FSDP2 gathers codes with ``weights="master"``; with False that
            means the same as ``"high_precision"``.
        strict: whether to raise an error if a linear layer that ``filter_fqns`` does not leave out,
            or a weight that ``include`` names, cannot be converted.

    Returns:
        What was converted, and what was left and why: filtered, too small, an adapter of peft's
        (what it adapts is converted), a shape that the recipe cannot hold, a subclass of
        ``torch.nn.Linear``, a weight that is computed, shared with another kind of layer, has
        gradient hooks, or is of a dtype that a quantized weight cannot present.

    Raises:
        InputError: for a wrong argument, under ``"master"`` for a layer whose weight is sharded
            already, for a weight that is shared with a module that was converted before, or under
            ``strict``. Nothing has been changed.
    """
    check_flag("low_bit_all_gather", low_bit_all_gather)
    check_flag("strict", strict)
    check_include(include)
    if weights == "master" and not low_bit_all_gather:
        weights, include = "high_precision", ()
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
    if weights == "high_precision" and is_auto(amax_groups):
        amax_groups = ()
    if not is_auto(amax_groups):
        check_patterns(amax_groups)
    if weights == "high_precision" and (amax_groups or include):
        raise InputError(
            f"{'amax_groups' if amax_groups else 'include'} needs weights that hold codes "
            f"(weights='quantized') or are gathered in codes ('master'), got "
            f"weights='high_precision', under which only linear layers quantize, one by one."
        )
    check_not_replaced(model)
    included = included_weights(model, include)
    linears: dict[torch.nn.Linear, list[str]] = {}  # a module may have several names
    for fqn, module in named_modules(model, remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            linears.setdefault(module, []).append(fqn)
    adapters = _adapters(model)
    unwanted = {
        module: "is part of an adapter, which is trained in high precision"
        if module in adapters
        else wanted.why_not(module, names)
        for module, names in linears.items()
    }
    reasons = {
        module: unwanted[module] or _why_not(module, names[0], recipe, weights)
        for module, names in linears.items()
    }
    for module in linears if wanted.leaves_small else ():
        if reasons[module] is None:
            unwanted[module] = reasons[module] = why_small(recipe, module.weight.shape)
    if weights != "high_precision":
        _keep_tied_with_the_rest(model, reasons, included)
    of_linears: dict[torch.Tensor | None, str | None] = {
        module._parameters.get("weight"): why for module, why in reasons.items()
    }
    why_left = {
        weight: why_not_included(weight, found, recipe, weights, of_linears)
        for weight, found in included.items()
    }
    left = {linears[module][0]: why for module, why in reasons.items() if why is not None}
    asked_for = {linears[module][0] for module, why in unwanted.items() if why is None}
    for weight, why in why_left.items():
        if why is not None:
            left[included[weight][0][0]] = why
            asked_for.add(included[weight][0][0])
    if strict:
        check_strict(left, asked_for)
    converted = {linears[module][0]: module for module, why in reasons.items() if why is None}
    taken = {weight: found for weight, found in included.items() if why_left[weight] is None}
    # The masters of an amax group are known by their layers.
    stacks = taken if weights == "quantized" else ()
    labels = group_labels(model, amax_groups, converted, stacks, recipe)
    named = {fqn: labels.get(module.weight) for fqn, module in converted.items()}
    named |= {found[0][0]: labels.get(weight) for weight, found in taken.items()}
    replacements: dict[torch.Tensor, torch.nn.Parameter] = {}
    groups: dict[torch.Tensor, AmaxGroup] = {}  # of masters
    by_label: dict[str, AmaxGroup] = {}
    for fqn, module in converted.items():
        old = module.weight
        label = labels.get(old)
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module._handle = new_handle(module)
        if weights == "high_precision":
            note_reason(module, "it is quantized by each forward under autocast, not before")
            continue
        if old not in replacements:
            make = master_parameter if weights == "master" else quantized_parameter
            new = _in_place_of(old, make(old, recipe, name=f"{fqn}.weight".lstrip(".")))
            replacements[old] = new
            if weights == "master" and label is not None and recipe.scales_tensor:
                groups[old] = by_label.setdefault(label, AmaxGroup(dissolves=is_auto(amax_groups)))
                by_label[label].layers.append(module)
        module.weight = replacements[old]
        module.low_bit_all_gather = weights == "master"
        module.amax_group = groups.get(old)
        if weights == "master" and recipe.state:
            reserve_state(module)
    for module, reason in reasons.items():
        if reason is not None:
            note_reason(module, reason)
    for weight, found in taken.items():
        if weight not in replacements:
            own, name = recipe_of(weight, recipe), found[0][0]
            replacements[weight] = _in_place_of(
                weight,
                master_parameter(weight, own, name=name, for_linear=False)
                if weights == "master"
                else quantized_parameter(weight, own, columnwise=False, name=name),
            )
        for _, module, name in found:
            setattr(module, name, replacements[weight])
    if weights == "master":
        for module in {module for found in taken.values() for _, module, _ in found}:
            keep_state_dict_plain(module)
    for weight, found in included.items():
        for _, module, name in found:
            note_reason(module, why_left[weight] or "", name)
    for old, new in replacements.items():
        note_replaced(old, new)
        if isinstance(new, QuantizedTensor):
            new.quantized_storage.amax_group = labels.get(old)
    share_amaxes([new for new in replacements.values() if isinstance(new, QuantizedTensor)])
    for fqn, layer in named_modules(model):
        if isinstance(layer, QuantizedModule):
            layer.name = layer.name or fqn
    names = tuple(found[0][0] for found in taken.values())
    shared = grouped_names(named) if recipe.scales_tensor else ()
    return ConversionReport(recipe, tuple(converted), left, coverage(model), names, shared)


def _in_place_of(old: torch.Tensor, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """Give ``new`` the attributes and the gradient of the parameter ``old``."""
    vars(new).update(vars(old))
    new.grad = old.grad
    return new


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules of peft's adapters, which its layers name in an attribute."""
    return {
        part
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
        if isinstance(adapter := getattr(module, name, None), torch.nn.Module)
        for part in adapter.modules()
    }


def _why_not(module: torch.nn.Linear, name: str, recipe: Recipe, weights: str) -> str | None:
    """Say why this layer stays as it is, whatever other layers do; None if it can be converted."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (a parametrization, pruning)"
    return why_not_weight(weight, name, recipe, weights, module)


def _keep_tied_with_the_rest(
    model: torch.nn.Module,
    reasons: dict[torch.nn.Linear, str | None],
    included: Container[torch.Tensor],
) -> None:
    """Note a reason for layers whose weight is also used where it stays in high precision."""
    elsewhere: dict[torch.Tensor, str] = {}
    converted = {module for module, reason in reasons.items() if reason is None}
    for parameter, (fqn, module, name) in places(model):
        is_linear = isinstance(module, torch.nn.Linear)
        if not (name == "weight" and module in converted if is_linear else parameter in included):
            elsewhere.setdefault(parameter, fqn)
    for linear in converted:
        if linear.weight in elsewhere:
            tied = elsewhere[linear.weight]
            reasons[linear] = f"its weight is tied with {tied}, which stays as it is"
