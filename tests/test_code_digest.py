"""Digests of the user's code: equal while it computes the same, another when it is edited."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedray.algorithms.scaffold import Scaffold
from fedray.code_digest import code_digest, is_library
from fedray.data import contents as contents_module
from fedray.data.contents import contents
from fedray.data.federated import federate
from fedray.data.source import load_source
from fedray.testing.contracts import small_source


def defined(text: str, name: str = "thing") -> Any:
    """``name`` as a user's module of that text would have it."""
    namespace: dict[str, Any] = {"__name__": "somebodys", "torch": torch, "nn": nn}
    exec(compile(textwrap.dedent(text), "somebodys.py", "exec"), namespace)
    return namespace[name]


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
    "a tensor": "thing = nn.CrossEntropyLoss(weight=torch.ones(3) * {})\n",
    "a set": "thing = {{'a', 'b', {}}}\n",
}


@pytest.mark.parametrize("text", REFERRED.values(), ids=REFERRED)
def test_what_it_refers_to_counts(text: str) -> None:
    one, same, other = (code_digest(defined(text.format(value))) for value in (1, 1, 2))
    assert one == same != other


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
    assert code_digest(one, tensors=False) == code_digest(other.eval(), tensors=False)
    assert code_digest(one, tensors=False) != code_digest(nn.Linear(3, 4), tensors=False)


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
        from fedray.code_digest import code_digest
        NAMES = {"a", "b", "c"}
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.names = {"x", "y", "z"}
            def forward(self, x):
                return self.layer(x) if NAMES else [y for y in x if y in {"p", "q", "r"}]
        print(code_digest(Net), code_digest(Net(), tensors=False))
        """
    )
    (tmp_path / "script.py").write_text(text)
    found = {
        subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(contents_module.__file__).parents[2]), "PATH": ""},
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
        from fedray.config import load

        config = load({"data.source": "npz", "data.root": str(path), "data.clients": 2}).data
        read = load_source("npz", str(path))
        return contents(read, federate(read, config, 0, 0))

    first = found()
    hashed: list[int] = []
    of_arrays = contents_module._of_arrays
    monkeypatch.setattr(contents_module, "_of_arrays", lambda source: hashed.append(1) or of_arrays(source))
    assert found() == first
    assert not hashed
    np.savez(path, **{**arrays, "y_test": arrays["y_test"][::-1].copy()})
    changed = found()
    assert hashed
    assert [part for part in first if first[part] != changed[part]] == ["test data"]
    (tmp_path / "cache" / "fedray" / "contents.json").write_text("damaged")
    assert found() == changed
