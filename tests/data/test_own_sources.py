"""Sources that users write: functions of a module that are named in the configuration."""

import sys

import numpy as np
import pytest

from fedray.data.sources.columns import Columns
from fedray.data.sources.source import load_source
from fedray.errors import UserError


def refused(message):
    return pytest.raises(UserError, match=message)


USERS = """
import numpy as np
from fedray.data.sources.source import Source
fields = dict(x_train=np.zeros((4, 2)), y_train=np.array([0, 1, 2, 0]), x_test=np.ones((1, 2)), y_test=np.array([1]))
def plain(): return fields
def rooted(root): return Source(root, classes=3, **fields)
def wrong(): return 3
def chosen(place, variant="small", image_size=8, columns=None):
    x = np.full((4, 2), image_size, np.float32)
    return {**fields, "name": f"{place} {variant} {columns.target}", "x_train": x}
def misspelt(): return {**fields, "client_trian": np.zeros(4, int)}
number = 3
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_data.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("users_data", None)


@pytest.mark.usefixtures("users")
def test_sources_of_the_users():
    source = load_source("users_data:plain")
    assert (source.name, source.classes, source.x_train.dtype) == ("users_data:plain", 3, np.float32)
    assert load_source("users_data:rooted", "here").name == "here"


@pytest.mark.usefixtures("users")
def test_sources_of_the_users_take_what_those_of_fedray_take():
    source = load_source("users_data:chosen", "here", variant="large", image_size=3, columns=Columns("price"))
    assert (source.name, source.x_train[0, 0]) == ("here large price", 3)
    scaled = load_source("users_data:plain", normalization="standard")
    assert (scaled.scale.tolist(), scaled.shift.tolist()) == ([1, 1], [0, 0])
    for setting, message in (
        ({"variant": "large"}, "data.variant: the source users_data:plain has no variants"),
        ({"image_size": 3}, "data.image_size: the inputs of the source users_data:plain have a fixed size"),
        ({"columns": Columns("price")}, "data.target_column: the source users_data:plain has no columns"),
        ({"normalization": "unit"}, r"the source users_data:plain has no 'unit' .there are: default, imagenet, stan"),
    ):
        with refused(message):
            load_source("users_data:plain", **setting)


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_dat:plain", "can't import 'users_dat'"),
        ("users_broken:plain", "can't import 'users_broken': .*no_such_library"),
        ("users_data:plian", "has no 'plian' .did you mean 'plain'"),
        ("users_data:number", "is not a function but int"),
        ("users_data:wrong", "must return a Source or a dict of its fields, not int"),
        ("users_data:misspelt", "unknown field 'client_trian' .did you mean 'client_train'"),
    ],
)
def test_mistakes_in_sources_of_the_users(name, message):
    with refused(message) as raised:
        load_source(name)
    assert "\n" not in str(raised.value)
