"""MixedDialect: checkpoints whose weights are stored in several dialects of one family.

compressed-tensors has a section with a group for each format, whose targets are names of modules,
and ModelOpt lists the algorithm of every module. Both are written for the model that is exported.
The stored tensors of a weight show which of the dialects it has, by their names, dtypes and shapes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, Section, stored_name
from zerocast.recipes import Recipe

_OF_AN_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.")
"""Matches the name of a tensor of one expert; group 1 is the module of all experts."""


@dataclass(frozen=True, kw_only=True)
class MixedDialect(Dialect):
    """A dialect in which the recipe of a weight decides how it is stored, unless ``by_name`` does.

    A weight that has codes, or is cast anew from masters that were trained in codes, is stored in
    the first of ``members`` whose recipe is of the same class and which :meth:`holds` the trained
    recipe; if there is none, in the first that holds it. Its ``section`` has only the items that do
    not depend on the model, and its ``recipe`` is not used.

    Attributes:
        members: the dialects that weights may be stored in, all of one family.
    """

    members: tuple[Dialect, ...]

    def __post_init__(self) -> None:
        method = self.section["quant_method"]
        for each in (*self.members, *(other for _, other in self.by_name)):
            if each.section.get("quant_method") != method:
                raise InputError(
                    f"all weights of {self.name} are stored in dialects of {method}, whose readers "
                    f"know no others, got {each.name}."
                )

    def of_weight(self, name: str, recipe: Recipe | None, shape: Sequence[int]) -> Dialect:
        own = self.of(name)
        if own is not self:
            return own
        holding = [each for each in self.members if recipe and each.holds(recipe, shape)]
        alike = [each for each in holding if type(each.recipe) is type(recipe)]
        if holding:
            return (alike or holding)[0]
        raise InputError(
            f"{name} has {recipe or 'no recipe'}, which decides how {self.name} stores a weight, "
            f"and none of {', '.join(each.name for each in self.members)} holds it; name the "
            "dialect of the weight in by_name, a pair of a pattern and a dialect."
        )

    def of_stored(self, name: str, stored: Mapping[str, torch.Tensor]) -> Dialect:
        is_quantized = False
        for each in self.members:
            parameter, part = each.parameter_of(name) or ("", "")
            names = {own: stored_name(parameter, own) for own in each.names if part}
            parts = {own: stored[name] for own, name in names.items() if name in stored}
            is_quantized |= each.scales in parts
            if part and each.fits(parts):
                return each
        if is_quantized:
            raise InputError(
                f"the tensors of the weight of {name.rpartition('.')[0]} are of none of "
                f"{', '.join(each.name for each in self.members)}, which {self.name} consists of."
            )
        return self

    def quantization_config(
        self,
        unquantized: Sequence[str],
        heads: Sequence[str] = (),
        quantized: Mapping[str, Dialect] = MappingProxyType({}),
    ) -> Section:
        """Return the section for a model with these modules. One dialect alone has its own."""
        members = {each.name: each for each in quantized.values()}
        if len(members) == 1:
            (member,) = members.values()
            return member.quantization_config(unquantized, heads)
        targets: dict[str, dict[str, None]] = {}
        for module, each in quantized.items():
            experts = module_of_experts(f"{module}.")
            target = experts or module
            if experts and self.matches_layers:
                target = f"re:{re.escape(experts)}\\.\\d+\\."
            targets.setdefault(each.name, {})[target] = None
        groups = [{**_group(members[name]), "targets": [*own]} for name, own in targets.items()]
        section = {**self.section, self.unquantized_key: list(unquantized)}
        section["config_groups"] = {f"group_{i}": group for i, group in enumerate(groups)}
        if self.matches_layers:
            formats = {group["format"] for group in groups}
            section["format"] = "mixed-precision" if len(formats) > 1 else formats.pop()
        else:
            section["quantized_layers"] = {
                module: algorithm_of(members[name].section)
                for name, own in targets.items()
                for module in own
            }
        return section

    def has_section(self, given: Section) -> bool:
        groups = given.get("config_groups")
        if not isinstance(groups, dict) or len(groups) < 2:
            return False
        known = [_group(each) for each in self.members]
        return all(given.get(key) == value for key, value in self.section.items()) and all(
            isinstance(group, dict) and {**group, "targets": None} in known
            for group in groups.values()
        )


def module_of_experts(name: str) -> str | None:
    """Return the module of all experts if ``name`` is that of a tensor of one expert; else None."""
    found = _OF_AN_EXPERT.match(name)
    return None if found is None else found[1]


def algorithm_of(section: Section) -> dict[str, Any]:
    """Return what ModelOpt says of each layer of a model with this section of one format."""
    (group,) = section["config_groups"].values()
    size = group["weights"].get("group_size")
    return {"quant_algo": section["quant_algo"], **({} if size is None else {"group_size": size})}


def _group(dialect: Dialect) -> Section:
    """Return the group of a dialect's section, without its targets."""
    (group,) = dialect.section["config_groups"].values()
    return {**group, "targets": None}
