"""Hooks of mkdocs: the home page is README.md, links out of docs/, which the site does not have,
become paths, and every public name is in the API reference, once: on a page of its own, or on that
of its module.
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


def described(page: Path) -> str:
    """Return what a page under ``api/`` describes, such as "zerocast.nn.convert"."""
    return re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)[0]


def public_names(module: str) -> list[str]:
    """The full names of what a module lists in ``__all__``, but modules."""
    found = importlib.import_module(module)
    return [f"{module}.{n}" for n in found.__all__ if not inspect.ismodule(getattr(found, n))]


def summary(name: str, is_module: bool) -> str:
    """The first paragraph of a docstring in Markdown, in one line."""
    module, _, last = name.rpartition(".")
    found = importlib.import_module(name if is_module else module)
    found = found if is_module else getattr(found, last)
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`|``([^`]+)``", r"`\1\2`", text.removeprefix(f"{name}: "))
    return text[:1].upper() + text[1:]


def overview(api: list[Any], docs: Path) -> str:
    """The tables of ``api/index.md``: the groups of pages that mkdocs.yml lists."""
    lines: list[str] = []
    for title, pages in (item for group in api[1:] for item in group.items()):
        lines += [f"\n## {title}\n", "| name | what it is |", "|---|---|"]
        for path in (path for page in pages for path in page.values()):
            name, link = described(docs / path), path.removeprefix("api/")
            lines.append(f"| [`{name}`]({link}) | {summary(name, 'modules/' in path)} |")
    return "\n".join(lines)


def rest_of_module(markdown: str, page: Path) -> str:
    """A module's page, without the names that have pages of their own, to which it links."""
    own = {described(other): other for other in page.parents[1].glob("[!i]*.md")}
    module = described(page)
    names = public_names(module)
    links = [f"[`{name}`](../{own[name].name})" for name in names if name in own]
    members = [name.rpartition(".")[2] for name in names if name not in own]
    options = f"    options:\n      members: {members}\n"
    options += "      show_bases: true\n      show_root_heading: false\n"
    above = f"On pages of their own: {', '.join(links)}.\n\n" if links else ""
    begin = f"::: {module}\n"
    return markdown.replace("    options:\n", "").replace(begin, above + begin + options)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Complete the home page and the pages under ``api/``. On all pages,
    ``[text](../zerocast/cast/plan.py)`` -> ``text (`zerocast/cast/plan.py`)``.
    """
    uri, docs = page.file.src_uri, Path(config.docs_dir)
    if uri == "index.md":
        markdown = home()
    elif uri == "api/index.md":
        (api,) = (part["API"] for part in config.nav if "API" in part)
        markdown += overview(api, docs)
    elif uri.startswith("api/modules/"):
        markdown = rest_of_module(markdown, docs / uri)
    here = PurePosixPath("docs") / PurePosixPath(uri).parent

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


def on_post_page(output: str, **_: Any) -> str:
    """Let names in the lists of contents break behind underscores and before capitals."""

    def with_breaks(span: re.Match[str]) -> str:
        return re.sub(r"(?<=_)(?=\w)|(?<=[a-z\d])(?=[A-Z])", "<wbr>", span.group())

    return re.sub(r'<span class="md-ellipsis">.*?</span>', with_breaks, output, flags=re.DOTALL)


def on_post_build(config: Any, **_: Any) -> None:
    """Compare the pages under ``api/`` with ``__all__`` of the modules that they are about."""
    text = "".join(page.read_text() for page in Path(config.site_dir, "api").rglob("index.html"))
    for page in sorted(Path(config.docs_dir, "api", "modules").glob("*.md")):
        missing = [name for name in public_names(described(page)) if f'id="{name}"' not in text]
        if missing:
            raise SystemExit(f"no page under docs/api describes {', '.join(missing)}")
