"""Lists the keys, algorithms, models, data sources and partitions that exist, as lines to print."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError, near_miss
from fedray.usercode.importing import FORMS, import_object, is_user_defined

if TYPE_CHECKING:
    from fedray.algorithms import Algorithm

INDENT = 40
"""The column in which the description of a key begins."""


def keys(model: Any = None, prefix: str = "") -> Iterator[str]:
    """Yields the lines that ``fedray keys`` prints: for each key of the configuration its default, description and
    type.

    If ``model``, the class of a section of the configuration, is passed, only the keys of this section are listed.
    ``prefix``, such as ``algorithm.``, is put in front of the names of the keys. On a terminal that is too narrow, the
    description continues in the next line. Output into a pipe is not wrapped.
    """
    from fedray.config import Config, documented_keys

    for key, default, takes, description in documented_keys(model or Config, prefix):
        yield from _wrap(f"{key} = {_value(default)}", f"{description}  [{takes}]" if takes else description)


def algorithms(names: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines that ``fedray algorithms`` prints: for each algorithm its paper, rule and hyper-parameters.
    ``names`` are the algorithms to list, by default all that come with fedray. Raises :class:`UserError` if there is no
    such algorithm."""
    from fedray.algorithms import find_algorithm, known_algorithms

    for name in names or known_algorithms():
        cls = find_algorithm(name)
        yield from _wrap(f"{name}  ({_facts(cls)})", "", indent=0)
        yield from _first_paragraph(cls)
        yield from keys(cls.Hyper, "algorithm.") if cls.Hyper.model_fields else ["    no hyper-parameters of its own"]


def models(names: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines that ``fedray models`` prints: for each model its options, and on which kinds of devices (CPU,
    GPU) a repeated run gives the same results to the bit. ``names`` are the models to list, by default all that come
    with fedray. Raises :class:`UserError` if there is no such model."""
    from fedray.models import MODELS, find_model, options_of
    from fedray.models.bits import promise, where_measured

    for name in names or MODELS:
        model = find_model(name)
        yield from _wrap(f"{name}  ({promise(name)})", "", indent=0)
        yield from _first_paragraph(model)
        for option, parameter in options_of(model).items():
            default = "" if parameter.default is parameter.empty else _value(parameter.default)
            kind = "" if parameter.annotation is parameter.empty else f"[{parameter.annotation}]"
            yield from _wrap(f"model.{option} = {default}", kind)
    if not names:
        yield from paragraph(where_measured())


def datasets(names: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines that ``fedray datasets`` prints: data sources with their variants, and ways of partitioning
    samples among clients with their keys. ``names`` are the sources and partitions to list, by default all that come
    with fedray. Raises :class:`UserError` if there is no such source or partition."""
    from fedray.data.partitions.partition import PARTITIONERS
    from fedray.data.sources.source import SOURCES

    for name in names:
        if not is_user_defined(name) and name not in SOURCES and name not in PARTITIONERS:
            hint = near_miss(name, [*SOURCES, *PARTITIONERS])
            raise UserError(f"there is no source and no partition {name!r}{hint}; a source of your own is {FORMS}")
    if not names or any(name in SOURCES or is_user_defined(name) for name in names):
        yield f"sources (data.source); a function of your own is {FORMS}"
    for name in names or SOURCES:
        if is_user_defined(name):
            yield f"  {name}"
            yield from _first_paragraph(import_object(name, "data.source"))
        elif name in SOURCES:
            yield from _wrap(name, SOURCES[name].about, indent=20)
            yield from _wrap("", f"licence: {SOURCES[name].licence}", indent=20)
            yield from _wrap("", f"tested with: {SOURCES[name].tested}", indent=20)
            for key, values in (
                ("variant", SOURCES[name].variants), ("normalization", SOURCES[name].normalizations),
            ):  # fmt: skip
                for value, what in values.items() if len(values) > 1 else ():
                    yield from _wrap("", f"data.{key}={value}: {what}", indent=20)
    if not names or any(name in PARTITIONERS for name in names):
        yield from paragraph(
            "partitions (data.partition.kind); auto: natural if the data say whose each sample is, else dirichlet if "
            "samples have classes, else iid"
        )
    for name in names or PARTITIONERS:
        if name in PARTITIONERS:
            yield from _wrap(name, PARTITIONERS[name].about, indent=20)
            options = ", ".join(f"data.{option}" for option in PARTITIONERS[name].options)
            yield from _wrap("", f"keys: {options}", indent=20)


def _facts(cls: type[Algorithm]) -> str:
    """Returns a text about an algorithm: its paper, and what it needs, such as a public set."""
    from fedray.models.heads import DEFAULT, in_words

    # not what a class inherits: its rule may be another one
    facts = [paper] if (paper := vars(cls).get("paper")) else []
    if cls.needs_public:
        facts.append("trains on a public set (data.public_samples)")
    if cls.needs_head != "nothing":
        facts.append(f"needs a model head with {in_words(cls.needs_head)} (model.head={DEFAULT[cls.needs_head]})")
    return "; ".join(facts) or "no paper"


def paragraph(text: str, indent: int = 0) -> list[str]:
    """Wraps ``text`` for the terminal: returns a list of lines that fit into its width and have at most 120 characters.
    Each line begins with ``indent`` blanks."""
    first = " " * indent
    width = min(_width(), 120)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=first, break_long_words=False)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays out a table for printing: returns a line for each of ``rows``, whose cells are padded with blanks so that
    the columns are aligned. All rows must have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _first_paragraph(thing: Any) -> Iterable[str]:
    text = cleandoc(thing.__doc__ or "").split("\n\n")[0].replace("``", "")
    return paragraph(" ".join(text.split()), indent=4)


def _wrap(start: str, text: str, indent: int = INDENT) -> list[str]:
    """Returns lines with ``start`` and, from column ``indent`` on, ``text``, wrapped to the width of the terminal."""
    first = f"  {start}  ".ljust(indent) if indent else start
    return textwrap.wrap(
        first + text,
        max(_width(), indent + 20),
        subsequent_indent=" " * (indent or 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    """Returns the width of the terminal in characters. For a pipe it is huge, so that grep finds whole lines."""
    return shutil.get_terminal_size((10**6, 0)).columns


def _value(default: Any) -> str:
    """Returns a default value as it is written in YAML."""
    return {"None": "", "True": "true", "False": "false"}.get(str(default), str(default))
