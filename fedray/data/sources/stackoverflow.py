"""Posts of StackOverflow, or of any other site of Stack Exchange, by user: the next word after each word.

The file is ``Posts.xml`` of a site's dump. Sequences and vocabulary are those of S. J. Reddi et al.: Adaptive Federated
Optimization, ICLR 2021: 20 words, and the 10,000 most frequent ones beside padding, unknown words, beginning and end.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from fedray.config import IGNORED
from fedray.data.sources.find import file_stamp, find_files
from fedray.data.sources.leaf import HELD_OUT
from fedray.data.sources.source import Source
from fedray.errors import UserError

WORDS, LENGTH = 10_000, 20
PADDING, UNKNOWN, BEGIN, END = 0, WORDS + 1, WORDS + 2, WORDS + 3
"""The numbers that are no words; words are 1 to 10,000, the most frequent one first."""

QUESTION, ANSWER = "1", "2"
WORD = re.compile(r"[a-z0-9][a-z0-9'+#-]*|[.,;:!?()]")
MARKUP, CODE = re.compile(r"<[^>]*>"), re.compile(r"<pre>.*?</pre>", re.DOTALL)
SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")


def stackoverflow(root: str | None, ignored: int = IGNORED) -> Source:
    """Loads sentences of questions and answers: int32 [20], the words before, and int64 [20], the next words.

    The ends of short sentences are filled up with 0, and with ``ignored`` (``task.ignore_index``) as targets, which do
    not count. The last fifth of each user's posts gives the test samples. Posts without an owner are left out, and so
    is code in blocks. Raises :class:`UserError` for a file that is missing or damaged.
    """
    path = find_files(
        "stackoverflow",
        root,
        look=_look,
        download=None,
        wanted="Posts.xml of a dump of StackOverflow, unpacked",
        address="https://archive.org/details/stackexchange",
    )
    files = (file_stamp(path),)
    posts: dict[int, list[list[list[str]]]] = {}
    without = 0
    for owner, text in _posts(path):
        if owner is None:
            without += 1
        elif sentences := [words for part in SENTENCES.split(text) if (words := WORD.findall(part.lower()))]:
            posts.setdefault(owner, []).append(sentences)
    if not posts:
        raise UserError(f"{path} has no posts of users")
    users = sorted(posts)
    parts: dict[str, list[list[list[str]]]] = {"train": [], "test": []}
    for user in users:
        first = len(posts[user]) - len(posts[user]) // HELD_OUT
        for part, chosen in (("train", posts[user][:first]), ("test", posts[user][first:])):
            parts[part].append(list(chain.from_iterable(chosen)))
    if not any(parts["test"]):
        raise UserError(f"{path}: no user has {HELD_OUT} posts, so that none is a test sample")
    number = _vocabulary(parts["train"])
    arrays = {part: _arrays(of_users, number, ignored) for part, of_users in parts.items()}
    (x, y, who), (x_test, y_test, who_test) = arrays["train"], arrays["test"]
    notes = (f"{path}: {without} posts without an owner are left out",) if without else ()
    nothing = (f"(no word {k})" for k in range(len(number) + 1, WORDS + 1))
    names = ("(padding)", *sorted(number, key=number.__getitem__), *nothing, "(unknown)", "(begin)", "(end)")
    return Source(
        "stackoverflow", x, y, x_test, y_test, WORDS + 4, client_train=who, client_test=who_test, task="tokens",
        client_names=tuple(f"user {user}" for user in users), class_names=names, files=files, notes=notes,
    )  # fmt: skip


def _look(place: Path) -> Path:
    for folder in (place / "stackoverflow", place / "stackexchange", place):
        if (folder / "Posts.xml").is_file():
            return folder / "Posts.xml"
    raise UserError(f"data.root={place} lacks Posts.xml (nor is it in stackoverflow or stackexchange)")


def _posts(path: Path) -> Iterator[tuple[int | None, str]]:
    """Yields owner and text of each question and answer, in the order of the file, which is that of time."""
    try:
        for _, row in ElementTree.iterparse(path):
            if row.tag == "row" and row.get("PostTypeId") in (QUESTION, ANSWER):
                owner = row.get("OwnerUserId")
                text = html.unescape(MARKUP.sub(" ", CODE.sub("\n", row.get("Body", ""))))
                yield None if owner is None else int(owner), f"{row.get('Title', '')}\n{text}"
            row.clear()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path} is damaged or no dump of posts ({error}); get the file again") from None


def _vocabulary(of_users: list[list[list[str]]]) -> dict[str, int]:
    counts = Counter(word for sentences in of_users for words in sentences for word in words)
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:WORDS]
    return {word: place for place, (word, _) in enumerate(most, 1)}


def _arrays(
    of_users: list[list[list[str]]], number: dict[str, int], ignored: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns words, next words, and the numbers of users. Words after the 20th are cut off, as in the paper."""
    sentences = [words for of_user in of_users for words in of_user]
    x = np.full((len(sentences), LENGTH), PADDING, dtype=np.int32)
    y = np.full((len(sentences), LENGTH), ignored, dtype=np.int64)
    for row, words in enumerate(sentences):
        codes = [BEGIN, *(number.get(word, UNKNOWN) for word in words), END][: LENGTH + 1]
        x[row, : len(codes) - 1], y[row, : len(codes) - 1] = codes[:-1], codes[1:]
    return x, y, np.repeat(np.arange(len(of_users)), [len(of_user) for of_user in of_users])
