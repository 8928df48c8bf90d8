"""Sources: the real files, the sample in the package, and every way in which a user's own data can be wrong."""

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest

from fedray.data.sample.make import idx_file
from fedray.data.sources import idx
from fedray.data.sources.idx import FILES, read_idx, read_pair
from fedray.data.sources.source import SOURCES, Source, from_fields, load_source, validate
from fedray.errors import UserError


def refused(message):
    return pytest.raises(UserError, match=message)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_files(name):
    place = os.environ.get("FEDRAY_DATA")
    if not place:
        pytest.skip("FEDRAY_DATA is not set: no folder with the real data sets")
    if not (Path(place) / idx.SETS[name].folder).is_dir():
        pytest.skip(f"$FEDRAY_DATA has no {idx.SETS[name].folder}")
    source = load_source(name)
    assert source.x_train.shape == (60000, 1, 28, 28)
    assert source.x_test.shape == (10000, 1, 28, 28)
    assert source.x_train.dtype == np.uint8
    assert source.y_train.dtype == np.int64
    assert abs(source.x_train.mean() / 255 - idx.SETS[name].mean) < 1e-4
    assert abs(source.x_train.std() / 255 - idx.SETS[name].std) < 1e-4
    first = [5, 0, 4, 1, 9] if name == "mnist" else [9, 0, 0, 3, 0]
    assert source.y_train[:5].tolist() == first
    assert load_source(name, place).x_train.shape == source.x_train.shape


def test_the_sample_is_balanced_real_and_small():
    source = load_source("sample")
    assert source.name == "sample"
    assert source.x_train.shape == (10000, 1, 28, 28)
    assert np.bincount(source.y_train).tolist() == [1000] * 10
    assert np.bincount(source.y_test).tolist() == [200] * 10
    normalised = source.x_train.astype(np.float32) * source.scale[:, None, None] + source.shift[:, None, None]
    assert abs(normalised.mean()) < 0.02
    assert abs(normalised.std() - 1) < 0.02
    folder = Path(idx.__file__).parent.parent / "sample"
    assert sum(path.stat().st_size for path in folder.glob("*.gz")) < 8e6
    assert "2017 Zalando SE" in (folder / "LICENSE").read_text()


@pytest.fixture
def files(tmp_path):
    """A folder with four small idx files."""
    rng = np.random.Generator(np.random.Philox(0))
    for part, n in (("train", 30), ("t10k", 10)):
        write(tmp_path / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (n, 4, 5), dtype=np.uint8))
        write(tmp_path / f"{part}-labels-idx1-ubyte.gz", (np.arange(n) % 10).astype(np.uint8))
    return tmp_path


def write(path, array):
    path.write_bytes(idx_file(array))


@pytest.mark.parametrize("below", [".", "raw", "MNIST/raw"])
def test_files_are_found_below_root(files, below, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / below).mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (files / f"{file}.gz").rename(root / below / f"{file}.gz")
    assert load_source("mnist", str(root)).x_train.shape == (30, 1, 4, 5)


def test_gzip_is_told_by_content(files):
    plain = files / FILES[0]
    plain.write_bytes(gzip.decompress((files / f"{FILES[0]}.gz").read_bytes()))
    misnamed = files / f"{FILES[1]}"
    (files / f"{FILES[1]}.gz").rename(misnamed)
    (files / f"{FILES[0]}.gz").unlink()
    assert load_source("mnist", str(files)).x_train.shape == (30, 1, 4, 5)


def test_a_missing_file_is_named(files):
    (files / f"{FILES[3]}.gz").unlink()
    with refused(f"data.root=.* lacks {FILES[3]}"):
        load_source("mnist", str(files))


def test_root_without_files_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with refused("lacks train-images-idx3-ubyte .*MNIST/raw"):
        load_source("mnist", str(tmp_path / "empty"))
    with refused("is not a folder"):
        load_source("mnist", str(tmp_path / "nowhere"))


