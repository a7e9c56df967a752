"""What scripts/sizes.py counts of a made-up repository, and what it says of its table."""

import pytest
import sizes

PYTHON = '''"""A docstring
of two lines."""

from typing import NamedTuple  # a comment beside code

# a comment

LIMIT = 3
"""What a reader must know of it."""
TEXT = """a value
# of three lines

"""


@dataclass(frozen=True)
class Backend(Protocol):
    """A docstring."""

    name: str
    notes: bool

    def cast(self) -> None:
        """A docstring."""

    def digest(self): return """a value"""


class Point(NamedTuple):
    x: int
'''
PYTHON_LINES = 1 + 4 + 6 + 2  # the import, two constants, a class, another

CPP = """// a comment
#include "lanes.h"  // beside code
/* a comment
   of two lines */ int x = 1'000;

const char* url = "https://x /* no comment */";
char quote = '"';  /* beside
code */
"""


def made_up(root):
    """A repository of a few files, and the table of its sizes."""
    for file, text in {
        "cuda_src/a.h": CPP,
        "zerocast/__init__.py": "",
        "zerocast/numerics/backend.py": PYTHON,
        "zerocast/cast/plan.py": "x = 1\n" * 351,
        "tests/test_cast.py": "x = 1\n" * 451,
        "tests/support/simulation.py": "x = 1\n" * 451,
        "scripts/results/a.json": "{}\n",
        "scripts/a.py": "x = 1\n" * 100,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    (root / "scripts/sizes.toml").write_text(sizes.written(sizes.count(root)))


def test_what_is_counted(tmp_path):
    """Blank lines, comments and docstrings are no code; values of several lines are."""
    made_up(tmp_path)
    assert sizes.count(tmp_path) == {
        "code_lines": {
            "cuda_src": 4,
            "scripts": 100,
            "tests": 902,
            "zerocast/cast": 351,
            "zerocast/numerics": PYTHON_LINES,
        },
        "counts": {
            "classes of zerocast": 2,
            "dataclasses of zerocast/numerics": 2,
            "flags of Backend": 1,
            "methods of Backend": 2,
        },
        "lines_of_long_modules": {"zerocast/cast/plan.py": 351},
        "code_lines_of_long_files": {"tests/test_cast.py": 451},
    }


def test_what_has_grown_fails(tmp_path, capsys):
    """A count above its number fails, with both and what to do; `--write` does not raise it."""
    made_up(tmp_path)
    assert sizes.main(["--check"], tmp_path) == 0
    (tmp_path / "scripts/a.py").write_text("x = 1\n" * 101)
    (tmp_path / "zerocast/new.py").write_text("x = 1\n" * 351)
    sizes.main(["--write"], tmp_path)
    capsys.readouterr()
    assert sizes.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{entry}. Make it smaller, or write {number} there in the same commit and say in its "
        "message why."
        for entry, number in (
            ("scripts, code lines: 101; scripts/sizes.toml has 100", 101),
            ("zerocast/*.py, code lines: 351; scripts/sizes.toml has no entry", 351),
            ("zerocast/new.py, lines of long modules: 351; scripts/sizes.toml has no entry", 351),
        )
    ]


def test_what_has_shrunk_is_lowered(tmp_path, capsys):
    """A few lines less pass; many do not, nor a class less, until `--write` has lowered numbers."""
    made_up(tmp_path)
    (tmp_path / "scripts/a.py").write_text("x = 1\n" * 90)
    (tmp_path / "zerocast/cast/plan.py").write_text("x = 1\n" * 350)
    assert sizes.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "zerocast/cast/plan.py, lines of long modules: none; scripts/sizes.toml has 351. Lower it: "
        "python scripts/sizes.py --write"
    ]
    (tmp_path / "scripts/a.py").write_text("x = 1\n" * 89)
    (tmp_path / "zerocast/numerics/backend.py").write_text("class Backend:\n    notes: bool\n")
    assert sizes.main(["--check"], tmp_path) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "scripts, code lines",
        "zerocast/numerics, code lines",
        "classes of zerocast, counts",
        "dataclasses of zerocast/numerics, counts",
        "methods of Backend, counts",
        "zerocast/cast/plan.py, lines of long modules",
    ]
    sizes.main(["--write"], tmp_path)
    assert sizes.main(["--check"], tmp_path) == 0
    table = sizes.read((tmp_path / "scripts/sizes.toml").read_text())
    assert table == sizes.count(tmp_path)


@pytest.mark.parametrize("line", ['"scripts" = 101', "<<<<<<< HEAD", '"tests" = many'])
def test_a_table_that_was_merged_badly(tmp_path, line):
    """A second entry of a name, and a line that is no entry, are refused."""
    made_up(tmp_path)
    table = tmp_path / "scripts/sizes.toml"
    table.write_text(table.read_text().replace('"scripts" = 100', f'"scripts" = 100\n{line}'))
    with pytest.raises(
        SystemExit, match=r"two entries for scripts; keep one|write .NAME. = NUMBER"
    ):
        sizes.main(["--check"], tmp_path)
