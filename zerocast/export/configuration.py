"""The contents of ``config.json``, above all the modules that a server must build unquantized.

A server builds a quantized layer for every module that the section does not name. It loads whatever
is stored into that layer, even unquantized values. So the section names every unquantized module
that some server builds as a linear layer or as experts: each ``torch.nn.Linear``, stored or not,
and each module with a stored parameter of two or more dimensions, except embeddings and biases.
Names are those of the checkpoint.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.arguments import shown
from zerocast.errors import InputError
from zerocast.export.dialects import EXPERTS, HEADS, LINEAR, Dialect, Section
from zerocast.export.entries import Entry, ExportSource, Names
from zerocast.export.experts import projections
from zerocast.export.mixed import algorithm_of, module_of_experts
from zerocast.export.stored_names import checkpoint_name, stored_order


@dataclass(frozen=True)
class Configuration:
    """The contents of ``config.json`` for an export.

    Attributes:
        source: the model, optimizer or plan that is exported.
        entries: its tensors.
        dialect: the dialect of the checkpoint.
        names: see :class:`zerocast.export.Export`.
        modules: for an optimizer or a plan, which do not know their modules, the names in the
            checkpoint of those that a server must not build quantized; None if unknown.

    Raises:
        InputError: if ``modules`` is given for a model, or is not a list of names.
    """

    source: ExportSource
    entries: Sequence[Entry]
    dialect: Dialect
    names: Names
    modules: Sequence[str] | None

    def __post_init__(self) -> None:
        given = self.modules or []
        is_list = isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)
        is_model = isinstance(self.source, torch.nn.Module)
        if not is_list or (is_model and self.modules is not None):
            raise InputError(
                f"modules must be a list of names for an optimizer or a plan, and left out for a "
                f"model, which knows its own, got {shown(self.modules)}."
            )

    @property
    def unquantized(self) -> list[str]:
        """The names, in the checkpoint, of the modules that a server must not build quantized.

        Raises:
            InputError: for an optimizer or a plan whose ``modules`` are not known.
        """
        return list(self._by_name())

    def section(self) -> Section:
        """Return the ``quantization_config``.

        Unless the dialect matches layers, it also lists the modules' names in the model, by which
        transformers matches them.

        Raises:
            InputError: as :attr:`unquantized`.
        """
        found, entries = self._by_name(), sorted(self.entries, key=stored_order)
        kinds = _kinds(entries, self.source)
        also = () if self.dialect.matches_layers else found.values()
        in_codes = [
            (entry, kind)
            for entry, kind in zip(entries, kinds, strict=True)
            if entry.recipe is not None
        ]
        return self.dialect.quantization_config(
            [*dict.fromkeys([*found, *also])],
            [entry.module for entry, kind in in_codes if kind is HEADS],
            {entry.module: entry.dialect for entry, _ in in_codes},
        )

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the contents of the files that readers of ModelOpt's checkpoints may want beside
        ``config.json``, by name.

        Raises:
            InputError: as :attr:`unquantized`.
        """
        section = self.section()
        if section.get("quant_method") != "modelopt":
            return {}
        layers = section.get("quantized_layers")
        own = algorithm_of(section) if layers is None else {"quant_algo": section["quant_algo"]}
        quantization = {**own, "kv_cache_quant_algo": None, "exclude_modules": section["ignore"]}
        quantization |= {} if layers is None else {"quantized_layers": layers}
        return {
            "hf_quant_config.json": {
                "producer": section["producer"],
                "quantization": quantization,
            }
        }

    def contents(self) -> dict[str, Any]:
        """Return the items to add to the model's own configuration.

        Raises:
            InputError: as :attr:`unquantized`.
        """
        nominal = next(entry.dtype for entry in self.entries if entry.recipe is not None)
        own = {"dtype": str(nominal).removeprefix("torch."), "quantization_config": self.section()}
        return own | self.dialect.also_in_config

    def _by_name(self) -> dict[str, str]:
        if isinstance(self.source, torch.nn.Module):
            return plain_modules(self.source, self.entries, self.dialect, self.names)
        if self.modules is None:
            raise InputError(
                f"a {type(self.source).__name__} does not know which modules a server must not "
                f"build quantized; give modules=, their names in the checkpoint (routers, lm_head, "
                f"experts), or [] where there is none."
            )
        return {name: name for name in self.modules}


def _kinds(entries: Sequence[Entry], source: ExportSource) -> list[str]:
    """Return the kind of weight of each entry. An output layer is what transformers returns as
    output embeddings, or a module named ``lm_head``.
    """
    head = getattr(source, "get_output_embeddings", lambda: None)()
    modules = source.named_modules() if isinstance(source, torch.nn.Module) else ()
    heads = {name for name, module in modules if module is head}
    found = []
    for entry in entries:
        module = _module(entry.name)
        is_head = module in heads or module.rpartition(".")[2] == "lm_head"
        found.append(HEADS if is_head else EXPERTS if _experts_of(entry) else LINEAR)
    return found


