"""Included weights: those of other modules than linear layers, which a user names in ``include``.

Experts, embeddings and other modules (GPT-2's Conv1D) use their weights in many ways. So their
forward stays as it is and works with decoded values: of the codes that the parameter holds, or that
FSDP2 gathered. A weight of more than two dimensions is a stack of matrices.
"""

import dataclasses
import fnmatch
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.weak import WeakTensorKeyDictionary

from zerocast.arguments import did_you_mean, present, shown
from zerocast.errors import InputError
from zerocast.nn.linear import Linear
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.recipes.recipe_patterns import RecipePatterns
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.master_weight import as_master_like, as_plain
from zerocast.sharded.placement import is_sharded
from zerocast.sharded.report import pattern_of
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_modules

ParameterPlace = tuple[str, torch.nn.Module, str]
"""A parameter's fully qualified name, the module that has it, and its name there."""


def places(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, ParameterPlace]]:
    """Yield every parameter of ``model`` with its place; a shared one once for each of its
    modules.
    """
    for fqn, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, (f"{fqn}.{name}".lstrip("."), module, name)


_replaced = WeakTensorKeyDictionary()
"""By parameter that a conversion took out of its module, a weak reference to what took its place:
of a master the all-gather, which outlives the parameter that FSDP2 shards."""


def note_replaced(old: torch.Tensor, new: torch.Tensor) -> None:
    """Remember that ``new`` has taken the place of the parameter ``old``."""
    _replaced[old] = weakref.ref(gather_of(new) or new)


def check_not_replaced(model: torch.nn.Module) -> None:
    """Raise :class:`InputError` where ``model`` has a parameter that another module had, too, until
    it was converted: they were tied, and are no longer.
    """
    for parameter, (fqn, _, _) in places(model):
        if _replaced.get(parameter, lambda: None)() is not None:
            raise InputError(
                f"modules that share a weight must be converted in one call, got {fqn}, which was "
                "tied with a weight that an earlier zerocast.nn.convert has replaced; convert a "
                "module that contains both, or give this one a separate torch.nn.Parameter."
            )


def check_include(include: object) -> None:
    """Raise :class:`InputError` unless ``include`` is a list or tuple of names."""
    names = include if isinstance(include, list | tuple) else [None]
    if not all(isinstance(name, str) for name in names):
        raise InputError(
            f"include must be a list of names of modules such as ['model.layers.*.mlp.experts'], "
            f"got {shown(include)}."
        )


def included_weights(
    model: torch.nn.Module, include: Sequence[str]
) -> tuple[dict[torch.Tensor, list[ParameterPlace]], set[torch.nn.Module]]:
    """Return the weights that ``include`` names, each with all its places outside of linear layers;
    and the linear layers that it names.

    A module has as weights its parameters of three dimensions or more, and the matrix ``weight``. A
    pattern names parameters, too, where it ends with their own name: ``*`` is no bias.

    Raises:
        InputError: for a name that names no weight.
    """
    found, named = list(places(model)), set[torch.Tensor]()
    modules = named_modules(model, remove_duplicate=False)
    linears = {fqn: each for fqn, each in modules if isinstance(each, torch.nn.Linear)}
    layers = set[torch.nn.Module]()
    for pattern in include:
        alike = {
            parameter
            for parameter, (fqn, _, name) in found
            if fqn == pattern
            or (_is_weight(parameter, name) and _is_of(fqn.removesuffix(name), pattern))
            or (
                parameter.dim() > 1 and pattern.endswith(name) and fnmatch.fnmatchcase(fqn, pattern)
            )
        }
        of_layers = fnmatch.filter(linears, pattern.removesuffix(".weight"))
        if not alike and not of_layers:
            raise _names_nothing(pattern, found)
        named |= alike
        layers |= {linears[fqn] for fqn in of_layers}
    weights: dict[torch.Tensor, list[ParameterPlace]] = {}
    for parameter, place in found:
        if parameter in named and not isinstance(place[1], torch.nn.Linear):
            weights.setdefault(parameter, []).append(place)
    return weights, layers


def _names_nothing(
    pattern: str, found: Sequence[tuple[torch.Tensor, ParameterPlace]]
) -> InputError:
    matrices = [place for parameter, place in found if parameter.dim() > 1]
    own = dict.fromkeys(
        f"{pattern}.{name}" for fqn, _, name in matrices if _is_of(fqn.removesuffix(name), pattern)
    )
    near = ""
    if own:
        problem = f"whose matrices have other names; name {', '.join(own)}"
    else:
        problem = "which matches none; correct it, or remove it"
        near = did_you_mean(pattern, map(name_to_include, matrices))
    return InputError(
        "each name in include must be that of a module with weights (a matrix called weight, or "
        "parameters of more dimensions), of a linear layer or of a parameter, or a pattern of such "
        f"names, got {pattern!r}, {problem}.{near}"
    )


def reached_weights(
    model: torch.nn.Module,
    included: Mapping[torch.Tensor, list[ParameterPlace]],
    patterns: RecipePatterns,
) -> dict[torch.Tensor, list[ParameterPlace]]:
    """Return the ``included`` weights, and the stacks of matrices that ``patterns`` reach."""
    others: dict[torch.Tensor, list[ParameterPlace]] = {}
    for parameter, place in places(model):
        is_other = not isinstance(place[1], torch.nn.Linear | _ConvNd)
        if is_other and parameter not in included and _is_weight(parameter, place[2]):
            others.setdefault(parameter, []).append(place)
    reached = {w: found for w, found in others.items() if patterns.reach(w, names_of(found))}
    return {**included, **reached}


