"""The pages of the documentation, the code that they show, and the command lines."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "fedray", "tune_spaces", "cluster", "analysis", "tests")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md")))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4,}.*\n(?:\n(?= {4}))?)+", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")


NO_COMMANDS = {
    "each client i of the cohort:": "privacy/README.md: formulas",
    "l + 8 D": "system/README.md: a formula",
    "x^{r+1} =": "system/README.md: a formula",
    "round,iterations,": "tracking/README.md: the beginning of a table",
    "2 trials at once": "tune_spaces/README.md: what a sweep prints",
}
"""How indented blocks begin that are neither commands nor Python, and what they are."""


def code_of(language: str) -> list[str]:
    """All fenced blocks of code in a language, of all documents."""
    return [code for text in TEXTS.values() for name, code in FENCED.findall(text) if name == language]


class Block(NamedTuple):
    """An indented block of a page, without its indentation."""

    page: str
    line: int
    text: str

    def is_python(self) -> bool:
        """Whether it is code of Python's, or YAML that could be."""
        try:
            tree = ast.parse(self.text)
        except SyntaxError:
            return False
        return not all(isinstance(each, ast.Expr) for each in tree.body)


def _line(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def _without_fenced(text: str) -> str:
    """The text with empty lines where fenced code is."""
    return FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)


def indented() -> list[Block]:
    """All indented blocks of all documents."""
    return [
        Block(page, _line(text, match.start()), textwrap.dedent(match[0]))
        for page, text in ((page, _without_fenced(text)) for page, text in TEXTS.items())
        for match in INDENTED.finditer(text + "\n")
    ]


class Command(NamedTuple):
    """A command line that a page shows, as words, without what stands for the folder of a program."""

    page: str
    line: int
    words: tuple[str, ...]
    in_text: bool
    """Whether it stands within a sentence or table."""

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {shlex.join(self.words)}"


def split_line(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line of a shell's."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
        elif words:
            yield (Path(words[0]).name if words[0] not in (".", "..") else words[0], *words[1:])
            words = []


def lines_of(block: Block) -> list[tuple[int, str]]:
    """The lines of a block that a shell would read: those after `$`, if there are any."""
    lines = block.text.replace("\\\n", "\\\0").split("\n")
    numbers = [block.line + sum(each.count("\0") for each in lines[:k]) + k for k in range(len(lines))]
    lines = [line.replace("\\\0", " ") for line in lines]
    if any(line.startswith("$ ") for line in lines):
        return [(number, line[2:]) for number, line in zip(numbers, lines, strict=True) if line.startswith("$ ")]
    # what is indented further shows a file that the line above names
    return [(number, line) for number, line in zip(numbers, lines, strict=True) if line.strip() and line[0] != " "]


def commands() -> list[Command]:
    """Whatever could be a command line: lines of indented blocks, and within sentences and tables code of several
    words. The changelog tells of commands as they were."""
    found: list[Command] = []
    for block in indented():
        if not block.is_python() and not block.text.startswith(tuple(NO_COMMANDS)):
            found += [
                Command(block.page, number, words, False)
                for number, line in lines_of(block)
                for words in _split_or_nothing(line)
            ]
    for page, text in TEXTS.items():
        text = _without_blocks(text) if page != "CHANGELOG.md" else ""
        for match in SPAN.finditer(text):
            line = " ".join(match[1].split())
            if " " in line:
                found += [Command(page, _line(text, match.start()), each, True) for each in _split_or_nothing(line)]
    return found


def _without_blocks(text: str) -> str:
    return INDENTED.sub(lambda match: "\n" * match[0].count("\n"), _without_fenced(text) + "\n")


def _split_or_nothing(line: str) -> list[tuple[str, ...]]:
    try:
        return list(split_line(line))
    except ValueError:
        # an apostrophe in a line that is no command
        return []


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows: fenced blocks whose name is in their first line, or in the sentence before them; and
    what is indented below the line of a block that names it."""
    found, text = {}, TEXTS[page]
    for match in FENCED.finditer(text):
        names = re.findall(r"^# (\w+\.(?:yaml|py))\b", match[2]) or re.findall(
            r"(\w+\.(?:yaml|py))\b", text[: match.start()].rstrip().rpartition("\n\n")[2]
        )
        for name in names[-1:]:
            found[name] = match[2]
    for block in (block for block in indented() if block.page == page):
        for name, content in re.findall(r"\b(\w+\.yaml)\b.*\n((?: +.*\n)+)", block.text):
            found[name] = textwrap.dedent(content)
    return found