def check_weights_are_read(
    dialect: Dialect, entries: Sequence[Entry], source: ExportSource
) -> None:
    """Check that servers read every quantized weight, and that experts are quantized alike.

    Raises:
        InputError: if not; it names a weight.
    """
    experts = {_experts_of(each) for each in entries if each.recipe} - {""}
    forms: dict[str, Entry] = {}
    for entry, kind in zip(entries, _kinds(entries, source), strict=True):
        module = _experts_of(entry)
        if entry.recipe is not None and kind not in entry.dialect.reads:
            raise InputError(
                f"{entry.name} is the weight {kind}, whose codes no server reads from "
                f"{entry.dialect.name}; leave {module or _module(entry.name)} as it is "
                f"(filter_fqns of zerocast.nn.convert, include), or choose another dialect."
            )
        is_built = module in experts or (dialect.fuses_experts and module)
        if entry.recipe is None and is_built and _is_matrix(entry):
            alike = "all experts" if dialect.fuses_experts else f"all of {module}"
            raise InputError(
                f"{entry.name} is not quantized, and servers of {dialect.name} treat {alike} "
                "alike; convert all of them, or none."
            )
        if entry.recipe is not None and module:
            first = forms.setdefault(module, entry)
            if first.dialect != entry.dialect:
                raise InputError(
                    f"{first.name} is stored as {first.dialect.name} and {entry.name} as "
                    f"{entry.dialect.name}, and servers treat all of {module} alike; give all of "
                    "them one recipe, or pairs in by_name."
                )


def check_ties(model: torch.nn.Module) -> None:
    """Check that a transformers model ties its output layer exactly if its configuration says so.

    Servers follow the configuration, and ignore the stored weight of a tied output layer.

    Raises:
        InputError: if model and configuration disagree.
    """
    config: Any = getattr(model, "config", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not hasattr(config, "get_text_config"):
        return
    configured = {
        bool(getattr(each, "tie_word_embeddings", False))
        for each in (config, config.get_text_config())
    }
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    is_tied = getattr(head, "weight", None) is getattr(embeddings, "weight", None)
    if is_tied not in configured:
        raise InputError(
            f"the output layer of {type(model).__name__} "
            f"{'shares' if is_tied else 'does not share'} the weight of its embeddings, and its "
            f"configuration, which servers follow, has tie_word_embeddings={not is_tied}; set "
            f"config.tie_word_embeddings={is_tied}, or tie or untie the layer before the optimizer "
            "is made."
        )


def plain_modules(
    model: torch.nn.Module, entries: Sequence[Entry], dialect: Dialect, names: Names
) -> dict[str, str]:
    """Return the modules that a server must not build quantized: checkpoint names to model names.

    Where the dialect matches layers, experts are listed projection by projection. A module that
    contains a quantized weight, in the model or in the checkpoint, is never listed, since its name
    would match all of its layers.
    """
    above = _with_prefixes(entry.name for entry in entries if entry.recipe is not None)
    stored_above = _with_prefixes(entry.stored for entry in entries if entry.recipe is not None)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored: dict[str, list[str]] = {}
    for entry in entries:
        if entry.recipe is None and entry.name in parameters and _is_matrix(entry):
            stored.setdefault(_module(entry.name), []).extend(_names(entry, dialect))
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in above or isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        own = stored.get(name, [])
        if isinstance(module, torch.nn.Linear):  # also one whose weight is tied and not stored
            weight = checkpoint_name(names, f"{name}.weight")
            own = [_module(weight)]
            experts = module_of_experts(weight)
            if experts and not dialect.matches_layers:
                own, name = [experts], name.rsplit(".", 2)[0]
        found |= {each: name for each in own if each not in stored_above}
    return found


def _names(entry: Entry, dialect: Dialect) -> list[str]:
    """Return the names in the checkpoint of the modules of an unquantized entry."""
    if not entry.experts:
        return [entry.module]
    is_alike = entry.stored.rpartition(".")[2] == entry.name.rpartition(".")[2]
    fused = entry.stored if is_alike else entry.name  # or it is fused under another name
    own = entry.parts or projections(fused, entry.shape)
    return [_module(each) for each in own] if dialect.matches_layers else [own[0].rsplit(".", 3)[0]]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _with_prefixes(names: Iterable[str]) -> set[str]:
    """Return ``names`` and the names of all their parent modules, including the model's, ""."""
    above = {""}
    for name in names:
        above.update(itertools.accumulate(name.split("."), "{}.{}".format))
    return above


def _experts_of(entry: Entry) -> str:
    """Return the module of experts in the model that a tensor belongs to; else an empty string."""
    return entry.experts or module_of_experts(entry.name) or ""


def _is_matrix(entry: Entry) -> bool:
    return entry.tensor.dim() > 1 and not entry.name.endswith("bias")