def unnamed_weights(
    model: torch.nn.Module, known: Set[torch.Tensor | None]
) -> dict[torch.Tensor, list[ParameterPlace]]:
    """Return the matrices and stacks outside of linear layers that are in high precision and not
    ``known``: what a conversion leaves because nobody names it.
    """
    weights: dict[torch.Tensor, list[ParameterPlace]] = {}
    for parameter, place in places(model):
        is_linear = isinstance(place[1], torch.nn.Linear) and place[2] == "weight"
        is_done = is_linear or parameter in known or isinstance(place[1], QuantizedModule)
        is_done |= isinstance(parameter, QuantizedTensor) or gather_of(parameter) is not None
        if parameter.dim() > 1 and not is_done and not is_sharded(parameter):
            weights.setdefault(parameter, []).append(place)
    return weights


def name_to_include(place: ParameterPlace) -> str:
    """Return what to name in ``include`` for the parameter at this place, as short as can be."""
    fqn, module, name = place
    of_module = fqn.removesuffix(name).removesuffix(".")
    return pattern_of(
        of_module or fqn if _is_weight(present(module._parameters[name]), name) else fqn
    )


def names_of(weight_places: Sequence[ParameterPlace]) -> list[str]:
    """Return the names by which patterns find a weight: the parameter's and its modules'."""
    return [
        each
        for fqn, _, name in weight_places
        for each in (fqn, fqn.removesuffix(name).removesuffix("."))
    ]


def _is_weight(parameter: torch.Tensor, name: str) -> bool:
    return parameter.dim() > 2 or (parameter.dim() == 2 and name == "weight")


def _is_of(prefix: str, pattern: str) -> bool:
    """Say whether the module that gives its parameters this ``prefix`` is named by ``pattern``."""
    return fnmatch.fnmatchcase(prefix.removesuffix("."), pattern)


def recipe_of(weight: torch.Tensor, recipe: Recipe) -> Recipe:
    """Return the recipe that quantizes each matrix of an included ``weight`` separately."""
    return recipe if weight.dim() < 3 else dataclasses.replace(recipe, per_matrix=True)


def why_not_included(
    weight: torch.Tensor,
    weight_places: Sequence[ParameterPlace],
    recipe: Recipe,
    weights: str,
) -> str | None:
    """Say why an included weight stays as it is; None if it can be converted.

    Raises:
        InputError: as :func:`why_not_weight`.
    """
    name, module, _ = weight_places[0]
    if isinstance(module, _ConvNd) or weight.dim() < 2:
        kind = type(module).__name__
        return f"it belongs to class {kind} and has no matrices that a forward multiplies"
    if getattr(module, "max_norm", None) is not None:
        return "its module writes it in every forward; set its max_norm to None"
    if weights == "master" and recipe.state:
        return (
            f"under {type(recipe).__name__} its state would have to be saved with it; give it a "
            f"recipe without a state, such as 'current'"
        )
    return why_not_weight(weight, name, recipe_of(weight, recipe), weights)


def why_not_weight(
    weight: torch.Tensor,
    name: str,
    recipe: Recipe,
    weights: str,
    linear: torch.nn.Linear | None = None,
) -> str | None:
    """Say why the properties of a weight, or of its ``linear`` layer, leave it as it is; None if it
    can be converted.

    Raises:
        InputError: under ``"master"``, if it is sharded already.
    """
    if isinstance(weight, QuantizedTensor):
        return "it is quantized already"
    if gather_of(weight) is not None:
        return "it is gathered in codes already"
    if weights == "master" and is_sharded(weight):
        # A skipped weight would be gathered in high precision although codes were asked for.
        raise InputError(
            f"weights='master' needs layers whose weights are not sharded, got {name}, whose "
            "weight is sharded; call zerocast.nn.convert before fully_shard or parallelize_module, "
            "or leave the layer out by filter_fqns or include."
        )
    if linear is not None and type(linear) not in (torch.nn.Linear, Linear):
        kind = f"class {type(linear).__name__}, which may use its weight in another way"
        if type(linear) is NonDynamicallyQuantizableLinear:
            kind = "torch.nn.MultiheadAttention's out_proj"
        return f"it is {kind}; put a torch.nn.Linear in its place"
    if type(weight) is not torch.nn.Parameter:
        return (
            f"its weight is a {type(weight).__name__}, not a torch.nn.Parameter; convert the model "
            f"before what makes it one"
        )
    if weight.dtype not in NOMINAL_DTYPES:
        return (
            f"its weight is {weight.dtype}, and a quantized one presents FP32, BF16 or FP16; give "
            f"it one of these dtypes"
        )
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return (
            "its weight has gradient hooks, which a new parameter would lose; register them after "
            "the conversion"
        )
    try:
        recipe.check_shape(weight.shape)
    except InputError as error:
        why = str(error).removesuffix(".")
        if weights != "high_precision" and weight.numel():
            given = {pattern_of(name) or "*": "fp8-block"}
            why += f", or give it a recipe of any width, {given}"
        return why
    return None


# --- state dicts of modules with masters ---


def keep_state_dict_plain(module: torch.nn.Module) -> None:
    """Make state dicts of ``module`` hold plain tensors for its masters, as those of linear layers
    do.
    """
    module.register_state_dict_post_hook(_save_plain)
    module.register_load_state_dict_pre_hook(_load_as_masters)


def _save_plain(module: torch.nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    for name, parameter in module._parameters.items():
        saved = state_dict.get(prefix + name)
        if saved is not None and saved is not parameter:  # it is under keep_vars
            state_dict[prefix + name] = as_plain(saved)


def _load_as_masters(
    module: torch.nn.Module, state_dict: Any, prefix: str, metadata: Any, *others: Any
) -> None:
    if not metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state_dict:
            state_dict[prefix + name] = as_master_like(parameter, state_dict[prefix + name])
