"""Which weights of a checkpoint are converted, by which recipe, and why others are left."""

import dataclasses
import fnmatch
from collections.abc import Sequence

import torch

from zerocast.arguments import did_you_mean
from zerocast.errors import InputError
from zerocast.export.dialects import EXPERTS, HEADS, LINEAR, Dialect
from zerocast.export.mixed import MixedDialect, module_of_experts
from zerocast.export.stored_model import StoredConv1D, StoredModel
from zerocast.export.transposed import is_transposed, transposed_shape
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.recipes.recipe_patterns import ALL, RecipePatterns, Recipes

LEFT_BY_ALL = ("lm_head", "gate", "router", "shared_expert_gate")
"""The last names of layers that the pattern ``*`` leaves, because servers build them in high
precision, or most checkpoints have them so: output layers and routers."""


class ChosenWeights:
    """The decision for each linear layer, and each stack of experts, of a checkpoint.

    Args:
        model: the checkpoint.
        dialect: the dialect to which it is converted.
        recipe: a recipe, or patterns of names with recipes; None for the dialect's.
        include: patterns of the names of layers; ``*`` leaves :data:`LEFT_BY_ALL`.
        exclude: patterns of the names of layers that are left, whatever ``include`` says.

    Attributes:
        recipes: the recipes of the weights to convert, by name.
        left: why the others are left, by name.

    Raises:
        InputError: for a pattern that fits no layer, or if no weight is converted.
    """

    def __init__(
        self,
        model: StoredModel,
        dialect: Dialect,
        recipe: Recipes | None = None,
        include: Sequence[str] = (ALL,),
        exclude: Sequence[str] = (),
    ) -> None:
        if recipe is None and isinstance(dialect, MixedDialect):
            raise InputError(
                f"the recipe of a weight decides how {dialect.name} stores it; give patterns of "
                "names with recipes, such as '*.experts.*=nvfp4-1x16' and '*=fp8-channel'."
            )
        self._model, self._dialect = model, dialect
        self._include, self._exclude = include, exclude
        self._patterns = None if recipe is None else RecipePatterns(recipe)
        self._fitting = set[str]()
        self.recipes: dict[str, Recipe] = {}
        self.left: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            module, _, last = name.rpartition(".")
            holder = model.get_submodule(module)
            is_layer = isinstance(holder, torch.nn.Linear | StoredConv1D) and last == "weight"
            is_stack = parameter.dim() == 3 and module.rpartition(".")[2] == "experts"
            if is_layer or is_stack:
                try:
                    self.recipes[name] = self._recipe(name, module, parameter)
                except InputError as reason:
                    self.left[name] = str(reason)
        unknown = [each for each in (*include, *exclude) if each not in self._fitting]
        if unknown and (names := [*self.left, *self.recipes]):
            raise InputError(
                f"each pattern of layers to include or exclude must fit the name of one, got "
                f"{unknown[0]!r}, which fits none of {', '.join(names[:4])}, ..."
                f"{did_you_mean(unknown[0], names)}"
            )
        if self._patterns is not None:
            self._patterns.check_all_decide()
        if not self.recipes:
            reasons = dict.fromkeys(self.left.values())
            raise InputError(
                f"no weight of {model.files.folder} would be converted: "
                f"{'; '.join([*reasons][:4]) or 'it has no linear layer'}."
            )

    def _recipe(self, name: str, module: str, parameter: torch.Tensor) -> Recipe:
        """Return the recipe of a weight. Raise InputError with the reason if it is left."""
        names = [module, name, *filter(None, [module_of_experts(name)])]
        own = [each for each in self._include if self._fits(each, names)]
        excluded = [each for each in self._exclude if self._fits(each, names)]
        if excluded:
            raise InputError(f"excluded by {excluded[0]!r}")
        if not own:
            raise InputError("not included")
        last = module.rpartition(".")[2]
        if last in LEFT_BY_ALL and all(each == ALL for each in own):
            raise InputError(f"an output layer or a router; include '*' and '*{last}' to cast it")
        if isinstance(self._model.get_submodule(module), StoredConv1D):
            raise InputError("a Conv1D, stored [in, out], for which no dialect has a place")
        if parameter.dtype not in NOMINAL_DTYPES:
            raise InputError(f"stored as {parameter.dtype}")
        shape, transposes = parameter.shape, False
        if parameter.dim() == 3:
            transposes = is_transposed(self._model, name)
            shape = transposed_shape(shape) if transposes else shape
        recipe: Recipe | None = None
        if self._patterns is not None:
            recipe, why = self._patterns.recipe_for(names)
            if recipe is None:
                raise InputError(why or "")
            if parameter.dim() == 3:
                recipe = dataclasses.replace(recipe, per_matrix=True)
        dialect = self._dialect.of_weight(name, recipe, shape)
        recipe = dialect.recipe if recipe is None else recipe
        in_experts = parameter.dim() == 3 or module_of_experts(name)
        kind = HEADS if last == "lm_head" else EXPERTS if in_experts else LINEAR
        if kind not in dialect.reads or (dialect.fuses_experts and parameter.dim() == 2):
            raise InputError(f"no server reads codes {kind} from {dialect.name}")
        if transposes and not dialect.fuses_experts:
            raise InputError(f"{dialect.name} has no place for matrices [in, out]")
        try:
            recipe.check_shape(shape)
        except InputError as error:
            why = str(error).partition(";")[0]
            raise InputError(f"{why}; a mixed dialect can store it by another recipe") from error
        return recipe

    def _fits(self, pattern: str, names: Sequence[str]) -> bool:
        fits = any(fnmatch.fnmatchcase(name, pattern) for name in names)
        if fits:
            self._fitting.add(pattern)
        return fits
