"""Shakespeare's plays by role: LEAF's json files, or texts of plays. The task is to predict the next character."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.sources.find import Layout, find_files, reading
from fedray.data.sources.leaf import fields_by_user, last_fifth, read_leaf
from fedray.data.sources.source import Source
from fedray.errors import UserError

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters. The number of a character is its place in it."""

LENGTH = 80

SPEAKER = re.compile(r"(?P<name>[A-Z][A-Za-z' ,&-]{0,39})\.|(?P<capitals>[A-Z][A-Z' ,&-]{1,39})")
"""A line that names the speaker: a name and a period, or a name in capitals."""

HEADING = re.compile(r"(ACT|SCENE|Act|Scene) +[IVXLC0-9]+\b.*|THE END\.?|FINIS\.?|DRAMATIS.*|PERSONS.*")
"""A line that ends a speech. Lines after it belong to nobody until the next speaker is named."""

FIRST_ACT = re.compile(r"(ACT|Act) +(I|1)\b")

DIRECTION = re.compile(r"(?m)^[ \t]*\[[^\]]*\][ \t]*\n|\[[^\]]*\]")

CODES = np.full(256, CHARACTERS.index(" "), dtype=np.int8)
"""The numbers of the first 256 Unicode characters. Those that are not in the alphabet count as blanks."""
CODES[np.frombuffer(CHARACTERS.encode(), np.uint8)] = np.arange(len(CHARACTERS))


def shakespeare(root: str | None, variant: str) -> Source:
    """Loads Shakespeare's plays, to predict the next character (one of 80) after 80 characters of a role's text.

    Inputs are int8 [80], the numbers of the characters. Each role is a client. Raises :class:`UserError` for files that
    are missing or damaged.

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine.
        variant: which files to read (``data.variant``). ``leaf`` are LEAF's json files, which hold samples. ``plays``
            and ``tiny`` are texts of plays. The text of each role is divided: the last fifth gives its test samples,
            and the rest its training samples. In each part, every character after the first 80 is a target.
    """
    if variant == "leaf":
        fields = read_leaf("shakespeare", root, _encode, "; data.variant=plays and tiny read texts")
    else:
        fields = _of_texts(root, *TEXTS[variant])
    return Source("shakespeare", classes=len(CHARACTERS), class_names=tuple(CHARACTERS), **fields)


def _of_texts(
    root: str | None, layout: Layout, wanted: str, address: str, speeches: Callable[[Path], Iterator[tuple[str, str]]]
) -> dict[str, Any]:
    """Returns the fields of a Source, by name, from texts of plays. ``speeches`` yields pairs of a role and words that
    it says, from one text."""
    found = find_files("shakespeare", root, [layout], wanted, address)
    said: dict[str, list[str]] = {}
    for path in found.paths:
        for role, speech in speeches(path):
            said.setdefault(role, []).append(speech)
    roles = sorted(said)
    parts: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for number, role in enumerate(roles):
        for part, codes in zip(parts, last_fifth(_codes("\n".join(said[role]))), strict=True):
            if len(codes) > LENGTH:
                windows = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)
                part[number] = windows[:, :-1], windows[:, -1].astype(np.int64)
    if not all(parts):
        raise UserError(f"{found.folder} has no role that says more than {LENGTH} characters, also in its last fifth")
    return {**fields_by_user(*parts), "client_names": tuple(roles), "files": found.stamps}


def _encode(x: list[Any], y: list[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    if not all(isinstance(text, str) and len(text) == LENGTH for text in x):
        raise UserError(f"{where} must have texts of {LENGTH} characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in y):
        raise UserError(f"{where} must have single characters as y")
    return _codes("".join(x)).reshape(-1, LENGTH), _codes("".join(y)).astype(np.int64)


def _codes(text: str) -> np.ndarray:
    codes: np.ndarray = CODES[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), len(CODES) - 1)]
    return codes


def _text(path: Path) -> list[str]:
    with reading(path, "text in UTF-8", UnicodeDecodeError):
        return path.read_text(encoding="utf-8").splitlines()


def _of_play(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a play's speeches, each with its role as ``play: ROLE``.

    A speaker's name stands alone on a line, after an empty line and directly before the speech. All lines belong to
    this role until the next name or heading. Stage directions, which are in brackets, and everything before the first
    act are left out.
    """
    lines = DIRECTION.sub("", "\n".join(["", *_text(path), ""])).splitlines()
    lines = lines[next((k for k, line in enumerate(lines) if FIRST_ACT.match(line.strip())), 0) :]
    role = ""
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        begins = not before.strip()
        found = SPEAKER.fullmatch(line.strip()) if begins and after.strip() else None
        if begins and HEADING.fullmatch(line.strip()):
            role = ""
        elif found:
            role = f"{path.stem}: {(found['name'] or found['capitals']).upper()}"
        elif role and line.strip():
            yield role, line.strip()


def _of_tiny(path: Path) -> Iterator[tuple[str, str]]:
    for speech in "\n".join(_text(path)).strip().split("\n\n"):
        name, colon, words = speech.strip("\n").partition(":\n")
        if colon and words:
            yield name, words


TEXTS = {
    "plays": (
        Layout(("shakespeare", "."), ("*.txt",)), "a folder shakespeare with plays (*.txt)",
        "https://www.gutenberg.org", _of_play,
    ),
    "tiny": (
        Layout(("tinyshakespeare", "."), ("input.txt",)), "tinyshakespeare's input.txt",
        "https://github.com/karpathy/char-rnn", _of_tiny,
    ),
}  # fmt: skip
"""For each variant with texts: its files, a description of them, their address, and the function that yields the
speeches in one file."""
