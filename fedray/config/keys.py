"""The keys of the configuration, in words: which there are, what each takes, and which one a wrong name probably means.

The keys themselves are defined in :mod:`fedray.config.sections`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from fedray.config.section import is_section
from fedray.config.sections import Config
from fedray.errors import closest, near_miss

OTHER_WORDS = {
    "learning_rate": "train.lr",
    "client_lr": "train.lr",
    "local_learning_rate": "train.lr",
    "server_learning_rate": "train.server_lr",
    "epochs": "train.local_epochs",
    "num_epochs": "train.local_epochs",
    "num_rounds": "run.rounds",
    "global_rounds": "run.rounds",
    "num_clients": "data.clients",
    "num_supernodes": "data.clients",
    "num_partitions": "data.clients",
    "clients_per_round": "train.cohort_size",
    "fraction_fit": "train.participation",
    "fraction_train": "train.participation",
    "join_ratio": "train.participation",
    "dataset": "data.source",
    "partitioner": "data.partition.kind",
    "strategy": "algorithm.name",
    "num_workers": "engine.actors",
}
"""What keys are called elsewhere, in other frameworks and in papers, and what they are called here."""


def unknown_key(name: str, known: Iterable[str], section: str) -> str:
    """Returns the error message for a key that does not exist, such as ``unknown key train.rl (did you mean ...)``.

    ``section`` is the section in which the user set the key, such as ``train.``, ``name`` is the rest of the key, such
    as ``rl``, and ``known`` are the keys that the section has.
    """
    known = list(known)
    close = closest(name, known)
    elsewhere = [key for key, *_ in documented_keys() if name and key.rpartition(".")[2] == name.lower()]
    if name.lower() in OTHER_WORDS and not elsewhere and not section.startswith("tune"):
        elsewhere = [OTHER_WORDS[name.lower()]]
    if elsewhere:
        hint = f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
    elif close is not None:
        hint = f" (did you mean '{section}{close}'?)"
    else:
        hint = near_miss(name, known) or " (it has no keys of its own)"
    return f"unknown key {section}{name}{hint}"


def documented_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Yields a tuple for every key of the configuration, as ``fedray keys`` lists them: the dotted name, the default,
    in words what values the key takes (``a number > 0``), and the description.

    ``model`` is the class of the section whose keys are listed, by default the whole configuration. Every name begins
    with ``prefix``, such as ``tune.``.
    """
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            yield from documented_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.default, _takes(field), field.description or ""


def _takes(field: Any) -> str:
    """Returns the type and the range of a key in words: ``a whole number >= 1``."""
    bounds = [
        f"{symbol} {getattr(limit, word):g}"
        for word, symbol in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        for limit in field.metadata
        if getattr(limit, word, None) is not None and abs(getattr(limit, word)) < 2**62
    ]
    return " ".join([choices(field.annotation), *([" and ".join(bounds)] if bounds else [])])


def members(annotation: Any) -> list[Any]:
    """Returns the types that a key's value may have, from the key's annotation in the class of its section."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in members(member)]
    return [annotation]


def literals(annotation: Any) -> list[str]:
    """Returns the words that a key takes, such as ``auto``, from its annotation."""
    return [
        str(value)
        for each in members(annotation)
        if typing.get_origin(each) is Literal
        for value in typing.get_args(each)
    ]


def choices(annotation: Any) -> str:
    """Returns the type of a key in words: ``a whole number or 'full'``."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words = []
    for member in members(annotation):
        if typing.get_origin(member) is Literal:
            words += [f"'{value}'" for value in typing.get_args(member)]
        elif typing.get_origin(member) is list:
            words.append("a list")
        elif typing.get_origin(member) is dict and typing.get_origin(typing.get_args(member)[1]) is dict:
            words.append("sections by name")
        elif member in names:
            words.append(names[member])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
