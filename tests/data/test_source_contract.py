"""The contract of data sources, for some that come with fedray and for functions of a user."""

import textwrap

import pytest

from fedray.testing import SourceContract

MINE = """
import random
import numpy as np

def load(root, normalization="default"):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), np.arange(60) % 3
    who = np.array(["ann", "bob", "cy"])[np.arange(60) // 20]
    return {"x_train": x, "y_train": y, "client_train": who, "x_test": x[:12], "y_test": y[:12]}

def other_each_time(root):
    fields = load(root)
    return {**fields, "x_train": fields["x_train"] + random.random()}
"""


class TestSample(SourceContract):
    settings = {"data.source": "sample"}


class TestHandWritten(SourceContract):
    @pytest.fixture(autouse=True)
    def written(self, tmp_path):
        (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
        self.settings = {"data.source": f"{tmp_path}/mine.py:load", "data.root": "here"}


class TestCsv(SourceContract):
    @pytest.fixture(autouse=True)
    def written(self, tmp_path):
        rows = [f"{i},{i % 7},{'ab'[i % 2]}" for i in range(40)]
        (tmp_path / "mine.csv").write_text("\n".join(["target,size,client", *rows]))
        self.settings = {"data.source": "csv", "data.root": f"{tmp_path}/mine.csv", "data.normalization": "standard"}


def test_a_source_that_differs_each_time_is_found_out(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))

    class Other(SourceContract):
        settings = {"data.source": f"{tmp_path}/mine.py:other_each_time"}

    with pytest.raises(AssertionError):
        Other().test_it_is_the_same_each_time()
