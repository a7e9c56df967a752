"""decide: says which weights of a model a conversion replaces, and why others stay as they are.

It changes nothing. :mod:`zerocast.nn.convert` applies the decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.arguments import present
from zerocast.cast.amax_groups import Groups, check_patterns, is_auto
from zerocast.errors import InputError
from zerocast.nn.grouped import group_labels
from zerocast.nn.included import (
    ParameterPlace,
    check_not_replaced,
    included_weights,
    name_to_include,
    names_of,
    places,
    reached_weights,
    unnamed_weights,
    why_not_included,
    why_not_weight,
)
from zerocast.nn.layer_filter import Filter, LayerFilter, why_small
from zerocast.recipes import Recipe, short_name
from zerocast.recipes.recipe_patterns import RecipePatterns, Recipes
from zerocast.sharded.report import why_other
from zerocast.tensors.wrapped_names import named_modules


@dataclass(slots=True)
class Candidate:
    """The weight of a linear layer, or of other modules that ``include`` names.

    Attributes:
        name: the name of the layer, or of the weight of other modules.
        weight: the parameter; None where the layer computes it.
        places: the modules that have it: of a linear layer, this one alone.
        is_linear: whether it is that of a linear layer.
        recipe: by which it is quantized; None where ``why_left`` says that it has none.
        why_left: the reason why it stays as it is; None where it is converted.
        is_wanted: whether it was to be converted, so that ``strict`` asks for it.
    """

    name: str
    weight: torch.Tensor | None
    places: list[ParameterPlace]
    is_linear: bool
    recipe: Recipe | None
    why_left: str | None
    is_wanted: bool = True


@dataclass(frozen=True)
class Decision:
    """The result of :func:`decide`.

    Attributes:
        weights: as given.
        candidates: those of linear layers first.
        unnamed: the matrices of other modules that nobody asked for, with the reasons.
        labels: the label of the amax group of each converted weight that is in one.
        is_auto: whether the groups are those that servers are known to fuse.
    """

    weights: str
    candidates: list[Candidate]
    unnamed: list[Candidate]
    labels: dict[torch.Tensor, str]
    is_auto: bool

    @property
    def converted(self) -> list[Candidate]:
        """The candidates that are converted."""
        return [each for each in self.candidates if each.why_left is None]

    @property
    def left(self) -> dict[str, str]:
        """The reasons of the others, by name."""
        return {each.name: each.why_left for each in self.candidates if each.why_left is not None}

    @property
    def amax_groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the members of each group, where the recipe has a scale of the tensor."""
        groups: dict[str, list[str]] = {}
        for each in self.converted:
            if each.weight in self.labels and present(each.recipe).scales_tensor:
                groups.setdefault(self.labels[each.weight], []).append(each.name)
        return tuple(map(tuple, groups.values()))

    def check_strict(self) -> None:
        """Raise :class:`InputError` where a candidate that is wanted is left."""
        failed = [each for each in self.candidates if each.is_wanted and each.why_left is not None]
        reasons = [f"{each.name}: {each.why_left}" for each in failed]
        if reasons:
            of_layer = f"filter_fqns={[failed[0].name]}"
            way = of_layer if failed[0].is_linear else "a shorter include"
            raise InputError(
                f"strict=True needs every linear layer that filter_fqns does not leave out, and "
                f"every weight that include names, to be converted, and {len(reasons)} cannot be: "
                f"{'; '.join(reasons[:8])}{'; ...' if len(reasons) > 8 else ''}. Do what they say, "
                f"or leave them out (the first by {way}), or convert without strict."
            )


def decide(
    model: torch.nn.Module,
    recipe: Recipes,
    weights: str,
    filter_fqns: Filter,
    include: Sequence[str],
    amax_groups: Groups,
) -> Decision:
    """Decide what :func:`zerocast.nn.convert` does with these arguments of it.

    Raises:
        InputError: as :func:`zerocast.nn.convert` without ``strict``.
    """
    if weights not in ("quantized", "high_precision", "master"):
        raise InputError(
            f"weights must be 'quantized' (the parameters hold codes), 'high_precision' (they are "
            f"quantized under autocast) or 'master' (FSDP2 gathers them in codes), got {weights!r}."
        )
    patterns = RecipePatterns(recipe)
    if weights == "high_precision" and patterns.are_given:
        raise InputError(
            "patterns of names in recipe need weights that hold codes (weights='quantized') or are "
            "gathered in codes ('master'), got weights='high_precision', under which autocast has "
            "one recipe for all layers; give one recipe, and leave layers out by filter_fqns."
        )
    layer_filter = LayerFilter(filter_fqns, model)
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
    included, layers_named = included_weights(model, include)
    linears = _linears(model, layer_filter, patterns, weights)
    others = [
        _other(weight, found, patterns, weights, is_named=weight in included)
        for weight, found in reached_weights(model, included, patterns).items()
    ]
    patterns.check_all_decide()
    unnamed, takers = _unnamed(model, linears, others, patterns, weights)
    if weights != "high_precision":
        _leave_tied(model, linears, others, takers)
    for each in [*linears, *others]:
        is_named = each.places[0][1] in layers_named if each.is_linear else each.weight in included
        if is_named and each.why_left is not None:
            each.why_left = f"include names it, but {each.why_left}"
    recipes = _recipes([*linears, *others])
    layers = {each.name: each.weight for each in linears if each.why_left is None}
    # The masters of an amax group are known by their layers.
    stacks = {each.weight for each in others if each.why_left is None and weights == "quantized"}
    labels = group_labels(model, amax_groups, layers, stacks, recipes)
    return Decision(weights, [*linears, *others], unnamed, labels, is_auto(amax_groups))


