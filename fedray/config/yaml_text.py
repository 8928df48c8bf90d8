"""Reads and writes YAML in one way for all of fedray.

Numbers follow YAML 1.2, so that 1e-3 is a number. A duplicate key in a section is an error, and no value is a date.
"""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from typing import Any, NoReturn

import yaml

INT, FLOAT, TIMESTAMP, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp", "merge"))
OLD_NUMBER = "!number-of-yaml-1.1"
NUMBERS_BEGIN_WITH = "-+.0123456789"

# section 10.3.2 of YAML 1.2.2; PyYAML follows YAML 1.1, in which 1e3 and 1e-3 are texts
WHOLE_NUMBER = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
REAL_NUMBER = re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
OLD_OCTAL_NUMBER = re.compile(r"[-+]?0[0-7_]+$")
"""A number such as 010, which is 8 in YAML 1.1 and 10 in YAML 1.2, so that its meaning is unclear."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that makes plain values only. Booleans follow YAML 1.1, which includes yes, no, on and off."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # checked before `<<` is merged, because merging adds its keys to those of the section
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise _problem(f"key {name!r} is given twice", key)
            seen.add(name)
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Resolves the key ``<<``, by which a section takes over the keys of other sections: in ``node``, the section
        as PyYAML has parsed it, replaces ``<<`` by these keys. They are put before the section's own keys, so that
        these take precedence.

        PyYAML calls this method for each section. PyYAML's version of it does the same, except that in PyYAML 6.0.4 the
        last of several merged sections takes precedence over the first.
        """
        merged = next((value for key, value in node.value if key.tag == MERGE), None)
        if merged is None:
            return
        sections = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
        for section in sections:
            if not isinstance(section, yaml.MappingNode):
                raise _problem("<< takes a section, or a list of sections", section)
            self.flatten_mapping(section)
        pairs = [pair for pair in node.value if pair[0].tag != MERGE]
        node.value = [pair for section in reversed(sections) for pair in section.value] + pairs

    def whole_number(self, node: Any) -> int:
        try:
            return int(node.value, 0 if node.value.startswith(("0o", "0x")) else 10)
        except ValueError:  # Python reads no number of thousands of digits
            raise _problem("a number is too long", node) from None

    def old_number(self, node: Any) -> NoReturn:
        """Raises an error for ``node``, a value whose meaning is unclear: in YAML 1.1 it is a number, and in YAML 1.2 a
        text or another number, such as 010. PyYAML calls this method when it meets such a value."""
        number = self.construct_yaml_float(node) if "." in node.value else self.construct_yaml_int(node)
        raise _problem(f"{node.value} is a number in YAML 1.1 only: write {number}, or put a text in quotes", node)


def _problem(text: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _set_up(loader: Any) -> None:
    """Makes ``loader`` read numbers as YAML 1.2 does, such as 1e-3, which PyYAML takes for a text.

    PyYAML tries patterns in order, and the first one that matches a value decides its type. A value that is a number
    only in YAML 1.1, such as 1_000, becomes an error.
    """
    of_yaml_1_1 = yaml.SafeLoader.yaml_implicit_resolvers
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT, FLOAT, TIMESTAMP)]
        for first, resolvers in of_yaml_1_1.items()
    }
    for first in NUMBERS_BEGIN_WITH:
        old = [(OLD_NUMBER, pattern) for tag, pattern in of_yaml_1_1[first] if tag in (INT, FLOAT)]
        ours = [(OLD_NUMBER, OLD_OCTAL_NUMBER), (INT, WHOLE_NUMBER), (FLOAT, REAL_NUMBER), *old]
        loader.yaml_implicit_resolvers[first] = loader.yaml_implicit_resolvers[first] + ours
    loader.add_constructor(INT, loader.whole_number)
    loader.add_constructor(OLD_NUMBER, loader.old_number)


_set_up(_Loader)


class _OwnKeys(_Loader):
    """A loader that leaves out what sections take over by the key ``<<``."""

    def flatten_mapping(self, node: Any) -> None:
        node.value = [pair for pair in node.value if pair[0].tag != MERGE]


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text if YAML 1.1 or YAML 1.2 would read it as a number.

    PyYAML follows YAML 1.1 and would not quote the text 1e-3, which is a number in YAML 1.2.
    """


_Dumper.add_implicit_resolver(INT, WHOLE_NUMBER, list(NUMBERS_BEGIN_WITH))
_Dumper.add_implicit_resolver(FLOAT, REAL_NUMBER, list(NUMBERS_BEGIN_WITH))


def comment_after(text: str) -> str:
    """Returns the comment that follows the value in ``text``, valid YAML; empty if there is none."""
    ends = (yaml.StreamEndToken, yaml.BlockEndToken)
    value = max(token.end_mark.index for token in yaml.scan(text) if not isinstance(token, ends))
    rest = text[value:].strip()
    return rest if rest.startswith("#") else ""


def parse_yaml(text: str, own: bool = False) -> Any:
    """Reads ``text``, which is YAML, and returns the plain values that it describes: dicts, lists, texts, numbers,
    booleans, None. With ``own`` sections are without what they take over from others by the key ``<<``.

    Numbers follow YAML 1.2, so that 1e-3 is a number. Raises :class:`yaml.YAMLError` if ``text`` is not YAML, and
    RecursionError if it is nested too deeply.
    """
    return copy.deepcopy(_values_of(text, _OwnKeys if own else _Loader))


@lru_cache(maxsize=128)
def _values_of(text: str, loader: type[_Loader]) -> Any:
    # cached, because hundreds of configurations may extend the same few files
    try:
        return yaml.load(text, loader)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # a value does not fit its tag, such as !!timestamp
        raise yaml.YAMLError(f"a value can't be read: {error}") from None


def dump_yaml(values: Any) -> str:
    """Returns ``values`` (dicts, lists, texts, numbers, booleans, None) as a YAML text, which :func:`parse_yaml` turns
    back into the same values. Keys keep their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def problem_of(error: yaml.YAMLError) -> str:
    """Returns one line for the user that says where and why a text is not YAML, such as ``line 2, column 5: ...``,
    given the ``error`` of the parser. Lines and columns are counted from 1."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + " ".join(str(problem or error).split())
