import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["cast", "train", "autocast"])
def test_the_code_in_the_readme_runs(code):
    """Each Python example of the README runs as it stands, by itself."""
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
