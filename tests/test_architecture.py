"""House rules that a machine can check: imports, docstrings of public names, the drawn tree."""

import ast
import difflib
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support import fence
from zerocast.tensors.pipeline import ORDER

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zerocast"

# Lowest first. A module imports from lower lines or from its own package; the parts on one line
# never import each other.
LAYERS = (
    ("errors", "versions"),
    ("arguments", "safe_files"),
    ("layout",),
    ("numerics",),
    ("recipes",),
    ("backends", "comm"),
    ("tensors",),
    ("cast",),
    ("sharded",),
    ("optim",),
    ("export", "nn"),
    ("checkpoint", "refit"),
    ("__init__",),
    ("adapters", "lab"),  # around the core, which is all below
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line}

PUBLIC_MODULES = (
    "zerocast",
    "zerocast.comm",
    "zerocast.checkpoint",
    "zerocast.sharded",
    "zerocast.nn",
    "zerocast.optim",
    "zerocast.export",
    "zerocast.refit",
    "zerocast.lab.costs",
    "zerocast.lab.conformance",
    "zerocast.adapters.deepspeed",
    "zerocast.adapters.megatron",
    "zerocast.nn.tensor_parallel",
)


# --- imports run one way ---


def imports(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Each zerocast module that ``source`` imports, with its line; local and type-only ones too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) + is_package - node.level]
            base = ".".join(parents) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            if origin == "zerocast":  # `from zerocast import nn`: the part is the name
                found += [
                    (node.lineno, f"zerocast.{alias.name}" if alias.name in LEVEL else origin)
                    for alias in node.names
                ]
            else:
                found.append((node.lineno, origin))
    return [(line, name) for line, name in found if name.split(".")[0] == "zerocast"]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of ``source`` that do not go down."""
    here = fence.package_of(module)
    return [
        f"{module}, line {line}: {here} may not import {name}"
        for line, name in imports(source, module, is_package)
        if fence.package_of(name) != here and LEVEL[fence.package_of(name)] >= LEVEL[here]
    ]


def test_imports_run_one_way():
    """No module of zerocast imports from its own line of the layers or from a higher one."""
    wrong = [
        text
        for file in sorted(PACKAGE.rglob("*.py"))
        for text in violations(file.read_text(), fence.module_of(file), file.name == "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zerocast.errors", "import zerocast.numerics"),
        ("zerocast.layout.extent", "from zerocast.numerics import Masters"),
        ("zerocast.backends.cpu", "from zerocast import comm"),
        ("zerocast.backends.cpu", "from ..comm import Communicator"),
        ("zerocast.recipes.recipe", "def f():\n    from zerocast.backends import backend_for"),
        ("zerocast.optim.zero", "if TYPE_CHECKING:\n    from zerocast.nn import Linear"),
        ("zerocast.cast.plan", "from zerocast import quantize"),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    """The check sees absolute, relative, local and type-only imports that go up or sideways."""
    assert len(violations(source, module)) == 1


def test_no_modules_import_each_other():
    """There is no circle of imports inside of a package either, local and type-only ones
    included; that a module imports a name from its own package is none.
    """
    files = {fence.module_of(file): file for file in PACKAGE.rglob("*.py")}
    graph = {
        module: {
            name
            for _, name in imports(file.read_text(), module, file.name == "__init__.py")
            if name in files and files[name].name != "__init__.py"
        }
        for module, file in files.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_every_part_has_a_layer():
    """Whatever stands in zerocast/ has its line in the layers, so nothing escapes the check."""
    parts = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert parts <= LEVEL.keys()


# --- what packages use of each other ---


def test_the_packages_around_the_core_use_what_is_listed():
    """adapters and lab use the names of the core that tests/fence.toml lists, all and no others.
    To shorten the list is welcome; to lengthen it needs a reason.
    """
    listed, used = (ROOT / "tests" / "fence.toml").read_text(), fence.written(fence.uses())
    lines = difflib.ndiff(listed.splitlines(), used.splitlines())
    changes = "\n".join(line for line in lines if line[0] in "+-")
    assert listed == used, f"python -m tests.support.fence > tests/fence.toml changes:\n{changes}"


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from zerocast.cast import CastPlan as P", {("zerocast.cast", "CastPlan")}),
        ("from zerocast import quantize", {("zerocast", "quantize")}),
        ("from zerocast import nn\nnn.Linear", {("zerocast.nn", "Linear")}),
        ("from zerocast.nn import convert\nconvert.apply", {("zerocast.nn", "convert")}),
        ("import zerocast\nzerocast.nn.Linear", {("zerocast.nn", "Linear")}),
        ("import zerocast.nn as n\nn.Linear.forward", {("zerocast.nn", "Linear")}),
        ("import torch\ntorch.nn.Linear", set()),
    ],
)
def test_a_use_is_seen(source, used):
    """Names that are imported, and attributes of modules that are."""
    modules = {"zerocast", "zerocast.nn", "zerocast.cast", "zerocast.nn.convert"}
    given = fence.Source("zerocast.lab", ast.parse(source))
    assert set(fence.used_names(given, modules, {"zerocast.nn.convert"})) == used


def test_no_private_name_of_another_package_is_used():
    """By an import, as an attribute, or of a class that is inherited from."""
    assert not fence.private_uses()


# --- importing is light ---


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``statement``, standard library left out."""
    code = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)} - sys.stdlib_module_names


def test_import_loads_nothing_beyond_torch():
    """`import zerocast` loads itself, torch and what torch loads: no cupy, no mpi4py, no extra."""
    of_torch = loaded_by("import torch, torch.distributed.nn.functional")
    assert loaded_by("import torch, zerocast") - of_torch == {"zerocast"}


# --- what is public is documented ---


