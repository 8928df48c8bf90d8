"""Digests of the user's code: equal while it computes the same, another when it is edited."""

from __future__ import annotations

import collections
import functools
import os
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedray
from fedray.algorithms.scaffold import Scaffold
from fedray.config import load
from fedray.data.federated import federate
from fedray.data.sources.source import load_source
from fedray.data.storage import contents as contents_module
from fedray.data.storage.contents import data_digests
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source
from fedray.usercode.digests import code_digest
from fedray.usercode.modules import is_library


def defined(text: str, name: str = "thing") -> Any:
    """``name`` as a user's module of that text would have it."""
    namespace: dict[str, Any] = {"__name__": "somebodys", "torch": torch, "nn": nn, "pd": pd}
    namespace |= {"functools": functools, "typing": typing, "collections": collections}
    exec(compile(textwrap.dedent(text), "somebodys.py", "exec"), namespace)
    return namespace[name]


def code_of(thing: Any) -> str:
    """The digest of a thing; of a module, apart from its weights."""
    weights = [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else []
    return code_digest(thing, apart_from=weights)


LOSS = """
def thing(a, b):
    return a - b
"""

SAME = {
    "a remark": "# first\n\n\ndef thing(a, b):\n    # so\n    return a - b\n",
    "a docstring": 'def thing(a, b):\n    """The difference."""\n    return a - b\n',
}

OTHER = {
    "the formula": "def thing(a, b):\n    return a + b\n",
    "the order": "def thing(a, b):\n    return b - a\n",
    "a constant": "def thing(a, b):\n    return a - b - 1\n",
    "a default": "def thing(a, b=1):\n    return a - b\n",
    "a function within": "def thing(a, b):\n    return (lambda c: a - c - 2)(b)\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_what_computes_the_same_is_the_same(text: str) -> None:
    assert code_digest(defined(text)) == code_digest(defined(LOSS))


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_what_is_edited_is_another(text: str) -> None:
    assert code_digest(defined(text)) != code_digest(defined(LOSS))


REFERRED = {
    "a helper": "def helper(a):\n    return {} * a\n\n\ndef thing(a):\n    return helper(a)\n",
    "a constant of the module": "SCALE = {}\n\n\ndef thing(a):\n    return SCALE * a\n",
    "a closure": "def make(scale):\n    return lambda a: scale * a\n\n\nthing = make({})\n",
    "a method": "class thing:\n    def run(self, a):\n        return {} * a\n",
    "a base class": "class Base:\n    def run(self, a):\n        return {} * a\n\n\nclass thing(Base):\n    pass\n",
    "an attribute of a class": "class thing:\n    scale = {}\n",
    "a property": "class thing:\n    @property\n    def scale(self):\n        return {}\n",
    "a static method": "class thing:\n    @staticmethod\n    def scale():\n        return {}\n",
    "an object's attribute": "class Scaled:\n    def __init__(self, s):\n        self.s = s\n\n\nthing = Scaled({})\n",
    "a layer's setting": "thing = nn.Sequential(nn.Dropout({} / 10))\n",
    "a set": "thing = {{'a', 'b', {}}}\n",
    "slots": "class Top:\n    __slots__ = ('k',)\n\n\nthing = Top()\nthing.k = {}\n",
    "a cached property": "class thing:\n    @functools.cached_property\n    def scale(self):\n        return {}\n",
    "what is behind a cache": "@functools.lru_cache\ndef s():\n    return {}\n\n\ndef thing(a):\n    return s() * a\n",
    "a method of a tuple": (
        "class T(typing.NamedTuple):\n    a: int\n    def s(self):\n        return {}\n\n\nthing = T(1)\n"
    ),
    "a table": "thing = pd.Series([1.0] * 300 + [float({})] + [1.0] * 300)\n",
    "a queue": "thing = collections.deque([1, {}])\n",
    "a method of a value": "thing = {{1: {}}}.get\n",
    "a sparse tensor": "thing = torch.eye(3).mul({}).to_sparse()\n",
    "a tensor of a model that is no weight": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.mask = torch.ones(3) * {}\n\n\nthing = Net()\n"
    ),
    "a hook": "thing = nn.Linear(1, 1)\nthing.register_forward_hook(lambda m, i, o: {} * o)\n",
    "what is frozen": "thing = nn.Linear(1, 1)\nthing.weight.requires_grad_({} == 1)\n",
    "a long chain": "def f0():\n    return {}\n\n\n"
    + "".join(f"def f{n}():\n    return f{n - 1}()\n\n\n" for n in range(1, 150))
    + "thing = f149\n",
}


@pytest.mark.parametrize("text", REFERRED.values(), ids=REFERRED)
def test_what_it_refers_to_counts(text: str) -> None:
    one, same, other = (code_of(defined(text.format(value))) for value in (1, 1, 2))
    assert one == same != other


def test_buffers_of_a_loss_count() -> None:
    one, same, other = (code_digest(nn.CrossEntropyLoss(weight=torch.ones(3) * value)) for value in (1, 1, 2))
    assert one == same != other


def test_what_only_has_the_name_of_an_attribute_does_not_count() -> None:
    text = (
        "import os\nfrom os import environ\nhistory = [{}]\n\n\ndef thing(model):\n    return model.history, environ\n"
    )
    assert code_digest(defined(text.format(1))) == code_digest(defined(text.format(2)))
    before = code_digest(defined(text.format(1)))
    os.environ["SOMETHING_ELSE"] = "1"
    try:
        assert code_digest(defined(text.format(1))) == before
    finally:
        del os.environ["SOMETHING_ELSE"]


def test_hooks_count_whatever_their_numbers() -> None:
    def made() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_forward_pre_hook(print)
        return nn.utils.parametrizations.spectral_norm(model)

    assert code_of(made()) == code_of(made())


def test_a_function_that_is_imported_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    thing = defined("def thing(a):\n    from needed_late import helper\n    return helper(a)\n")

    def digest(text: str) -> str:
        (tmp_path / "needed_late.py").write_text(text)
        return code_digest(thing)

    one = digest("def helper(a):\n    return a\n")
    assert one == digest("# a remark\ndef helper(a):\n    return a\n")
    assert one != digest("def helper(a):\n    return -a\n")


def test_modules_within_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nested_pkg").mkdir()
    (tmp_path / "nested_pkg" / "__init__.py").touch()

    def digest(text: str) -> str:
        (tmp_path / "nested_pkg" / "losses.py").write_text(text)
        for name in ("nested_pkg", "nested_pkg.losses"):
            sys.modules.pop(name, None)
        for cached in tmp_path.rglob("*.pyc"):
            cached.unlink()
        return code_digest(defined("import nested_pkg.losses\n\n\ndef thing(a):\n    return nested_pkg.losses.f(a)\n"))

    assert digest("def f(a):\n    return a\n") != digest("def f(a):\n    return -a\n")


def test_partial_arguments_and_bound_methods() -> None:
    thing = defined(LOSS)
    digests = {code_digest(functools.partial(thing, b=value)) for value in (1, 2)} | {code_digest(thing)}
    assert len(digests) == 3


def test_a_function_that_calls_itself_ends() -> None:
    text = "def thing(n):\n    return n and thing(n - {})\n"
    assert code_digest(defined(text.format(1))) == code_digest(defined(text.format(1)))
    assert code_digest(defined(text.format(1))) != code_digest(defined(text.format(2)))


def test_weights_can_be_left_out_and_training_mode_does_not_count() -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert code_digest(one) != code_digest(other)
    assert code_of(one) == code_of(other.eval())
    assert code_of(one) != code_of(nn.Linear(3, 4))


@given(st.lists(st.floats(allow_nan=True), min_size=1), st.sampled_from(["float32", "float64", "bfloat16"]))
def test_tensors_count_by_their_bytes(values: list[float], dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.tensor(values, dtype=kind)
    assert code_digest(tensor) == code_digest(tensor.clone())
    assert code_digest(tensor) != code_digest(torch.cat([tensor, tensor]))
    assert code_digest(np.array([{"a": 1}], dtype=object)) == code_digest(np.array([{"a": 1}], dtype=object))


def test_libraries_count_by_name() -> None:
    assert is_library("torch.nn")
    assert is_library("fedray.algorithms")
    assert is_library("pandas")
    assert not is_library("somebodys")
    assert code_digest(Scaffold) != code_digest(Scaffold.__base__)
    assert code_digest(nn.functional.cross_entropy) != code_digest(nn.functional.mse_loss)


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    text = textwrap.dedent(
        """
        from torch import nn
        from fedray.usercode.digests import code_digest
        import enum
        class Part(enum.Enum):
            HEAD, BODY, BIAS = 1, 2, 3
        NAMES = {"a", "b", "c"}
        OTHERS = {Part.HEAD, Part.BODY, Part.BIAS}, {frozenset({"k", 1}), frozenset({"l", 2})}
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.names = {"x", "y", "z"}
            def forward(self, x):
                return self.layer(x) if NAMES and OTHERS else [y for y in x if y in {"p", "q", "r"}]
        net = Net()
        print(code_digest(Net), code_digest(net, apart_from=list(net.parameters())))
        """
    )
    (tmp_path / "script.py").write_text(text)
    found = {
        subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(fedray.__file__).parents[1]), "PATH": ""},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1


def test_digests_of_files_are_remembered_until_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = small_source()
    arrays = {name: getattr(source, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)

    def found() -> dict[str, str]:
        config = load({"data.source": "npz", "data.root": str(path), "data.clients": 2}).data
        read = load_source("npz", str(path))
        return data_digests(read, federate(read, config, 0, 0))

    first = found()
    hashed: list[int] = []
    of_arrays = contents_module.of_arrays
    monkeypatch.setattr(contents_module, "of_arrays", lambda source: hashed.append(1) or of_arrays(source))
    assert found() == first
    assert not hashed
    np.savez(path, **{**arrays, "y_test": arrays["y_test"][::-1].copy()})
    changed = found()
    assert hashed
    assert [part for part in first if first[part] != changed[part]] == ["test data"]
    (tmp_path / "cache" / "fedray" / "contents.json").write_text("damaged")
    assert found() == changed


def test_digests_of_files_are_of_the_task_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file has other targets in another kind of task, so that mapped arrays must be others too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x, y = np.zeros((20, 3), np.float32), np.arange(20.0) % 2
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = {"data.source": "npz", "data.root": str(tmp_path / "data.npz"), "data.access": "mapped"}
    settings |= {"data.clients": 2, "model.name": "logistic", "algorithm.name": "fedavg", "engine.kind": "local"}
    found = [resolve(load({**settings, "task.kind": kind}))[1].y.dtype for kind in ("classification", "regression")]
    assert found == [np.int64, np.float32]
