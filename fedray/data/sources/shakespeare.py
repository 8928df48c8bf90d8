"""Shakespeare's plays by role, as the next character after 80 characters: LEAF's json files, or texts of plays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.sources.find import file_stamp, find_files
from fedray.data.sources.leaf import HELD_OUT, LEAF, leaf_files, read_leaf
from fedray.data.sources.source import Source
from fedray.errors import UserError

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters. The number of a character is its place in it."""

LENGTH = 80

SPEAKER = re.compile(r"(?P<name>[A-Z][A-Za-z' ,&-]{0,39})\.|(?P<capitals>[A-Z][A-Z' ,&-]{1,39})")
"""A line that says who speaks: a name and a period, or a name in capitals."""

HEADING = re.compile(r"(ACT|SCENE|Act|Scene) +[IVXLC0-9]+\b.*|THE END\.?|FINIS\.?|DRAMATIS.*|PERSONS.*")
"""A line after which nobody speaks until the next speaker."""

FIRST_ACT = re.compile(r"(ACT|Act) +(I|1)\b")

DIRECTION = re.compile(r"(?m)^[ \t]*\[[^\]]*\][ \t]*\n|\[[^\]]*\]")

CODES = np.full(256, CHARACTERS.index(" "), dtype=np.int8)
"""The numbers of the first 256 characters of Unicode. Those that are not in the alphabet count as blanks."""
CODES[np.frombuffer(CHARACTERS.encode(), np.uint8)] = np.arange(len(CHARACTERS))


def shakespeare(root: str | None, variant: str) -> Source:
    """Loads windows int8 [80] of what a role says, and the character after each, of 80.

    With ``variant`` (``data.variant``) ``leaf`` they are in LEAF's files. With ``plays`` and ``tiny`` each character of
    a role is a target, and the last fifth of what the role says gives the test samples. Raises :class:`UserError` for
    files that are missing or damaged.
    """
    if variant == "leaf":
        return _leaf(root)
    look = {"plays": _look_for_plays, "tiny": _look_for_tiny}[variant]
    wanted, address = {
        "plays": ("a folder shakespeare with plays (*.txt)", "https://www.gutenberg.org"),
        "tiny": ("tinyshakespeare's input.txt", "https://github.com/karpathy/char-rnn"),
    }[variant]
    paths = find_files("shakespeare", root, look=look, download=None, wanted=wanted, address=address)
    said: dict[str, list[str]] = {}
    for path in paths:
        speeches = _of_play(path) if variant == "plays" else _of_tiny(path)
        for role, speech in speeches:
            said.setdefault(role, []).append(speech)
    roles = sorted(said)
    if not roles:
        raise UserError(f"{paths[0].parent} has no speeches")
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, int]]] = {"train": [], "test": []}
    for number, role in enumerate(roles):
        codes = _codes("\n".join(said[role]))
        first = len(codes) - len(codes) // HELD_OUT
        for part, piece in (("train", codes[:first]), ("test", codes[first:])):
            if len(piece) > LENGTH:
                windows = np.lib.stride_tricks.sliding_window_view(piece, LENGTH + 1)
                parts[part].append((windows[:, :-1], windows[:, -1], number))
    arrays = {}
    for part, pieces in parts.items():
        if not pieces:
            raise UserError(f"{paths[0].parent} has no role that says more than {LENGTH} characters ({part})")
        x, y = (np.concatenate([piece[k] for piece in pieces]) for k in (0, 1))
        arrays[part] = x, y.astype(np.int64), np.repeat([n for *_, n in pieces], [len(p[1]) for p in pieces])
    (x, y, who), (x_test, y_test, who_test) = arrays["train"], arrays["test"]
    return Source(
        "shakespeare", x, y, x_test, y_test, len(CHARACTERS), client_train=who, client_test=who_test,
        client_names=tuple(roles), class_names=tuple(CHARACTERS), files=tuple(map(file_stamp, paths)),
    )  # fmt: skip


def _leaf(root: str | None) -> Source:
    def look(place: Path) -> dict[str, list[Path]]:
        return leaf_files(place / "shakespeare" if (place / "shakespeare" / "data").is_dir() else place)

    wanted = "the json files that LEAF's data/shakespeare/preprocess.sh writes (data.variant=plays and tiny read texts)"
    train, test, files, notes = read_leaf(find_files("shakespeare", root, look, None, wanted, LEAF), _encode)
    return Source(
        "shakespeare", train[0], train[1], test[0], test[1], len(CHARACTERS), client_train=train[2],
        client_test=test[2], class_names=tuple(CHARACTERS), files=files, notes=notes,
    )  # fmt: skip


def _encode(x: list[Any], y: list[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    if not all(isinstance(text, str) and len(text) == LENGTH for text in x):
        raise UserError(f"{where} must have texts of {LENGTH} characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in y):
        raise UserError(f"{where} must have single characters as y")
    return _codes("".join(x)).reshape(-1, LENGTH), _codes("".join(y)).astype(np.int64)


def _codes(text: str) -> np.ndarray:
    return CODES[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), len(CODES) - 1)]


def _look_for_plays(place: Path) -> list[Path]:
    for folder in (place / "shakespeare", place):
        if found := sorted(folder.glob("*.txt")):
            return found
    raise UserError(f"data.root={place} has no plays (*.txt)")


def _look_for_tiny(place: Path) -> list[Path]:
    for folder in (place / "tinyshakespeare", place):
        if (folder / "input.txt").is_file():
            return [folder / "input.txt"]
    raise UserError(f"data.root={place} lacks input.txt (nor is it in tinyshakespeare)")


def _text(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None


def _of_play(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a play's speeches, each with its role, as ``play: ROLE``.

    Who speaks stands alone on a line between an empty one and what is said. It is said by the same role until the next
    speaker or heading. Stage directions, which are in brackets, and what stands before the first act are left out.
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
