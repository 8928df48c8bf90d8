"""Makes the site's pages of the repository's own Markdown files, so that nothing is written twice.

Every file has the place in the site that it has in the repository, and so links between them work in both. What they
link to, such as pictures and programs, is copied. A folder to which they link gets a page with its files. The pages
below ``reference/`` are made of docstrings and of the descriptions of keys.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

log = logging.getLogger("mkdocs.hooks")

LINK = re.compile(r"\]\(([^)\s]+?)(?:#[^)\s]*)?\)|<img[^>]* src=\"([^\"]+)\"")

ELSEWHERE = ("data:", "http:", "https:", "mailto:")

NO_TAG = re.compile(
    r"<(?!(?:a|article|autoref|br|code|details|div|em|h1|h2|h3|h4|img|li|ol|p|pre|progress|small|span|strong|style|sub|"
    r"summary|sup|table|tbody|td|th|thead|tr|ul)\b)[A-Za-z][\w-]*"
)
"""What looks like a tag, and is none of those that pages have."""

EXAMPLES = "<!-- the examples with pictures in docs/gallery -->"
"""Where these stand in docs/gallery.md."""

PYTHON = {
    "reference/python.md": ("fedray", "# Python\n\nWhat `import fedray` offers."),
    "reference/rules.md": (
        "fedray.algorithms",
        "# Python, for algorithms\n\nWhat the rules of an algorithm compute with, from `fedray.algorithms`. "
        "[How one is written](../fedray/algorithms/README.md#writing-an-algorithm).",
    ),
    "reference/selections.md": (
        "fedray.selection",
        "# Python, for choices of clients\n\nWhat a selection (`train.sampling`) is made of, from `fedray.selection`. "
        "[How one is written](../docs/extending.md#a-choice-of-clients).",
    ),
}
"""The pages made of docstrings: the module whose names each lists, and its beginning."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the repository's pages, and what they link to."""
    texts = pages()
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for name in linked(texts):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warns of what a page shows nobody: a word in angle brackets outside code, which browsers take for a tag."""
    for word in sorted(set(NO_TAG.findall(html))):
        log.warning("%s: %s ... is no HTML: write &lt;%s ...", page.file.src_uri, word, word[1:])


def pages() -> dict[str, str]:
    """Returns the text of each page, by its path in the site."""
    found = {name: (ROOT / name).read_text(encoding="utf-8") for name in in_repository("*.md")}
    for folder in {name for name in targets(found) if (ROOT / name).is_dir()}:
        if f"{folder}/README.md" not in found:
            found[f"{folder}/README.md"] = page_of(folder)
    found = {name: LINK.sub(partial(_to_page, name), text) for name, text in found.items()}
    found |= {name.replace(".ipynb", ".md"): notebook(ROOT / name) for name in in_repository("docs/notebooks/*.ipynb")}
    found["docs/gallery.md"] = found["docs/gallery.md"].replace(EXAMPLES, examples())
    return {**found, **{name: python(*of) for name, of in PYTHON.items()}, **dict(keys())}


def _to_page(page: str, link: re.Match[str]) -> str:
    """Returns a link, which leads to the page of a folder if it leads to a folder."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1] or ""))
    is_folder = link[1] and not link[1].startswith((*ELSEWHERE, "#")) and (ROOT / target).is_dir()
    return link[0].replace(link[1], f"{link[1]}/README.md", 1) if is_folder else link[0]


def linked(texts: dict[str, str]) -> list[str]:
    """Returns the paths of all files to which pages link, other than pages."""
    return sorted(name for name in targets(texts) if (ROOT / name).is_file() and name not in texts)


def targets(texts: dict[str, str]) -> set[str]:
    """Returns the paths, in the repository, of all that pages link to."""
    found = set()
    for page, text in texts.items():
        for match in LINK.finditer(text):
            link = match[1] or match[2]
            if link and not link.startswith((*ELSEWHERE, "#")):
                found.add(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))
    return found