def _recipes(candidates: Sequence[Candidate]) -> dict[torch.Tensor, Recipe]:
    """Return the recipe of each weight that is converted.

    Raises:
        InputError: for a weight with two.
    """
    found: dict[torch.Tensor, Candidate] = {}
    for each in candidates:
        if each.why_left is not None:
            continue
        recipe, first = present(each.recipe), found.setdefault(present(each.weight), each)
        if recipe != first.recipe:
            raise InputError(
                f"a weight that modules share has one recipe, got "
                f"{short_name(present(first.recipe))} for {first.name} and {short_name(recipe)} "
                f"for {each.name}; let one pattern in recipe fit both."
            )
    return {weight: present(each.recipe) for weight, each in found.items()}


def _other(
    weight: torch.Tensor,
    found: list[ParameterPlace],
    patterns: RecipePatterns,
    weights: str,
    *,
    is_named: bool,
) -> Candidate:
    """Return a weight of other modules than linear layers; ``include`` names it or does not."""
    recipe, why = patterns.recipe_for(names_of(found))
    if recipe is not None:
        why = why_not_included(weight, found, recipe, weights)
    is_wanted = is_named or recipe is not None
    return Candidate(found[0][0], weight, found, False, recipe, why, is_wanted)


def _linears(
    model: torch.nn.Module, layer_filter: LayerFilter, patterns: RecipePatterns, weights: str
) -> list[Candidate]:
    """Return the linear layers, with the reasons that do not depend on other layers."""
    names: dict[torch.nn.Linear, list[str]] = {}  # a module may have several names
    for fqn, module in named_modules(model, remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            names.setdefault(module, []).append(fqn)
    adapters, candidates = _adapters(model), []
    for module, fqns in names.items():
        name, weight = fqns[0], module._parameters.get("weight")
        recipe, unwanted = patterns.recipe_for(fqns)
        if module in adapters:
            unwanted = (
                "it is part of an adapter, which is trained in high precision; convert that alone "
                "to quantize it"
            )
        else:
            unwanted = layer_filter.why_not(module, fqns) or unwanted
        why = unwanted
        if recipe is not None and why is None and weight is not None:
            why = why_not_weight(weight, name, recipe, weights, module)
            if why is None and layer_filter.leaves_small:
                why = unwanted = why_small(recipe, weight.shape)
        elif why is None:
            why = (
                "its weight is computed from other parameters (a parametrization, pruning); remove "
                "that first"
            )
        place = f"{name}.weight".lstrip("."), module, "weight"
        candidates.append(Candidate(name, weight, [place], True, recipe, why, unwanted is None))
    return candidates


def _adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules of peft's adapters, which its layers name in an attribute."""
    return {
        part
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
        if isinstance(adapter := getattr(module, name, None), torch.nn.Module)
        for part in adapter.modules()
    }


def _unnamed(
    model: torch.nn.Module,
    linears: Sequence[Candidate],
    others: Sequence[Candidate],
    patterns: RecipePatterns,
    weights: str,
) -> tuple[list[Candidate], dict[torch.Tensor, str]]:
    """Return the matrices of other modules that nobody asked for, each with the reason; and of
    those that ``include`` would take, what to name in it.
    """
    computed: dict[torch.Tensor, str | None] = {
        parameter: each.why_left
        for each in linears
        if each.weight is None
        for parameter in each.places[0][1].parameters()
    }
    layers = {each.weight: each for each in linears}
    unnamed, takers = [], dict[torch.Tensor, str]()
    for weight, found in unnamed_weights(model, {each.weight for each in others}).items():
        recipe, why = patterns.recipe_for(names_of(found))
        why, layer = computed.get(weight) or why, layers.get(weight)
        is_free = layer is None or (layer.why_left is None and layer.recipe == recipe)
        if why is None and is_free and weights != "high_precision":
            why = why_not_included(weight, found, present(recipe), weights)
            takers |= {weight: name_to_include(found[0])} if why is None else {}
        if why is None:
            way = f"; include={[takers[weight]]} takes it" if weight in takers else ""
            why = f"{why_other(found[0][1])}{way}"
        unnamed.append(Candidate(found[0][0], weight, found, False, recipe, why, False))
    return unnamed, takers


def _leave_tied(
    model: torch.nn.Module,
    linears: Sequence[Candidate],
    others: Sequence[Candidate],
    takers: Mapping[torch.Tensor, str],
) -> None:
    """Leave weights that are also used where they stay in high precision; ``takers`` says what
    ``include`` would have to name.
    """
    converted = {
        (module, name)
        for each in (*linears, *others)
        if each.why_left is None
        for _, module, name in each.places
    }
    elsewhere: dict[torch.Tensor | None, str] = {}
    for parameter, (fqn, module, name) in places(model):
        if (module, name) not in converted:
            elsewhere.setdefault(parameter, fqn)
    for each in linears:
        if each.why_left is None and each.weight in elsewhere:
            taker = takers.get(present(each.weight))
            way = f"include={[taker]} converts both, or untie them" if taker else "untie them"
            each.why_left = (
                f"its weight is tied with {elsewhere[each.weight]}, which stays as it is; {way}"
            )
    why_linear = {each.weight: each.why_left for each in linears}
    for each in others:
        if each.why_left is None and (why := why_linear.get(each.weight)) is not None:
            each.why_left = f"it is tied with a linear layer, which stays as it is: {why}"
