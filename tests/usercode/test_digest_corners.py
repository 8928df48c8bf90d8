"""Digests of unusual code: none fails, what is edited is seen, and what is not edited is not refused."""

from __future__ import annotations

import functools
import logging
import sys
import textwrap
import types
import typing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedray
from fedray.errors import UserError
from fedray.testing.contracts import SETTINGS, small_source
from fedray.usercode.digests import code_digest
from fedray.usercode.importing import import_object


def made_by(text: str, name: str = "thing") -> Any:
    """``name`` as a user's script of that text would have it."""
    namespace: dict[str, Any] = {"__name__": "somebodys", "torch": torch, "nn": nn, "F": nn.functional}
    namespace |= {"functools": functools, "types": types, "typing": typing}
    exec(compile(textwrap.dedent(text), "somebodys.py", "exec"), namespace)
    return namespace[name]


class Magic(dict[str, Any]):
    """A dict that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Magic())


def registered_in_a_set() -> Any:
    return made_by(
        """
        known = set()
        def thing(a):
            return known
        known.add(thing)
        """
    )


def subclasses_in_a_set() -> Any:
    return made_by(
        """
        class Base:
            known = set()
            def __init_subclass__(cls):
                Base.known.add(cls)
        class thing(Base):
            pass
        """
    )


def nested(depth: int) -> Any:
    thing: Any = None
    for _ in range(depth):
        thing = (thing, 1)
    return thing


def dead_proxy() -> Any:
    gone = registered_in_a_set()
    proxy = weakref.proxy(gone)
    del gone
    return made_by("def thing(a):\n    return proxy\n") if proxy is None else (lambda: proxy)


UNUSUAL: dict[str, Callable[[], Any]] = {
    "a random generator": lambda: np.random.default_rng(0),
    "a table of texts": lambda: pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}),
    "a category": lambda: pd.Series(["a", "b"]).astype("category"),
    "a time": lambda: pd.Timestamp("2020-01-01"),
    "a registry": registered_in_a_set,
    "subclasses": subclasses_in_a_set,
    "magic attributes": lambda: Magic(scale=2.0),
    "a tuple in a tuple in ...": lambda: nested(3000),
    "a reference to what is gone": dead_proxy,
    "a generator": lambda: (each for each in [1]),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_things_have_a_digest(make: Callable[[], Any]) -> None:
    assert code_digest(make()) == code_digest(make())


EDITED = {
    "an attribute of a function": "def thing(a):\n    return a\n\n\nthing.scale = {}\n",
    "a constant mapping": "scales = types.MappingProxyType({{'a': {}}})\n\n\ndef thing(a):\n    return scales['a']\n",
    "a function that passes itself off as torch's": (
        "@functools.wraps(F.cross_entropy)\ndef thing(a, b):\n    return {} * F.cross_entropy(a, b)\n"
    ),
    "a function called like one of Python's": (
        "def sum(a):\n    return {} * a\n\n\ndef thing(a):\n    return sum(a)\n"
    ),
    "what is made for one type": (
        "@functools.singledispatch\ndef thing(a):\n    return a\n\n\n"
        "@thing.register(int)\ndef _(a):\n    return {} * a\n"
    ),
    "a lambda from a text": "thing = eval('lambda a: a * {}', {{'torch': torch}})\n",
    "a backbone in a list": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.hidden = [nn.Linear(1, 1)]\n        nn.init.constant_(self.hidden[0].weight, {})\n"
        "        nn.init.zeros_(self.hidden[0].bias)\n\n\nthing = Net()\n"
    ),
    "a backbone that is a global": (
        "backbone = nn.Linear(1, 1)\nnn.init.constant_(backbone.weight, {})\nnn.init.zeros_(backbone.bias)\n\n\n"
        "class thing(nn.Module):\n    def forward(self, x):\n        return backbone(x)\n"
    ),
}


@pytest.mark.parametrize("text", EDITED.values(), ids=EDITED)
def test_an_edit_is_seen(text: str) -> None:
    def digest(value: int) -> str:
        thing = made_by(text.format(value))
        return code_digest(thing, apart_from=list(thing.parameters()) if isinstance(thing, nn.Module) else ())

    assert digest(1) == digest(1) != digest(2)


JIT = "import torch\n\n\n@torch.jit.script\ndef thing(a: torch.Tensor, b: torch.Tensor):\n    return {} * (a - b)\n"


def test_code_that_torch_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jit.py").write_text(JIT.format(1))
    first = code_digest(import_object("jit.py:thing", "metrics"))
    (tmp_path / "jit.py").write_text("# a remark\n" + JIT.format(1))
    assert code_digest(import_object("jit.py:thing", "metrics")) == first
    (tmp_path / "jit.py").write_text(JIT.format(2))
    assert code_digest(import_object("jit.py:thing", "metrics")) != first
    net = nn.Linear(1, 1)
    assert code_digest(torch.compile(net)) == code_digest(torch.compile(net)) != code_digest(torch.compile(nn.ReLU()))


LATE = {
    "a module of a package": ("from late_pkg import inner", "inner.f(a)", "late_pkg/inner.py"),
    "what a module imports": ("from late_outer import f", "f(a)", "late_pkg/inner.py"),
    "a module beside it": ("from .late_pkg.inner import f", "f(a)", "late_pkg/inner.py"),
    "a package": ("import late_pkg.inner", "late_pkg.inner.f(a)", "late_pkg/__init__.py"),
}


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for modules, with a package and a module that imports from it."""
    folder = tmp_path / "around"
    (folder / "late_pkg").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "late_pkg" / "__init__.py").touch()
    (folder / "late_pkg" / "inner.py").write_text("def f(a):\n    return a\n")
    (folder / "late_outer.py").write_text("from late_pkg.inner import f\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(("statement", "use", "file"), LATE.values(), ids=LATE)
def test_what_is_imported_when_it_is_needed(late: Path, statement: str, use: str, file: str) -> None:
    def digest() -> str:
        thing = made_by(f"def thing(a):\n    {statement}\n    return {use}\n")
        thing.__globals__["__package__"] = "around"
        return code_digest(thing)

    first = digest()
    text = (late / file).read_text()
    (late / file).write_text(f"# a remark\n{text}")
    assert digest() == first
    (late / file).write_text(f"{text}\nsomething = 'else'\n")
    assert digest() != first


def test_a_module_that_a_function_has_in_hand(late: Path) -> None:
    def digest() -> str:
        import late_pkg.inner as inner

        return code_digest(made_by("def make(m):\n    return lambda a: m.f(a)\n", "make")(inner))

    first = digest()
    del sys.modules["late_pkg.inner"]
    (late / "late_pkg" / "inner.py").write_text("def f(a):\n    return -a\n")
    assert digest() != first


@pytest.mark.parametrize("use", ["m.f(a) + getattr(m, 'g')(a)", "m.f(a) + vars(m)['g'](a)", "(m.f(a), m)"])
def test_a_module_that_is_used_for_more_than_its_attributes(late: Path, use: str) -> None:
    file = late / "late_pkg" / "inner.py"

    def digest(n: int) -> str:
        file.write_text(f"def f(a):\n    return a\n\n\ndef g(a):\n    return {n} * a\n")
        sys.modules.pop("late_pkg.inner", None)
        import late_pkg.inner as inner

        thing = made_by(f"def thing(a):\n    return {use}\n")
        thing.__globals__["m"] = inner
        return code_digest(thing)

    assert digest(1) == digest(1) != digest(2)


@pytest.mark.parametrize(
    "text",
    [
        'def thing(a):\n    def f(b):\n        "{}"\n        return b\n    return f(a)\n',
        'def thing(a):\n    class F:\n        def f(self, b):\n            "{}"\n            return b\n    return F\n',
    ],
)
def test_docstrings_within_a_function_do_not_count(text: str) -> None:
    assert code_digest(made_by(text.format("one"))) == code_digest(made_by(text.format("two")))


@pytest.mark.parametrize("body", ["lambda: '{}'", "['{}' for _ in range(2)]", "{{'{}': 1}}", "f('{}')"])
def test_texts_that_are_no_docstrings_count(body: str) -> None:
    one, two = (made_by(f"def thing(f):\n    return {body.format(n)}\n") for n in ("one", "two"))
    assert code_digest(one) != code_digest(two)


def test_nothing_is_imported(late: Path) -> None:
    (late / "late_pkg" / "__init__.py").write_text("raise RuntimeError('not to be imported')\n")
    code_digest(made_by("def thing(a):\n    if a:\n        import late_pkg.inner\n    return a\n"))
    assert "late_pkg" not in sys.modules


SCRIPT = """
import functools, logging, typing

log = logging.getLogger(__name__)
T = typing.TypeVar("T")
Number = typing.NewType("Number", int)


class Box(typing.Generic[T]):
    pass


@functools.lru_cache
def table(n):
    return n


def thing(a):
    log.info("so")
    return table(Number(a)), Box
"""


def test_a_remark_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file's own name, or what pickle knows by its name, is among what a function refers to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    first = import_object("script.py:thing", "metrics")
    (tmp_path / "script.py").write_text(SCRIPT + "# a remark\n")
    second = import_object("script.py:thing", "metrics")
    assert first is not second
    assert code_digest(first) == code_digest(second)
    logging.getLogger(first.__module__).setLevel(logging.ERROR)
    assert code_digest(first) == code_digest(second)


class Held(nn.Module):
    """A frozen backbone that is not among the parameters."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.backbone = [nn.Linear(12, 12)]
        self.head = nn.Linear(12, 4)
        with torch.no_grad():
            self.backbone[0].weight.copy_(torch.eye(12) * scale)
            self.head.weight.fill_(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone[0](x).detach())


def test_a_run_with_another_backbone_is_another_run(tmp_path: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    settings |= {"algorithm.name": "fedavg", "run.rounds": 1, "run.output": str(tmp_path)}
    fedray.simulate(settings, data=small_source(), model=Held(1.0))
    with pytest.raises(UserError, match=r"holds another run \(.*model"):
        fedray.simulate(settings | {"run.rounds": 2}, data=small_source(), model=Held(3.0))


OWN = """
class MyOwn:
    def __init__(self, f):
        self.f = f
    def __call__(self, *args):
        return self.f(*args)

"""


@pytest.mark.parametrize(
    "method",
    [
        "def __new__(cls):\n        o = super().__new__(cls)\n        o.lr = {n}\n        return o",
        "def __init_subclass__(cls):\n        cls.lr = {n}",
        "def __class_getitem__(cls, item):\n        return {n}",
        "@functools.singledispatchmethod\n    def __call__(self, a):\n        return {n} * a",
        "@functools.lru_cache\n    def __call__(self, a):\n        return {n} * a",
        "def f(self, a):\n        return {n} * a\n    __call__ = functools.partialmethod(f, 1)",
        "@MyOwn\n    def __call__(self, a):\n        return {n} * a",
    ],
)
def test_methods_of_python_that_are_no_plain_functions_count(method):
    one, same, other = (made_by(f"{OWN}class thing:\n    {method.format(n=n)}") for n in (1, 1, 2))
    assert code_digest(one) == code_digest(same) != code_digest(other)
