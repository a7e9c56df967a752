"""Stands in for torchtitan's modules where it is not installed: the interface of interface.json.

What zerocast's converter imports and calls, and as much behaviour as it relies on: configurations
build their owners and are walked, modules initialise themselves. ``test_interface.py`` holds it to
the record, and the record to the package where that is installed.
"""

import sys
from dataclasses import dataclass, fields, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import torch


class Configurable:
    """What a nested ``Config`` builds."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """A node in a tree of configurations: children are fields, or stand in lists."""

        owner: ClassVar[Any] = None

        def traverse(self, config_cls, *, recurse=False, _prefix=""):
            """(name, node, parent, place) of every node of a class, of this one with neither."""
            if isinstance(self, config_cls):
                yield _prefix, self, None, None
                if not recurse:
                    return
            for name, child, holder, place in self._children():
                prefix = f"{_prefix}.{name}".lstrip(".")
                for found, node, parent, at in child.traverse(
                    config_cls, recurse=recurse, _prefix=prefix
                ):
                    yield found, node, *((holder, place) if parent is None else (parent, at))

        def _children(self):
            for field in fields(self):
                value = getattr(self, field.name)
                if isinstance(value, list):
                    places = [(f"{field.name}.{i}", v, value, i) for i, v in enumerate(value)]
                else:
                    places = [(field.name, value, self, field.name)]
                yield from (each for each in places if isinstance(each[1], Configurable.Config))

        def build(self, **kwargs):
            """The owner, made from this configuration."""
            return type(self).owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.Config.owner = cls


class Module(torch.nn.Module, Configurable):
    """A module that a configuration builds."""

    _param_init: dict[str, Any] | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """By parameter, how it is initialised."""

        param_init: dict[str, Any] | None = None
        sharding_config: Any = None

        def build(self, **kwargs):
            """The owner, which remembers how its parameters are initialised."""
            module = Configurable.Config.build(self, **kwargs)
            module._param_init = self.param_init
            return module

    def init_states(self, *, buffer_device=None) -> None:
        """Initialise all parameters in here."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._param_init[name](parameter)


class Linear(torch.nn.Linear, Module):
    """torch's, from a configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """[..., in_features] -> [..., out_features]."""

        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class ModelConfigConverter(Configurable):
    """Converts a tree of configurations."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Nothing that all have."""

    def convert(self, model_config):
        """The converted tree."""
        raise NotImplementedError


class QuantizationConverter(ModelConfigConverter):
    """One that quantizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """What all that quantize are told."""

        model_compile_enabled: bool = False


MODULES = {
    "torchtitan.components.quantization": (QuantizationConverter,),
    "torchtitan.models.common.linear": (Linear,),
    "torchtitan.protocols.model": (ModelConfigConverter,),
    "torchtitan.protocols.module": (Module,),
}


def install() -> None:
    """Let ``import torchtitan...`` find what stands in for it."""
    for name, values in MODULES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                sys.modules[path] = module = ModuleType(path)
                module.__spec__ = ModuleSpec(path, None, is_package=depth < len(parts))
                module.__path__ = []
        for value in values:
            setattr(sys.modules[name], value.__name__, value)
