"""What is recorded of torchtitan's interface, and how a package is asked for the same facts.

``interface.json`` holds, by release and ``module:name``, signatures and fields with their defaults,
as ``python -m tests.adapters.torchtitan.interface`` read them out of the packages on PyPI, with
one installed. They are facts about what converters are given and asked, no code.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
from functools import reduce
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("interface.json")
RECORD: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
RELEASE = "0.3.0"
"""The release that is served, which the stand-in is like."""


def installed() -> str | None:
    """The release of torchtitan that is installed; None where none is."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return None


def fact(name: str) -> Any:
    """A signature without annotations, or by field its default; of the package, as it is now."""
    module, _, path = name.partition(":")
    value = reduce(getattr, path.split("."), importlib.import_module(module))
    if dataclasses.is_dataclass(value):
        return {field.name: _default(field) for field in dataclasses.fields(value)}
    return signature(value)


def signature(function: Any) -> str:
    """``(self, model)``: names, kinds and defaults of the parameters."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


if __name__ == "__main__":
    facts = RECORD | {str(installed()): {name: fact(name) for name in RECORD[RELEASE]}}
    _FILE.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
