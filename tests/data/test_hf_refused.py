"""Data sets of Hugging Face that are refused: each in one line, and without running any code of theirs."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Image, Value
from hf_sets import (
    FAST,
    ROWS,
    SIZE,
    TESTS,
    X,
    Y,
    as_parquet,
    divided,
    numbers,
    picture,
    pictures,
    read,
    saved,
)

from fedray import UserError, simulate

pytestmark = pytest.mark.usefixtures("without_hub")


TEXTS = ["word"] * (ROWS + TESTS)
UNEQUAL = [[1, 2, 3] if i == 7 else [1, 2] for i in range(ROWS + TESTS)]
GAP = [None if i == 7 else v for i, v in enumerate(X[:, 0].tolist())]
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no target": (numbers(), {"target_column": "tarqet"}, r"mine \(train\) has no column 'tarqet' .*mean 'target'"),
    "near client": (numbers(clients=TEXTS), {}, "no column 'client', but 'clients': give data.client_column='clients'"),
    "no client": (numbers(client=TEXTS), {"client_column": "clint"}, r"'clint' \(data.client_column\) \(did you mean"),
    "no input": (numbers(), {"input_columns": ["aa"]}, r"no column 'aa' \(data.input_columns\)"),
    "text input": (numbers(note=TEXTS), {}, "column 'note' holds texts.*turn them into tokens.*, or leave them out by"),
    "unequal": (numbers(words=UNEQUAL), {}, r"'words' has 3 values in row 7, 2 in row 0; all|item 7 .* \[3\]"),
    "gap in input": (numbers(a=GAP), {}, r"\(train\): column 'a' has nothing in row 7 \(1 such rows\)"),
    "gap in target": (numbers(target=GAP), {}, "column 'target' has nothing in row 7"),
    "gap in client": (numbers(client=GAP), {}, "column 'client' has nothing in row 7"),
    "NaN target": (numbers(target=[np.nan, *X[1:, 0].tolist()]), {}, "column 'target' has NaN in row 0"),
    "no label": (numbers(target=[-1, *Y[1:].tolist()]), {}, "y_train has label -1 in row 0"),
    "structures": (numbers(a=[{"u": 1}] * 80), {}, "column 'a' holds struct<u: int64>; fedray reads numbers, texts, d"),
}  # fmt: skip


@pytest.mark.parametrize("access", ["auto", "lazy"])
@pytest.mark.parametrize(("columns", "keys", "message"), BAD.values(), ids=BAD.keys())
def test_bad_columns(columns, keys, message, access):
    root = saved(divided(columns))
    with pytest.raises(UserError, match=message) as refused:
        read(root, access=access, **keys).x_train.chosen(np.arange(ROWS))
    assert "\n" not in str(refused.value)


def cut(path: str, left: float) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: int(left * len(content))])


@pytest.mark.parametrize("left", [0, 0.05, 0.5, 0.99])
def test_files_that_are_cut_short(left):
    sets = pictures()
    cut(f"{saved(sets)}/train/data-00000-of-00001.arrow", left)
    with pytest.raises(UserError, match="mine can't be read as a data set of Hugging Face: ") as refused:
        read("mine")
    assert "\n" not in str(refused.value)
    file = f"{as_parquet(sets)}/train-00001-of-00002.parquet"
    cut(file, left)
    with pytest.raises(UserError, match=f"{file} can't be read as a Parquet file: ") as refused:
        read("parquet")
    assert "\n" not in str(refused.value)


def test_a_damaged_parquet_file():
    sets = divided(numbers(words=(np.arange(80 * 50) % 977).reshape(80, 50).tolist()))
    path = as_parquet(sets) / "train-00001-of-00002.parquet"
    content = bytearray(path.read_bytes())
    content[4:900] = bytes(896)
    path.write_bytes(content)
    with pytest.raises(UserError, match="parquet can't be read as Parquet: ") as refused:
        read("parquet")
    assert "\n" not in str(refused.value)


def test_a_damaged_image():
    images = [{"bytes": b"no image", "path": None} if i == 7 else picture(i) for i in range(ROWS + TESTS)]
    features = {"image": Image(), "target": Value("int64")}
    source = read(saved(divided({"image": images, "target": Y.tolist()}, features)), image_size=SIZE)
    with pytest.raises(UserError, match=r"mine \(train\): the image in row 7 of column 'image' is not an image"):
        source.x_train.chosen(np.arange(ROWS))


def test_nothing_is_executed():
    Path("script").mkdir()
    Path("script/script.py").write_text("open('executed', 'w')")
    with pytest.raises(UserError, match=r"script/script.py is a script.*never"):
        read("script")
    with pytest.raises(UserError, match=r"script/script.py is no Parquet file"):
        read("script/script.py")
    Path("train.pkl").write_bytes(pickle.dumps(Executes()))
    with pytest.raises(UserError, match=r"train.pkl is no Parquet file"):
        read("train.pkl")
    Path("train.parquet").write_bytes(pickle.dumps(Executes()))
    with pytest.raises(UserError, match=r"train.parquet can't be read as a Parquet file"):
        read("train.parquet")
    assert not Path("executed").exists()


class Executes:
    def __reduce__(self) -> Any:
        return open, ("executed", "w")


def test_names_that_nobody_knows(tmp_path):
    with pytest.raises(
        UserError, match=r"data.root=nobody/nothing is no file or folder here, and could not be downl"
    ) as r:
        read("nobody/nothing")
    assert "\n" not in str(r.value)
    with pytest.raises(UserError, match=r"there is no file or folder .*/gone, and .* is no name on the hub"):
        read(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has neither files train\*.parquet, nor dataset_dict.json or state.json"):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match=r"data.source=hf needs data.root: a name on the hub"):
        simulate({**FAST, "data.source": "hf"})


def test_without_the_library_or_with_one_that_runs_code(monkeypatch):
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(UserError, match=r"needs datasets 4 or later.*not 3.6.0: pip install 'fedray\[hf\]'"):
        read("mine")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^data.source=hf needs Hugging Face datasets: pip install 'fedray\[hf\]'$"):
        read("mine")


def test_files_that_are_named_nearly_like_a_set_are_refused():
    root = as_parquet(divided(numbers()))
    (root / "train_old.parquet").write_bytes((root / "train-00000-of-00002.parquet").read_bytes())
    with pytest.raises(UserError, match=r"train_old.parquet is named like the set 'train', but neither train.parquet"):
        read(root)
