"""The claims of docs/transformer_engine.md that are not the subject of tests elsewhere."""

import re
from dataclasses import fields
from pathlib import Path

import zerocast
from zerocast import nn

PAGE = (Path(__file__).parents[2] / "docs" / "transformer_engine.md").read_text()


def section(title: str) -> str:
    """What stands under a heading of the page."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_names_are_there() -> None:
    """Every name of the first table is in zerocast or zerocast.nn, or a method of recipes."""
    found = 0
    for names, *_ in rows("The same names"):
        for name in re.findall(r"`(?:recipe|nn)?\.?(\w+)", names):
            found += 1
            assert any(hasattr(of, name) for of in (zerocast, nn, zerocast.Recipe)), name
    assert found > 20


def test_fields_that_take_one_value() -> None:
    """The second table has all of them, with their values and recipes."""
    listed = set()
    for names, values, kinds in rows("Fields of recipes that take one value"):
        names, values = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", values)
        every = [kind.__name__ for kind in zerocast.recipes.RECIPES.values()]
        for kind in every if kinds == "every recipe" else re.findall(r"`(\w+)`", kinds):
            for i, name in enumerate(names):
                value = eval(values[i if len(values) > 1 else 0])
                assert getattr(zerocast, kind)(**{name: value}) == getattr(zerocast, kind)()
                listed.add((kind, name))
    assert listed == {
        (kind.__name__, field.name)
        for kind in zerocast.recipes.RECIPES.values()
        for field in fields(kind)
        if "reason" in field.metadata and kind is not zerocast.Float8RowwiseScaling
    } | {("Float8RowwiseScaling", n) for n in ("fp8_dpa", "fp8_mha", "backward_override")}
