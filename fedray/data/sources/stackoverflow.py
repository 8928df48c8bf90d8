"""Posts of StackOverflow, or of another Stack Exchange site, by user. The task is to predict each next word.

The file is ``Posts.xml`` of a site's dump. Sequences and vocabulary are as in S. J. Reddi et al.: Adaptive Federated
Optimization, ICLR 2021: sequences of 20 words; the 10,000 most frequent words, and tokens for padding, unknown words,
beginning and end.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from fedray.config import IGNORE_INDEX
from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import Layout, find_files, reading
from fedray.data.sources.leaf import fields_by_user, last_fifth
from fedray.data.sources.source import Source
from fedray.errors import UserError

WORDS, LENGTH = 10_000, 20
PADDING, UNKNOWN, BEGIN, END = 0, WORDS + 1, WORDS + 2, WORDS + 3
"""The numbers of the special tokens. Words are 1 to 10,000, the most frequent one first."""

QUESTION, ANSWER = "1", "2"
WORD = re.compile(r"[a-z0-9][a-z0-9'+#-]*|[.,;:!?()]")
MARKUP, CODE = re.compile(r"<[^>]*>"), re.compile(r"<pre\b[^>]*>.*?</pre>", re.DOTALL)
SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")


def stackoverflow(root: str | None, ignored: int = IGNORE_INDEX) -> Source:
    """Loads sentences of questions and answers by users of a Stack Exchange site, to predict each next word.

    Each user is a client. x is int32 [20], the numbers of the words of a sentence, and y is int64 [20], the word after
    each word of x. Short sentences are padded. The last fifth of each user's posts gives the test samples. Posts
    without an owner and code blocks are left out. Raises :class:`UserError` for a file that is missing or damaged.

    Args:
        root: the folder with the file ``Posts.xml``. If it is None, the file is looked for on this machine.
        ignored: the padding of y, which counts in no loss and no metric (``task.ignore_index``). x is padded with 0.
    """
    found = find_files(
        "stackoverflow", root, [Layout(("stackoverflow", "stackexchange", "."), ("Posts.xml",))],
        "Posts.xml of a dump of StackOverflow, unpacked", "https://archive.org/details/stackexchange",
    )  # fmt: skip
    (path,) = found.paths
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
    train, test = zip(*(last_fifth(posts[user]) for user in users), strict=True)
    if not any(test):
        raise UserError(f"{path}: no user has {HELD_OUT} posts, so that none is a test sample")
    number = _vocabulary(train)
    samples = [
        {k: _arrays(chain(*of_user), number, ignored) for k, of_user in enumerate(part)} for part in (train, test)
    ]
    notes = (f"{path}: {without} posts without an owner are left out",) if without else ()
    nothing = (f"(no word {k})" for k in range(len(number) + 1, WORDS + 1))
    names = ("(padding)", *sorted(number, key=number.__getitem__), *nothing, "(unknown)", "(begin)", "(end)")
    return Source(
        "stackoverflow", classes=WORDS + 4, task="tokens", client_names=tuple(f"user {user}" for user in users),
        class_names=names, files=found.stamps, notes=notes, **fields_by_user(*samples),
    )  # fmt: skip


def _posts(path: Path) -> Iterator[tuple[int | None, str]]:
    """Yields a pair for each question and answer: the number of its owner, or None, and its text.

    The order is that of the file, which is chronological.
    """
    with reading(path, "dump of posts", ElementTree.ParseError, ValueError):
        for _, row in ElementTree.iterparse(path):
            if row.tag == "row" and row.get("PostTypeId") in (QUESTION, ANSWER):
                owner = row.get("OwnerUserId")
                text = html.unescape(MARKUP.sub(" ", CODE.sub("\n", row.get("Body", ""))))
                yield None if owner is None else int(owner), f"{row.get('Title', '')}\n{text}"
            row.clear()


def _vocabulary(of_users: Iterable[list[list[list[str]]]]) -> dict[str, int]:
    counts = Counter(word for posts in of_users for sentences in posts for words in sentences for word in words)
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:WORDS]
    return {word: place for place, (word, _) in enumerate(most, 1)}


def _arrays(sentences: Iterable[list[str]], number: dict[str, int], ignored: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and y of a user's sentences, [n, 20] each: the numbers of the words, and those of the words
    that follow.

    Sentences are cut after 20 words, as in the paper.
    """
    codes = [[BEGIN, *(number.get(word, UNKNOWN) for word in words), END][: LENGTH + 1] for words in sentences]
    x = np.full((len(codes), LENGTH), PADDING, dtype=np.int32)
    y = np.full((len(codes), LENGTH), ignored, dtype=np.int64)
    for row, code in enumerate(codes):
        x[row, : len(code) - 1], y[row, : len(code) - 1] = code[:-1], code[1:]
    return x, y