def test_fedray_data_comes_first_and_the_cache_later(files, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDRAY_DATA", str(files))
    assert len(load_source("fashion_mnist").y_train) == 30
    monkeypatch.delenv("FEDRAY_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw = tmp_path / "cache/fedray/MNIST/raw"
    raw.mkdir(parents=True)
    for file in FILES:
        (files / f"{file}.gz").rename(raw / f"{file}.gz")
    assert len(load_source("mnist").y_train) == 30


def test_no_files_and_no_network(tmp_path, monkeypatch):
    from torchvision import datasets

    def offline(root, download):
        raise RuntimeError("Error downloading\n train-images")

    monkeypatch.setattr(datasets, "MNIST", offline)
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refused(r"mnist is not in .*mine, .*cache/fedray and could not .* data.root or \$FEDRAY_DATA") as raised:
        load_source("mnist")
    assert "\n" not in str(raised.value)


def test_a_download_is_moved_into_the_cache_whole(files, tmp_path, monkeypatch):
    from torchvision import datasets

    def download(root, download):
        raw = Path(root) / "MNIST/raw"
        raw.mkdir(parents=True)
        for file in FILES:
            (files / f"{file}.gz").rename(raw / f"{file}.gz")

    monkeypatch.setattr(datasets, "MNIST", download)
    monkeypatch.delenv("FEDRAY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(load_source("mnist").y_train) == 30
    assert [path.name for path in (tmp_path / "cache/fedray").iterdir()] == ["MNIST"]


def damaged(content, kind):
    raw = gzip.decompress(content)
    return {
        "truncated gzip": content[:-30],
        "damaged gzip": content[:30] + bytes([content[30] ^ 255]) + content[31:],
        "truncated": raw[:-3],
        "no header": raw[:6],
        "empty": b"",
        "extra": raw + b"\0",
        "html": b"<!DOCTYPE html><title>404</title>",
        "float idx": b"\0\0\x0d\x01" + raw[4:],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated gzip", "is damaged or no idx file .*ended before"),
        ("damaged gzip", "is damaged or no idx file"),
        ("truncated", r"has 597 bytes of data where its header \[30, 4, 5\] promises 600"),
        ("no header", "is no idx file of unsigned bytes: it begins with 00 00 08 03"),
        ("empty", "is no idx file of unsigned bytes: it begins with nothing"),
        ("extra", "has 601 bytes .* 600"),
        ("html", "is no idx file .* 3c 21 44 4f"),
        ("float idx", "is no idx file of unsigned bytes: it begins with 00 00 0d 01"),
    ],
)
def test_damaged_files_are_named(files, kind, message):
    path = files / f"{FILES[0]}.gz"
    path.write_bytes(damaged(path.read_bytes(), kind))
    with refused(f"{FILES[0]}.gz {message}") as raised:
        load_source("mnist", str(files))
    assert "\n" not in str(raised.value)


def test_swapped_files(files):
    with refused(r"images-idx3-ubyte.gz one \[30, 4, 5\], not images .* swapped"):
        read_pair(files / f"{FILES[1]}.gz", files / f"{FILES[0]}.gz")
    with refused(r"one \[10, 4, 5\], not images .* swapped"):
        read_pair(files / f"{FILES[0]}.gz", files / f"{FILES[2]}.gz")


def test_labels_of_another_part(files):
    with refused(r"an array \[30, 4, 5\] and .* one \[10\], not images"):
        read_pair(files / f"{FILES[0]}.gz", files / f"{FILES[3]}.gz")


def test_mislabelled(files):
    write(files / f"{FILES[3]}.gz", np.array([0, 1, 10, 3, 4, 5, 6, 7, 8, 255], np.uint8))
    with refused(f"{FILES[3]}.gz has label 10 in row 2; labels must be 0..9"):
        load_source("mnist", str(files))


def test_idx_reads_any_number_of_dimensions(tmp_path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 1, 4)
    write(tmp_path / "a", array)
    assert np.array_equal(read_idx(tmp_path / "a"), array)


def test_unknown_sources():
    with refused("no source 'fashion-mnist' .*did you mean 'fashion_mnist'"):
        load_source("fashion-mnist")
    assert all(entry.about and entry.licence for entry in SOURCES.values())


def arrays(**changes):
    rng = np.random.Generator(np.random.Philox(2))
    given = {
        "x_train": rng.normal(size=(12, 3)).astype(np.float32),
        "y_train": np.arange(12) % 4,
        "x_test": rng.normal(size=(5, 3)).astype(np.float32),
        "y_test": np.arange(5) % 4,
        **changes,
    }
    return {key: value for key, value in given.items() if value is not None}


def with_nan(value=np.nan):
    x = np.zeros((12, 3), np.float32)
    x[7, 1] = x[9, 0] = value
    return x


BAD = {
    "NaN": ({"x_train": with_nan()}, r"x_train has NaN in row 7 \(2 such rows\)"),
    "inf": ({"x_train": with_nan(-np.inf)}, "x_train has an infinite number in row 7"),
    "beyond float32": ({"x_train": np.full((12, 3), 1e300)}, "x_train has an infinite number in row 0"),
    "float labels": ({"y_test": np.arange(5) / 2}, "y_test must hold whole numbers, not 0.5 as in row 1"),
    "one-hot labels": (
        {"y_train": np.eye(12, 4, dtype=int)},
        "y_test has 2 in row 2; the labels of task.kind=mu",
    ),
    "complex labels": ({"y_train": np.arange(12) + 0j}, "y_train must hold whole numbers or names, not complex128"),
    "no date": (
        {"client_train": np.array(["2026-01-01", "NaT"] * 6, "datetime64[D]")},
        "client_train has nothing in row 1",
    ),
    "negative label": ({"y_train": np.arange(12) - 1}, "y_train has label -1 in row 0"),
    "mismatched lengths": ({"y_train": np.arange(11) % 4}, "x_train has 12 samples and y_train 11"),
    "mismatched owners": ({"client_train": np.arange(5)}, "x_train has 12 samples and client_train 5"),
    "float owners": ({"client_train": np.full(12, 0.5)}, "client_train must hold whole numbers"),
    "owners of tests alone": (
        {"client_test": np.zeros(5, int)},
        "has client_test but lacks client_train, the client of each",
    ),
    "other features": ({"x_test": np.zeros((5, 4), np.float32)}, r"x_test have shape \[4\], those of x_train \[3\]"),
    "other dtype": ({"x_test": np.zeros((5, 3), np.uint8)}, "x_test is uint8, x_train float32"),
    "int features": ({"x_train": np.zeros((12, 3), int)}, "x_test is float32, x_train int64; they must be alike"),
    "texts as features": ({"x_train": np.full((12, 3), "a")}, "x_train is of type <U1; features must be numbers"),
    "flat features": ({"x_train": np.zeros(12, np.float32)}, r"x_train has shape \[12\].*each sample \[samples, 1\]"),
    "empty test": ({"x_test": np.zeros((0, 3), np.float32), "y_test": np.zeros(0, int)}, "x_test is empty"),
    "missing": ({"y_test": None}, "lacks y_test$"),
    "half a public set": ({"x_public": np.zeros((2, 3), np.float32)}, "lacks y_public"),
    "bad public": ({"x_public": np.zeros((2, 3), np.float32), "y_public": np.zeros(3, int)}, "x_public has 2 samples"),
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["x", math.nan, "y"], r"y_train has nothing in row 1 \(4 such rows\)"),
        (["x", None, "y"], r"y_train has nothing in row 1 \(4 such rows\)"),
        (["x", 1, "y"], "y_train holds numbers and y_test names; they must be alike"),
    ],
)
def test_lists_of_names_with_other_things(values, message):
    """NumPy makes texts of all of them."""
    with refused(message):
        from_fields("mine", arrays(y_train=values * 4, y_test=["x", "y", "x", "y", "x"]))


