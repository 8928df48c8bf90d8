"""Makes Markdown of what docstrings have of other forms. mkdocstrings loads it (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example::?\n\n?((?:\1    .*\n?|\n)+)", re.MULTILINE)

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Puts a fence around what stands below ``Example:`` in a docstring, and turns Sphinx's roles into code."""

    def on_object(self, *, obj: griffe.Object, **ignored: Any) -> None:
        if obj.docstring:
            text = EXAMPLE.sub(_fenced, obj.docstring.value + "\n").rstrip()
            # the code that follows is indented, which is enough in Markdown
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = ROLE.sub(lambda found: f"`{found[1].removeprefix('fedray.')}`", text)


def _fenced(found: re.Match[str]) -> str:
    inner = f"{found[1]}    "
    code = found[2].strip("\n")
    return f"{found[1]}Example:\n{inner}```python\n{code}\n{inner}```\n"