def in_repository(*patterns: str) -> list[str]:
    """Returns the paths of the files that are in the repository, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.splitlines() if (ROOT / name).exists())


def page_of(folder: str) -> str:
    """Returns a page that lists the files of a folder."""
    names = [name.removeprefix(f"{folder}/") for name in in_repository(f"{folder}/*")]
    return "\n".join([f"# {folder}\n", *(f"* [{name}]({name})" for name in names if not name.startswith("."))]) + "\n"


def examples() -> str:
    """Returns the gallery's part about the examples, which is made of their docstrings and of the pictures in
    docs/gallery."""
    parts = []
    for name in in_repository("docs/gallery/*.png"):
        program = f"analysis/examples/{Path(name).stem}.py"
        title, command, text = (ast.get_docstring(ast.parse((ROOT / program).read_text())) or "").split("\n\n", 2)
        shown = title.replace("\n", " ")
        what = shown.partition(": ")[2]
        parts += [f"## {shown.partition(':')[0]}", f"{what[:1].upper()}{what[1:]}"]
        parts += [f"![{shown}](gallery/{Path(name).name})", f"```\n{command}\n```", text]
        parts += [f"[The program](../{program})"]
    return "\n\n".join(parts)


def notebook(path: Path) -> str:
    """Returns an executed notebook as a page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell.get("outputs", []) if "text" in output)
        parts += [f"```\n{printed.rstrip()}\n```"] if printed else []
        parts += [shown(output["data"]) for output in cell.get("outputs", []) if "data" in output]
    return "\n\n".join([*parts, f"[The notebook]({path.name})"]) + "\n"


def shown(data: dict[str, Any]) -> str:
    """Returns an output of a notebook's cell as Markdown. ``data`` has its forms."""
    if "image/png" in data:
        return f'<img alt="what the cell draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        # blank lines would end the HTML
        return "<div>" + re.sub(r"\n\s*\n", "\n", "".join(data["text/html"])) + "</div>"
    return "```\n" + "".join(data["text/plain"]).rstrip() + "\n```"


def python(module: str, beginning: str) -> str:
    """Returns the page about what is imported from ``module``, of which mkdocstrings makes one of docstrings."""
    there = importlib.import_module(module)
    found = [getattr(there, name) for name in sorted(there.__all__, key=str.lower)]
    found = [each for each in found if hasattr(each, "__qualname__")]
    return "\n\n".join([beginning, *(f"::: {each.__module__}.{each.__qualname__}" for each in found)]) + "\n"


def keys() -> Iterator[tuple[str, str]]:
    """Yields the pages about the configuration's keys."""
    from fedray.config import documented_keys
    from fedray.tuning.settings import TuneConfig

    yield "reference/keys.md", table("Keys of a run", documented_keys())
    yield "reference/tune.md", table("Keys of a sweep", documented_keys(TuneConfig, "tune."))


def plain(text: str) -> str:
    """Returns Markdown that shows ``text`` as it is, also if it has ``<name>`` or ``{key: value}``."""
    return re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", text)


def table(title: str, documented: Iterable[tuple[str, Any, str, str]]) -> str:
    """Returns a page with a table of keys for each section."""
    sections: dict[str, list[str]] = {}
    for key, default, takes, what in documented:
        default = str(default).lower() if isinstance(default, bool) else default
        shown = "" if default is None or callable(default) else f"`{default}`"
        cells = " | ".join([f"`{key}`", plain(what), shown.replace("|", "\\|"), plain(takes)])
        sections.setdefault(key.rpartition(".")[0] or "the whole file", []).append(f"| {cells} |")
    head = "| key | what it is | default | takes |\n| --- | --- | --- | --- |"
    return "\n".join([f"# {title}", *(f"\n## {name}\n\n{head}\n" + "\n".join(rows) for name, rows in sections.items())])