def test_names_in_bytes_are_names():
    labels = np.array([b"dog", b"cat"])
    found = from_fields("mine", arrays(y_train=labels.repeat(6), y_test=labels[[0, 0, 1, 1, 1]], class_names=labels))
    assert found.class_names == ("dog", "cat")


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arrays_are_named(changes, message, tmp_path):
    with refused(message) as raised:
        from_fields("mine", arrays(**changes))
    assert "\n" not in str(raised.value)
    np.savez(tmp_path / "mine.npz", **arrays(**changes))
    with refused(f"mine.npz.*{message}"):
        load_source("npz", str(tmp_path / "mine.npz"))


def test_labels_beyond_the_classes():
    with refused(r"y_train has label 3 in row 3; labels must be 0..2"):
        from_fields("mine", arrays(classes=3))


def test_wrong_normalisation():
    with refused("scale must be 3 finite numbers"):
        from_fields("mine", arrays(scale=np.ones(2)))


def test_float64_is_cast_and_normalisation_filled_in():
    source = from_fields("mine", arrays(x_train=np.ones((12, 3)), scale=np.full(3, 2.0)))
    assert source.x_train.dtype == source.scale.dtype == source.shift.dtype == np.float32
    assert source.shift.tolist() == [0, 0, 0]
    assert source.classes == 4
    assert validate(source).y_test.dtype == np.int64


def test_npz(tmp_path):
    extra = {"x_public": np.zeros((2, 3), np.float32), "y_public": np.array([6, 0], np.int32), "comment": np.array("x")}
    np.savez_compressed(tmp_path / "mine.npz", **arrays(client_train=np.arange(12, dtype=np.int32) // 3), **extra)
    source = load_source("npz", str(tmp_path / "mine.npz"))
    assert source.classes == 7
    assert source.name == "mine"
    assert source.client_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert source.scale is None


def test_npz_images_of_bytes_are_scaled(tmp_path):
    images = {"x_train": np.full((12, 3, 2, 2), 255, np.uint8), "x_test": np.zeros((5, 3, 2, 2), np.uint8)}
    np.savez(tmp_path / "mine.npz", **arrays(**images))
    assert np.allclose(load_source("npz", str(tmp_path / "mine.npz")).scale, [1 / 255] * 3)


def test_files_that_are_no_npz(tmp_path):
    path = tmp_path / "mine.npz"
    with refused("needs data.root"):
        load_source("npz")
    with refused("can't read data.root=.*mine.npz: No such file"):
        load_source("npz", str(path))
    with refused("is a folder"):
        load_source("npz", str(tmp_path))
    path.write_text("x,y\n1,2\n")
    with refused("is not an npz file"):
        load_source("npz", str(path))
    np.savez(path, **arrays())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with refused("is not an npz file, or an incomplete one"):
        load_source("npz", str(path))
    path.write_bytes(content.replace(arrays()["x_train"].tobytes()[:8], b"\xff" * 8))
    with refused("is damaged"):
        load_source("npz", str(path))


def test_object_arrays_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays(x_train=np.array([[1], [1, 2]] * 6, dtype=object)))
    with refused("x_train is an array of Python objects"):
        load_source("npz", str(tmp_path / "mine.npz"))


def test_a_source_may_be_given_as_an_object():
    source = Source("mine", **arrays(), classes=4)
    assert validate(source).y_train.dtype == np.int64
