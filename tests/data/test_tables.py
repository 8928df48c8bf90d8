"""Tables of the user's own in csv files: the same as what is handed over from Python, and nothing is misread."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedray import UserError, simulate
from fedray.cli.main import main
from fedray.config import load
from fedray.data.sources.columns import held_out
from fedray.data.sources.source import Source, source_of
from fedray.data.sources.user_data import user_source

rng = np.random.default_rng(3)
ROWS = 80
X = rng.normal(size=(ROWS, 4)).astype(np.float32)
Y = np.arange(ROWS) % 3
CLIENTS = np.array(["f", "a", "e", "b"])[np.arange(ROWS) // 3 % 4]
FAST = {
    "algorithm.name": "fedavg", "model.name": "logistic", "run.rounds": 2, "train.local_steps": 2,
    "train.batch_size": 4, "engine.kind": "local",
}  # fmt: skip


def frame(y: Any = Y, **more: Any) -> pd.DataFrame:
    return pd.DataFrame(X, columns=list("abcd")).assign(target=y, **more)


def written(folder: Path, table: pd.DataFrame, tests: int = 20) -> Path:
    """Writes a folder whose test set is the last rows of a table."""
    folder.mkdir(exist_ok=True)
    table[:-tests].to_csv(folder / "train.csv", index=False)
    table[-tests:].to_csv(folder / "test.csv", index=False)
    return folder


def read(root: Path, **keys: Any) -> Source:
    given = {f"data.{key}": value for key, value in keys.items()}
    config = load({"data.source": "csv", "data.root": str(root), **given})
    return source_of(config.data, config.task)


def names(source: Source) -> list[str]:
    """The name of the client of each training sample."""
    assert source.client_train is not None
    return [str(i) if source.client_names is None else source.client_names[i] for i in source.client_train.tolist()]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", [pd.Categorical(Y), pd.Categorical(np.array(["u", "v", "w"])[Y])])
def test_columns_of_categories_are_turned_into_numbers_by_their_owner(kind):
    table = frame(kind=kind, client=CLIENTS)
    with pytest.raises(UserError, match=r"column 'kind' is not numeric: '.' in row 0; make columns of .*get_dummies"):
        user_source(table, table, label_column="target")
    table = pd.get_dummies(table, columns=["kind"])
    assert user_source(table, table, label_column="target").x_train.shape == (ROWS, 7)


def test_the_same_bits_as_from_python(tmp_path):
    labels = np.array(["cat", "dog", "ant"])[Y]
    table = frame(labels, client=CLIENTS)
    root = written(tmp_path / "mine", table)
    keys = {"data.source": "csv", "data.root": str(root), "run.name": "csv", **FAST}
    of_files = simulate(keys)
    given = {"data": table[:-20], "test": table[-20:], "label_column": "target"}
    of_frames = simulate({**FAST, "run.name": "frames"}, **given)
    arrays = [(X[rows], labels[rows], CLIENTS[rows]) for rows in (slice(0, -20), slice(-20, None))]
    of_arrays = simulate({**FAST, "run.name": "arrays"}, data=arrays[0], test=arrays[1])
    assert len({run.summary["model_sha256"] for run in (of_files, of_frames, of_arrays)}) == 1
    assert of_files.summary["class_names"] == ["ant", "cat", "dog"]
    assert set(of_files.clients["client_name"]) == set("abef")
    assert simulate(keys).summary == of_files.summary
    table.assign(a=table["a"] + 1)[:-20].to_csv(root / "train.csv", index=False)
    with pytest.raises(UserError, match=r"holds another run \(training data differs\)"):
        simulate(keys)


OWNERS = {
    "text": (CLIENTS, "abef"),
    "numbers": (np.arange(ROWS) % 4, "0123"),
    "numbers with gaps": (np.arange(ROWS) % 4 * 10 + 7, ("7", "17", "27", "37")),
    "whole floats": ((np.arange(ROWS) % 4 + 1).astype(float), "1234"),
    "leading zeros": (np.array(["01", "1", "10", "010"])[np.arange(ROWS) % 4], ("01", "010", "1", "10")),
    "dates": (pd.date_range("2024-01-30", periods=3).to_numpy()[np.arange(ROWS) % 3], None),
    "booleans": (np.arange(ROWS) % 2 == 0, ("False", "True")),
    "categories": (pd.Categorical(CLIENTS), "abef"),
    "NA": (np.array(["NA", "null", "None", "DE"])[np.arange(ROWS) % 4], ("DE", "NA", "None", "null")),
}


@pytest.mark.parametrize(("owners", "expected"), OWNERS.values(), ids=OWNERS.keys())
def test_clients_of_any_type(owners, expected, tmp_path):
    table = frame(client=owners)
    source = read(written(tmp_path / "mine", table))
    wanted = [str(value) for value in table["client"][:-20]]
    if expected is None:
        expected, wanted = ("2024-01-30", "2024-01-31", "2024-02-01"), [value[:10] for value in wanted]
    assert names(source) == [value.removesuffix(".0") for value in wanted]
    assert sorted(set(names(source))) == sorted(expected)
    assert (source.client_test >= 0).all()
    result = simulate({**FAST, "data.source": "csv", "data.root": "mine"})
    shown = result.clients.get("client_name", result.clients["client"].astype(str))
    assert set(shown) == set(expected)


@pytest.mark.parametrize("values", [[0, 1], [10, 20, 30], ["cat", "bat", "dog"]])
def test_targets_may_be_the_clients(values, tmp_path):
    table = frame(y=[values[i % len(values)] for i in range(ROWS)])
    source = read(written(tmp_path / "own", table), client_column="target")
    assert names(source) == [str(values[i % len(values)]) for i in range(ROWS - 20)]


def test_targets_of_any_type(tmp_path):
    def targets(y: Any) -> Source:
        return read(written(tmp_path / "mine", frame(y)))

    source = targets(np.where(Y == 2, "01", np.where(Y == 1, "1", "x")))
    assert source.class_names == ("01", "1", "x")
    assert targets(Y).classes == 3
    assert targets(Y > 0).class_names == ("False", "True")
    prices = targets(X[:, 0].astype(float) * 3)
    assert (prices.task, prices.y_train.dtype) == ("regression", np.float32)
    assert np.array_equal(prices.y_train, (X[:-20, 0].astype(float) * 3).astype(np.float32))


def test_columns_are_named(tmp_path):
    table = frame(client=CLIENTS).rename(columns={"target": "species", "client": "ranger"}).assign(note="seen")
    root = written(tmp_path / "mine", table)
    chosen = {"target_column": "species", "client_column": "ranger", "input_columns": ["c", "a"]}
    source = read(root, **chosen)
    assert np.array_equal(source.x_train, X[:-20, [2, 0]])
    assert source.x_train.dtype == np.float32
    # a test set may have its columns in another order, and no clients
    table[-20:][["note", "species", "a", "b", "c", "d"]].to_csv(root / "test.csv", index=False)
    again = read(root, **chosen)
    assert np.array_equal(again.x_test, source.x_test)
    assert again.client_test is None
    keys = ["data.source=csv", "data.root=mine", "data.target_column=species", "data.client_column=ranger"]
    assert main(["data", *keys, "data.input_columns=[a, b]", "model.name=logistic"]) == 0


def test_whole_numbers_and_booleans_are_inputs(tmp_path):
    table = frame().assign(a=np.arange(ROWS), b=np.arange(ROWS) % 2 == 1)
    source = read(written(tmp_path / "mine", table))
    assert source.x_train.dtype == np.float32
    assert np.array_equal(source.x_train[:, 0], np.arange(ROWS - 20))
    assert np.array_equal(source.x_train[:, 1], np.arange(ROWS - 20) % 2)


def test_every_fifth_row_of_one_file(tmp_path):
    frame().to_csv("one.csv", index=False)
    source = read(Path("one.csv"))
    assert np.array_equal(source.x_test, X[4::5])
    assert np.array_equal(source.x_train, X[np.arange(ROWS) % 5 != 4])
    assert source.notes == ("warning: one.csv has no test set of its own: every fifth row is a test row",)
    labels = np.where(np.arange(ROWS) == 4, "rare", "usual")
    frame(labels, client=CLIENTS).to_csv("one.csv", index=False)
    source = read(Path("one.csv"))
    assert source.notes[-1].endswith(": of each client, every fifth row is a test row")
    sizes = np.bincount(source.client_test)
    assert sizes.tolist() == [int((name == CLIENTS).sum()) // 5 for name in "abef"]
    # a class of which all rows are training rows, or test rows, is a class
    assert source.class_names == ("rare", "usual")
    assert held_out(12, ["x", "y"] * 6).tolist() == [False] * 8 + [True] * 2 + [False] * 2


def without(column: str) -> pd.DataFrame:
    return frame().drop(columns=column)


def empty_at(column: str, row: int, rows: int = 1) -> pd.DataFrame:
    table = frame(client=CLIENTS).astype(object)
    table.loc[row : row + rows - 1, column] = None
    return table


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no target": (
        frame().rename(columns={"target": "tarqet"}), {},
        r"train\.csv has no column 'target' \(data\.target_column\) \(did you mean 'tarqet'\?\)",
    ),
    "no such target": (frame(), {"target_column": "label"}, r"no column 'label' .* \(there are: a, b, c, d, target\)"),
    "no client": (frame(client=CLIENTS), {"client_column": "clint"}, r"'clint' \(data.client_column\) \(did you"),
    "near client": (
        frame(clients=CLIENTS), {}, "no column 'client', but 'clients': give data.client_column='clients' if it holds",
    ),
    "no input": (frame(), {"input_columns": ["a", "B2"]}, r"no column 'B2' \(data.input_columns\)"),
    "input twice": (frame(), {"input_columns": ["a", "a"]}, "data.input_columns names twice 'a'"),
    "target as input": (frame(), {"input_columns": ["target"]}, "'target' is the column of the targets in .*train.csv"),
    "client as input": (frame(client=1), {"input_columns": ["client"]}, "'client' is the column of the clients in"),
    "text input": (
        frame(city="Oslo"), {},
        r"column 'city' is not numeric: 'Oslo' in row 0; if it says whose row it is, give data.client_column='city'; "
        r"make columns of 0 and 1 of categories \(pandas.get_dummies\); texts need data.source=hf and data.tokenizer$",
    ),
    "a text in an input": (
        frame(b=np.where(np.arange(ROWS) == 7, "?", "1.5")), {}, r"'b' is not numeric: '\?' in row 7$",
    ),
    "gap in input": (empty_at("c", 9), {}, r"train\.csv: column 'c' has nothing in row 9 \(1 such rows\)"),
    "gap in target": (empty_at("target", 5, 2), {}, r"csv: column 'target' has nothing in row 5 \(2 such rows\)"),
    "gap in client": (empty_at("client", 6), {}, r"train\.csv: column 'client' has nothing in row 6"),
    "gap in test": (empty_at("target", 70), {}, r"test\.csv: column 'target' has nothing in row 10"),
    "NaN target": (frame(np.where(Y == 1, "nan", "0.5")), {}, "y_train .*row 1"),
    "unknown class": (
        frame(np.where(np.arange(ROWS) == 70, "dgo", "dog")), {}, "y_test has 'dgo' in row 10, which y_train",
    ),
    "no inputs": (frame()[["target"]], {}, "has no column of inputs beside 'target'"),
    "infinite": (frame().assign(a=np.where(Y == 2, np.inf, 1.0)), {}, "x_train has an infinite number in row 2"),
}  # fmt: skip


@pytest.mark.parametrize(("table", "keys", "message"), BAD.values(), ids=BAD.keys())
def test_bad_tables(table, keys, message, tmp_path):
    root = written(tmp_path / "mine", table)
    with pytest.raises(UserError, match=message) as refused:
        read(root, **keys)
    assert "\n" not in str(refused.value)


FILES = {
    "nothing": ("", "is empty"),
    "no rows": ("a,target\n", "has no rows"),
    "binary": (b"\x89PNG\r\n\x1a\n\xff\xfe\x00", "can't be read as csv"),
    "semicolons": ("a;target\n1;2\n", "separates its columns by ';'; data.source=csv needs commas"),
    "index": (",a,target\n0,1,2\n", "column 0 has no name, as the index that pandas' to_csv writes"),
    "twice": ("a,a,target\n1,2,0\n", "has two columns 'a'"),
    "long rows": ("a,target\n1,0,7\n2,1,8\n", "can't be read as csv: Expected 2 fields in line 2, saw 3"),
    "one long row": ("a,target\n1,0\n2,1,8\n", "can't be read as csv: .*line 3"),
    "short row": ("a,target\n1,0\n2\n", "column 'target' has nothing in row 1"),
    "few rows": ("a,target\n1,0\n2,1\n", "is too short: of 2 rows none is a fifth one"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES.keys())
def test_bad_files(content, message, tmp_path):
    path = tmp_path / "one.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}.*{message}") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_files_that_are_not_there(tmp_path, capsys):
    for root, message in ((tmp_path / "no.csv", r"no file .*no\.csv"), (tmp_path, r"no file .*train\.csv")):
        with pytest.raises(UserError, match=message):
            read(root)
    written(tmp_path, frame())
    (tmp_path / "test.csv").unlink()
    with pytest.raises(UserError, match=r"there is no file .*test\.csv"):
        read(tmp_path)
    assert main(["run", "data.source=csv", "engine.kind=local"]) == 2
    assert "data.source=csv needs data.root: the folder with train.csv" in capsys.readouterr().err


def test_other_columns_in_the_test_set(tmp_path):
    root = written(tmp_path / "mine", frame())
    without("b")[-20:].to_csv(root / "test.csv", index=False)
    with pytest.raises(UserError, match=r"test\.csv lacks column 'b', which .*train\.csv has; both need the same"):
        read(root)


@pytest.mark.parametrize("key", ["target_column", "client_column", "input_columns"])
def test_columns_are_for_sources_that_have_some(key, tmp_path):
    keys = {f"data.{key}": ["a"] if key == "input_columns" else "a"}
    with pytest.raises(UserError, match=f"data.{key}: the source sample has no columns to choose"):
        simulate({**FAST, **keys})
    with pytest.raises(UserError, match=f"data.{key} is for data.source; with data=... columns are named by label_col"):
        simulate({**FAST, **keys}, data=(X, Y), test=(X, Y))
    Path("mine.py").write_text("def load(path): return path")
    with pytest.raises(UserError, match=f"data.{key}: the source mine.py:load has no columns"):
        simulate({**FAST, **keys, "data.source": "mine.py:load"})


def test_a_gap_in_a_dataframe_names_its_column():
    table = frame().rename(columns={"target": "label"})
    table.loc[3, "b"] = np.nan
    with pytest.raises(UserError, match=r"data: column 'b' has nothing in row 3 \(1 such rows\)"):
        user_source(table, table)