def public_names() -> list[tuple[str, str]]:
    """(module, name) of everything that a public module lists."""
    modules = [importlib.import_module(name) for name in PUBLIC_MODULES]
    return [(module.__name__, name) for module in modules for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), public_names())
def test_public_names_are_documented(module, name):
    """A public class or function has its own docstring, and so have its methods and properties."""
    value = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return  # a constant; its comment stands beside it
    doc = value.__doc__ or ""
    assert doc.strip(), f"{module}.{name} has no docstring"
    assert not doc.startswith(f"{name}("), f"{module}.{name} has only what dataclass wrote for it"
    if inspect.isclass(value):
        undocumented = [
            attribute
            for attribute, member in inspect.getmembers(value)
            if not attribute.startswith("_")
            and (inspect.isroutine(member) or isinstance(member, property))
            and (
                # None of what is inherited from a built-in class.
                getattr(inspect.unwrap(getattr(member, "fget", member)), "__module__", "") or ""
            ).startswith("zerocast")
            and not inspect.getdoc(getattr(value, attribute))
        ]
        assert not undocumented, f"{module}.{name}: no docstring on {undocumented}"


# --- the tree is true ---


def drawn_tree() -> dict[str, set[str]]:
    """The tree of docs/architecture.md as directory -> entries; directories end in a slash."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"## The repository\n.*?```\w*\n(.*?)```", text, re.DOTALL)
    assert block, "docs/architecture.md has no section 'The repository' with a drawing"
    tree: dict[str, set[str]] = {"": set()}
    path: list[str] = []
    for line in block.group(1).splitlines():
        entry = re.match(r"((?:  )*)(\S+)(?:  .*)?$", line)
        if not entry:
            assert line.startswith(" " * 8), f"not an entry and not the rest of one: {line!r}"
            continue
        path[len(entry.group(1)) // 2 :] = [entry.group(2)]
        tree.setdefault("".join(path[:-1]), set()).add(path[-1])
    return tree


def is_kept(path: Path) -> bool:
    """Whether a path belongs to the repository: no dot file, nothing that tools leave behind."""
    left_behind = {"__pycache__", "build", "dist", "runs"}
    return (
        not path.name.startswith(".")
        and path.name not in left_behind
        and path.suffix not in {".so", ".dylib", ".egg-info"}
        and (path.is_file() or any(map(is_kept, path.iterdir())))
    )


def real_entries(directory: Path) -> set[str]:
    """The names of what ``directory`` holds; directories end in a slash."""
    return {path.name + "/" * path.is_dir() for path in directory.iterdir() if is_kept(path)}


def test_the_tree_that_is_drawn_is_the_real_one():
    """Every directory that the drawing opens holds what it shows, no more and no less."""
    tree = drawn_tree()
    assert "zerocast/" in tree, "the drawing must open zerocast/"
    for directory, drawn in tree.items():
        real = real_entries(ROOT / directory)
        assert drawn == real, (
            f"docs/architecture.md draws {directory or 'the root'} without {sorted(real - drawn)} "
            f"and with {sorted(drawn - real)}, which it has not"
        )


def test_no_two_files_share_a_name():
    """But for ``__init__.py`` and the names of TransformerEngine's files, which its adapter has."""
    names = Counter(
        path.name for path in PACKAGE.rglob("*.py") if "transformer_engine" not in path.parts
    )
    assert [name for name, count in names.items() if count > 1] == ["__init__.py"]


def test_no_two_classes_share_a_name():
    """But for TransformerEngine's, which its adapter has, and torchtitan's ``Config``."""
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        if "transformer_engine" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == ["Config"]


def orders_of_steps(source: str) -> int:
    """How often ``source`` lists "partial_amax" and two other steps of a cast or more: in a list, a
    tuple, the keys of a dict, or calls in one function that are given the name of a step.
    """
    steps = {*ORDER[ORDER.index("partial_amax") : ORDER.index("store_plain")]}
    found = 0
    for node in ast.walk(ast.parse(source)):
        values: list[ast.AST | None] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            values += node.elts
        elif isinstance(node, ast.Dict):
            values += node.keys
        elif isinstance(node, ast.FunctionDef):
            calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
            values += [call.args[0] for call in calls if len(call.args) == 1]
        named = {value.value for value in values if isinstance(value, ast.Constant)} & steps
        found += "partial_amax" in named and len(named) >= 3
    return found


def test_the_order_of_a_cast_is_stated_once():
    """By the pipeline; whoever runs steps, makes some or replaces one asks it."""
    stated = {
        fence.module_of(file): count
        for file in PACKAGE.rglob("*.py")
        if (count := orders_of_steps(file.read_text()))
    }
    assert stated == {"zerocast.tensors.pipeline": 1}


@pytest.mark.parametrize(
    "source",
    [
        'STEPS = ("partial_amax", "reduce_amax", "partial_cast")',
        'steps = {"partial_amax": first, "select": then, "compute_scale": last}',
        'def cast():\n  run("partial_amax")\n  run("compute_scale")\n  run("partial_cast")',
    ],
)
def test_another_order_is_seen(source):
    """As a list, as a dict, and as calls that follow each other."""
    assert orders_of_steps(source) == 1


def test_no_path_of_a_machine():
    """No text of the repository names a directory that only its author's machine has."""
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for directory in ("", *(entry for entry in real_entries(ROOT) if entry.endswith("/")))
        for path in ((ROOT / directory).rglob("*") if directory else ROOT.glob("*"))
        if path.suffix
        in {".py", ".sh", ".md", ".toml", ".txt", ".h", ".cuh", ".cu", ".cpp", ".yaml", ".json"}
        for match in re.finditer(r"(?<![\w.])/(?:root|home|Users)/\S*", path.read_text())
    ]
    assert not found, "\n".join(found)
