"""convert: replaces a model's ``torch.nn.Linear`` layers by quantized ones, in place.

A converted layer keeps its identity: it is the same module object with the same hooks, mode and
bias, whose class is now :class:`zerocast.nn.Linear` and whose weight is a new, quantized parameter.
So references to it hold, and a model that is itself a Linear can be converted. A layer that cannot
be converted without changing the model in another way stays as it is, and the report says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import check_flag, check_module, counted, present
from zerocast.cast.amax_groups import AUTO, Groups
from zerocast.nn.decision import Candidate, Decision, decide
from zerocast.nn.grouped import share_amaxes
from zerocast.nn.included import (
    check_include,
    keep_state_dict_plain,
    note_replaced,
    recipe_of,
)
from zerocast.nn.layer_filter import Filter
from zerocast.nn.linear import Linear, master_parameter, quantized_parameter
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.reports import Coverage, check_initialized, coverage
from zerocast.nn.saved_state import reserve_state
from zerocast.nn.traced_layer import new_handle
from zerocast.recipes import Recipe, short_name
from zerocast.recipes.recipe_patterns import Recipes
from zerocast.sharded.amax_group import AmaxGroup
from zerocast.sharded.report import grouped_names, note_reason
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_modules


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`.

    Attributes:
        recipes: the recipe of each converted layer and weight, by its name.
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

    recipes: dict[str, Recipe]
    converted: tuple[str, ...]
    left: dict[str, str]
    coverage: Coverage | None = None
    included: tuple[str, ...] = ()
    amax_groups: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        parameters = self.coverage.parameters if self.coverage else ()
        others = {each.name for each in parameters if not each.is_linear}
        layers = len(self.converted) + sum(name not in others for name in self.left)
        by_recipe: dict[str, list[str]] = {}
        for name, given in self.recipes.items():
            by_recipe.setdefault(short_name(given), []).append(name)
        head = f"{len(self.converted)} of {layers} linear layers converted"
        if len(by_recipe) == 1:
            head += f", with {next(iter(by_recipe))}"
        if self.included:
            head += f", and {counted(len(self.included), 'weight')} of other modules"
        if self.amax_groups:
            shares = "shares" if len(self.amax_groups) == 1 else "share"
            head += f"; {counted(len(self.amax_groups), 'group')} of weights {shares} a tensor amax"
        lines = [head]
        for recipe, names in by_recipe.items() if len(by_recipe) > 1 else ():
            alike = ", ".join(pattern for pattern, _ in grouped_names(names))
            lines.append(f"  {len(names)} with {recipe}: {alike}")
        return "\n".join(lines if self.coverage is None else [*lines, str(self.coverage)])


def convert(
    model: torch.nn.Module,
    recipe: Recipes,
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

    Call it before the optimizer and any wrapper refer to the parameters: converted weights are new
    parameters. Each keeps its value before quantization on the CPU until an optimizer has made
    its masters from it. Weights that several layers share stay shared. Gradients and attributes of
    the parameters are carried over. Layers of zerocast that have no name take their name in the
    model, by which stochastic rounding distinguishes them.

    Args:
        model: any module, the Linear itself included.
        recipe: the scheme, or its name. Or a mapping of patterns of fully qualified names, with
            ``*`` and ``?``, to recipes, names of recipes, or None, which leaves a layer as it is:
            ``{"*.experts.*": "nvfp4-4over6", "lm_head": None, "*": "mxfp8"}``. The first pattern
            that fits a layer's name decides; without one the layer stays as it is. A pattern other
            than ``*`` converts stacks of matrices (experts), too, by the names of parameters and
            their modules (:mod:`zerocast.recipes.recipe_patterns`). Every pattern but ``*`` must
            decide for something.
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
            as ``"model.layers.*.mlp.experts"``; or parameters by their names, or by patterns that
            end with a parameter's own name, such as ``"*.attn.in_proj_weight"``. A module's
            weights are its parameters of three dimensions or more, each matrix of which is
            quantized separately, and its matrix ``weight``. Its forward stays as it is and works
            with the values of the codes.
        amax_groups: layers that a server will fuse and whose weights therefore share one tensor
            amax, from this conversion on and in every cast. ``"auto"``: those of models of
            transformers and torchtitan that servers are known to fuse
            (:mod:`zerocast.cast.amax_groups`), where the recipe has a scale of the tensor; of other
            classes none, and under ``"high_precision"`` none. Or patterns of fully qualified names,
            ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; ``()`` for no groups. With
            ``weights="master"`` the layers must be sharded over the same ranks and gathered in one
            dtype; those of ``"auto"`` that are not share nothing.
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
    check_initialized(check_module("model", model))
    decision = decide(model, recipe, weights, filter_fqns, include, amax_groups)
    if strict:
        decision.check_strict()
    _apply(decision, model)
    return ConversionReport(
        {each.name: present(each.recipe) for each in decision.converted},
        tuple(each.name for each in decision.converted if each.is_linear),
        decision.left,
        coverage(model),
        tuple(each.name for each in decision.converted if not each.is_linear),
        decision.amax_groups,
    )


def _apply(decision: Decision, model: torch.nn.Module) -> None:
    """Convert ``model`` as decided, and note in its modules why others are left."""
    new: dict[torch.Tensor, torch.nn.Parameter] = {}
    groups: dict[str, AmaxGroup] = {}
    for each in decision.candidates:
        for _, module, name in each.places:
            note_reason(module, each.why_left or "", name)
    for each in decision.unnamed:
        for _, module, name in each.places:
            note_reason(module, each.why_left or "", name, is_candidate=False)
    for each in decision.converted:
        layer = _as_linear(each.places[0][1]) if each.is_linear else None
        if layer is not None and decision.weights == "high_precision":
            note_reason(layer, "it is quantized by each forward under autocast, not before")
            continue
        old = present(each.weight)
        is_first = old not in new
        if is_first:
            new[old] = _replacement(each, old, decision)
            note_replaced(old, new[old])
        for _, module, name in each.places:
            setattr(module, name, new[old])
        if layer is None:
            continue
        layer.low_bit_all_gather = decision.weights == "master"
        layer.amax_group = None
        recipe = present(each.recipe)
        if decision.weights == "master" and recipe.state:
            reserve_state(layer)
        label = decision.labels.get(old) if recipe.scales_tensor else None
        if decision.weights == "master" and label is not None:
            layer.amax_group = groups.setdefault(label, AmaxGroup(dissolves=decision.is_auto))
            layer.amax_group.layers += [layer] if is_first else []
    if decision.weights == "master":
        others = (each for each in decision.converted if not each.is_linear)
        for module in {module for each in others for _, module, _ in each.places}:
            keep_state_dict_plain(module)
    quantized = {old: each for old, each in new.items() if isinstance(each, QuantizedTensor)}
    for old, tensor in quantized.items():
        tensor.quantized_storage.amax_group = decision.labels.get(old)
    share_amaxes(list(quantized.values()))
    for fqn, module in named_modules(model):
        if isinstance(module, QuantizedModule):
            module.name = module.name or fqn


def _as_linear(module: torch.nn.Module) -> Linear:
    """Make this ``torch.nn.Linear`` a layer of zerocast."""
    module.__class__ = Linear
    assert isinstance(module, Linear)
    module._handle = new_handle(module)
    return module


def _replacement(each: Candidate, old: torch.Tensor, decision: Decision) -> torch.nn.Parameter:
    """Return what takes the place of the parameter ``old``, with its attributes and gradient."""
    recipe, name = recipe_of(old, present(each.recipe)), each.places[0][0]
    if decision.weights == "master":
        new = master_parameter(old, recipe, name=name, for_linear=each.is_linear)
    else:
        columnwise = each.is_linear and recipe.columnwise_has_shards
        new = quantized_parameter(old, recipe, columnwise=columnwise, name=name)
    vars(new).update(vars(old))
    new.grad = old.grad
    return new
