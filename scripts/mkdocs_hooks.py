"""Hooks of mkdocs: the home page is README.md, links out of docs/, which the site does not have,
become paths, and every public name must be in the API reference.
"""

import importlib
import inspect
import re
from pathlib import Path, PurePosixPath
from typing import Any


def home() -> str:
    """README.md, with its links as from docs/."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    inside = readme.replace("](docs/", "](./")
    return re.sub(r"\]\((?!https:|\./)", "](../", inside)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``[text](../zerocast/cast/plan.py)`` -> ``text (`zerocast/cast/plan.py`)``."""
    if page.file.src_uri == "index.md":
        markdown = home()
    here = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent

    def path_for(match: re.Match[str]) -> str:
        text, target = match.groups()
        parts: list[str] = []
        for part in (here / target).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        if path.startswith("docs/"):
            return match.group()
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#L\d+)?\)", path_for, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Compare the pages under ``api/`` with ``__all__`` of the modules that they are about."""
    for page in sorted(Path(config.site_dir, "api").glob("*/index.html")):
        text, name = page.read_text(), page.parent.name
        source = Path(config.docs_dir, "api", f"{name}.md").read_text()
        module = importlib.import_module(re.findall(r"^::: (\S+)", source, re.MULTILINE)[0])
        missing = [
            public
            for public in module.__all__
            if f'id="{module.__name__}.{public}"' not in text
            and not inspect.ismodule(getattr(module, public))
        ]
        if missing:
            raise SystemExit(f"docs/api/{name}.md does not describe {', '.join(missing)}")
