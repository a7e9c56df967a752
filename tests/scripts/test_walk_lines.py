"""scripts/walk_lines.py: the walks of docs/architecture.md lead to what they name."""

import re

import pytest
from walk_lines import PAGE, PLACE, corrected, line_of

WALKS = {"A master shard to gathered codes": 9, "A gradient to a weight": 12, "An FSDP2 gather": 8}
"""The most files that a reader of each has to open."""


def test_every_place_is_where_the_page_says():
    """If not: python scripts/walk_lines.py --write."""
    text = PAGE.read_text()
    assert corrected(text) == text


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_short(walk):
    """It has places, and they are in few files."""
    section = re.split(r"\n##+ ", PAGE.read_text().split(f"### {walk}\n")[1])[0]
    files = {match[3] for match in PLACE.finditer(section)}
    assert 1 < len(files) <= WALKS[walk]


def test_a_name_that_is_gone_is_found():
    """A place whose file does not define its name."""
    with pytest.raises(LookupError, match="does not define"):
        line_of(PAGE.parent.parent / "zerocast" / "cast" / "plan.py", "CastPlan.none")
