"""Sources in their publishers' own formats: real files where they are there, small ones in the same format, damage."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedray import UserError, simulate
from fedray.data.sample.make import idx_file
from fedray.data.sources.emnist import BY_CLASS, MERGED
from fedray.data.sources.har import SIGNALS
from fedray.data.sources.shakespeare import CHARACTERS, LENGTH
from fedray.data.sources.source import SOURCES, Source, load_source
from fedray.data.sources.stackoverflow import BEGIN, END, PADDING, UNKNOWN, WORDS

rng = np.random.default_rng(4)


def clients(source: Source) -> int:
    return 0 if source.client_train is None else len(np.unique(source.client_train))


COFFEE = "is it necessary to allow a shot of espresso to rest before adding it to a drink ? (end)"
REAL = {
    # source, variant: folder, samples, tests, shape, classes, clients, first labels, samples of the first classes
    ("cifar100", "fine"): ("cifar-100-binary", 5000, 1000, (3, 32, 32), 100, 0, [0, 1, 2, 3], [50, 50, 50]),
    ("cifar100", "coarse"): ("cifar-100-binary", 5000, 1000, (3, 32, 32), 20, 0, [4, 1, 14, 8], [250, 250, 250]),
    ("emnist", "bymerge_test"): ("EMNIST", 93074, 23249, (1, 28, 28), 47, 0, [24, 22, 28, 0, 5, 8], [4596, 5120, 4612]),
    ("tiny_imagenet", None): ("tiny-imagenet-200", 4000, 1000, (3, 64, 64), 200, 0, [0, 0, 0], [20, 20, 20]),
    ("har", "signals"): ("UCI_HAR_Dataset", 7352, 2947, (9, 128), 6, 21, [4, 4, 4], [1226, 1073, 986]),
    ("shakespeare", "tiny"): ("tinyshakespeare", 800308, 186812, (80,), 80, 247, "mean", None),
    ("shakespeare", "plays"): ("shakespeare", 3293099, 765381, (80,), 80, 1109, "ajes", None),
    ("stackoverflow", None): ("stackexchange", 4403, 767, (20,), 10_004, 115, COFFEE, None),
    ("omniglot", None): ("omniglot", 4672, 1168, (1, 28, 28), 292, 160, [0, 0, 0], [16, 16, 16]),
    ("fire", None): ("fire", 519, 128, (3, 64, 64), 2, 0, [0, 0, 0], [88, 431]),
}
"""What ../shared/data's DATA.md, the publishers, or a count by hand say of the files."""


@pytest.mark.parametrize(("name", "variant"), REAL, ids=lambda value: str(value))
def test_real_files(name, variant):
    folder, samples, tests, shape, classes, people, first, counts = REAL[name, variant]
    place = os.environ.get("FEDRAY_DATA")
    if not place or not (Path(place) / folder).is_dir():
        pytest.skip(f"$FEDRAY_DATA has no {folder}")
    source = load_source(name, variant=variant)
    inputs = getattr(source.x_train, "first", source.x_train)
    assert inputs.shape[1:] == shape
    assert (source.classes, clients(source)) == (classes, people)
    assert (len(source.y_train), len(source.y_test)) == (samples, tests)
    if isinstance(first, list):
        assert source.y_train[: len(first)].tolist() == first
    elif source.y_train.ndim == 1:
        assert [source.class_names[k] for k in source.y_train[: len(first)]] == [*first]
    else:
        assert " ".join(source.class_names[k] for k in source.y_train[0] if k >= 0) == first
    if counts is not None:
        assert np.bincount(source.y_train)[: len(counts)].tolist() == counts


def test_all_are_listed_with_what_they_were_tested_with():
    assert all(entry.tested and entry.licence for entry in SOURCES.values())


def written_idx(folder: Path, split: str, part: str, x: np.ndarray, y: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", x), ("labels-idx1", y)):
        (folder / f"emnist-{split}-{part}-{kind}-ubyte.gz").write_bytes(idx_file(array))


@pytest.mark.parametrize(("split", "names"), [("balanced", MERGED), ("bymerge", MERGED), ("byclass", BY_CLASS)])
@pytest.mark.parametrize("folder", ["EMNIST/raw", "gzip"])
def test_emnist(split, names, folder, tmp_path):
    x, y = rng.integers(0, 256, (62, 28, 28), dtype=np.uint8), np.arange(62, dtype=np.uint8) % len(names)
    written_idx(tmp_path / folder, split, "train", x, y)
    written_idx(tmp_path / folder, split, "test", x[:9], y[:9])
    source = load_source("emnist", str(tmp_path), variant=split)
    assert source.class_names == names
    assert source.y_train.tolist() == y.tolist()
    assert np.array_equal(source.x_train[:, 0], x.transpose(0, 2, 1)), "the published images lie on their side"
    pixels = source.x_train.astype(np.float64)
    np.testing.assert_allclose(
        [source.scale[0], source.shift[0]], [1 / pixels.std(), -pixels.mean() / pixels.std()], 1e-5
    )


def test_emnist_that_is_wrong(tmp_path):
    with pytest.raises(UserError, match=r"data.variant: the source emnist has no 'bymerg' \(did you mean 'bymerge'"):
        load_source("emnist", str(tmp_path), variant="bymerg")
    with pytest.raises(UserError, match=r"data.variant: the source mnist has no variants"):
        load_source("mnist", str(tmp_path), variant="digits")
    x, y = np.zeros((5, 28, 28), np.uint8), np.array([0, 1, 2, 47, 3], np.uint8)
    written_idx(tmp_path, "balanced", "train", x, y)
    with pytest.raises(UserError, match=r"lacks emnist-balanced-test-images-idx3-ubyte"):
        load_source("emnist", str(tmp_path))
    with pytest.raises(
        UserError, match=r"emnist-byclass-train-.*there is emnist-balanced-train-images.*see data.variant"
    ):
        load_source("emnist", str(tmp_path), variant="byclass")
    written_idx(tmp_path, "balanced", "test", x, y)
    with pytest.raises(UserError, match=r"has label 47 in row 3; labels must be 0..46"):
        load_source("emnist", str(tmp_path))


def leaf(folder: Path, users: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    content = {"users": list(users), "num_samples": [len(each["y"]) for each in users.values()], "user_data": users}
    (folder / "all_data_0.json").write_text(json.dumps(content))


def images(count: int) -> dict[str, Any]:
    return {"x": (rng.integers(0, 256, (count, 784)) / 255).tolist(), "y": rng.integers(0, 62, count).tolist()}


def test_femnist_by_writer(tmp_path):
    train, test = {"f01": images(4), "f00": images(3)}, {"f00": images(1), "f01": images(2)}
    leaf(tmp_path / "data" / "train", train)
    leaf(tmp_path / "data" / "test", test)
    source = load_source("emnist", str(tmp_path), variant="femnist")
    assert source.client_names == ("f00", "f01")
    assert source.client_train.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert source.client_test.tolist() == [0, 1, 1]
    assert source.y_train.tolist() == train["f00"]["y"] + train["f01"]["y"]
    np.testing.assert_allclose(source.x_train[3].ravel() / 255, train["f01"]["x"][0])


def test_leaf_without_a_division(tmp_path):
    leaf(tmp_path / "all_data", {"a": images(10), "b": images(4)})
    source = load_source("emnist", str(tmp_path), variant="femnist")
    assert np.bincount(source.client_train).tolist() == [8, 4]
    assert source.client_test.tolist() == [0, 0]
    assert "the last fifth of each user's samples are tests" in source.notes[0]


def of_femnist(pixel: float, label: float) -> bytes:
    return json.dumps({"user_data": {"a": {"x": [[pixel] * 784], "y": [label]}}}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged or no json file"),
        (b"[]", "lacks user_data: it is no file of LEAF"),
        (b'{"user_data": {"a": {"x": [[1]], "y": []}}}', "user 'a' must have lists x and y of equal lengths"),
        (b'{"user_data": {"a": {"x": [[1]], "y": [2]}}}', "user 'a' must have images of 784 numbers from 0 to 1"),
        (b'{"user_data": {}}', "has no samples"),
        (of_femnist(0, 62), "has label 62; labels must be 0..61"),
        (of_femnist(0, 0.7), "user 'a' must have whole numbers as labels"),
        (of_femnist(0, True), "user 'a' must have whole numbers as labels"),
        (of_femnist(math.nan, 3), "user 'a' must have images of 784 numbers from 0 to 1"),
    ],
)
def test_damaged_files_of_leaf(content, message, tmp_path):
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data" / "a.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        load_source("emnist", str(tmp_path), variant="femnist")
    assert message in str(error.value)


def tiny_imagenet(folder: Path) -> None:
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn03\tnothing\nn02\ttabby\n")
    lines = []
    for k, name in enumerate(("n01", "n02", "n01")):
        for place in (
            folder / "train" / name / "images" / f"{name}_{k}.JPEG",
            folder / "val" / "images" / f"val_{k}.JPEG",
        ):
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((64, 64, 3), 40 * k, np.uint8)).save(place)
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def test_tiny_imagenet(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    tiny_imagenet(folder)
    source = load_source("tiny_imagenet", str(tmp_path))
    assert source.class_names == ("tabby (n02)", "goldfish (n01)")
    assert source.y_train.tolist() == [0, 1, 1]
    assert source.y_test.tolist() == [1, 0, 1]
    annotations = folder / "val" / "val_annotations.txt"
    right = annotations.read_text()
    for line, message in (
        ("val_2.JPEG\tn07\t0\t0\t1\t1\n", r"val_annotations.txt has class 'n07' in line 4, which wnids.txt"),
        ("val_9.JPEG\tn01\t0\t0\t1\t1\n", r"lists 'val_9.JPEG' in line 4, which val/images does not have"),
        ("../../wnids.txt\tn01\t0\t0\t1\t1\n", r"lists '../../wnids.txt' in line 4, which val/images does not have"),
    ):
        annotations.write_text(right + line)
        with pytest.raises(UserError, match=message):
            load_source("tiny_imagenet", str(tmp_path))
    (folder / "wnids.txt").write_text("n02\nn01\nn05\n")
    with pytest.raises(UserError, match="n05/images has no images"):
        load_source("tiny_imagenet", str(tmp_path))


def har(folder: Path, rows: int = 8) -> np.ndarray:
    x = rng.normal(size=(rows, 561))
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        np.savetxt(folder / part / f"X_{part}.txt", x, fmt="% .7e")
        np.savetxt(folder / part / f"y_{part}.txt", np.arange(rows) % 6 + 1, fmt="%d")
        np.savetxt(folder / part / f"subject_{part}.txt", np.repeat([3, 1], rows // 2), fmt="%d")
    return x


def test_features_of_har(tmp_path):
    x = har(tmp_path / "UCI HAR Dataset")
    source = load_source("har", str(tmp_path))
    np.testing.assert_allclose(source.x_train, x, rtol=1e-6)
    assert source.y_train.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert source.client_names == ("subject 1", "subject 3")
    assert source.client_train.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(UserError, match=r"lacks train/Inertial Signals/body_acc_x_train.txt .*; data.variant=features"):
        load_source("har", str(tmp_path), variant="signals")
    file = tmp_path / "UCI HAR Dataset" / "train" / "X_train.txt"
    file.write_text(file.read_text().replace("e", "?", 1))
    with pytest.raises(UserError, match=r"X_train.txt is damaged"):
        load_source("har", str(tmp_path))
    (file.parent / "X_train.txt").write_text("1 2 3\n")
    with pytest.raises(UserError, match=r"X_train.txt must have 561 numbers in each row; it has 3"):
        load_source("har", str(tmp_path))


def test_signals_of_har(tmp_path):
    har(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / "Inertial Signals").mkdir()
        for name in SIGNALS:
            np.savetxt(tmp_path / part / "Inertial Signals" / f"{name}_{part}.txt", rng.normal(size=(8, 128)))
    assert load_source("har", str(tmp_path), variant="signals").x_train.shape == (8, 9, 128)
    np.savetxt(tmp_path / "train" / "Inertial Signals" / "body_gyro_y_train.txt", rng.normal(size=(7, 128)))
    with pytest.raises(UserError, match=r"7 rows in Inertial Signals/body_gyro_y_train.txt, 8 activities"):
        load_source("har", str(tmp_path), variant="signals")


def test_what_is_there_in_part_is_said(tmp_path, monkeypatch):
    """Not only that a data set is nowhere."""
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    har(tmp_path / "UCI HAR Dataset")
    message = (
        r"lacks train/Inertial Signals/body_acc_x_train.txt .*; data.variant=features needs other files.; get .* http"
    )
    with pytest.raises(UserError, match=message):
        load_source("har", variant="signals")


def test_shakespeare_of_leaf(tmp_path):
    text = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer" * 2
    pieces = {"x": [text[k : k + LENGTH] for k in range(9)], "y": [text[k + LENGTH] for k in range(9)]}
    leaf(tmp_path / "all_data", {"HAMLET": pieces, "OPHELIA": {"x": pieces["x"][:2], "y": ["é", "t"]}})
    source = load_source("shakespeare", str(tmp_path))
    assert source.client_names == ("HAMLET", "OPHELIA")
    assert "".join(CHARACTERS[k] for k in source.x_train[0]) == text[:LENGTH]
    assert source.y_train[0] == CHARACTERS.index(text[LENGTH])
    assert source.y_train[-2] == CHARACTERS.index(" "), "a character that LEAF does not know"
    leaf(tmp_path / "b" / "all_data", {"HAMLET": {"x": ["short"], "y": ["a"]}})
    with pytest.raises(UserError, match="user 'HAMLET' must have texts of 80 characters"):
        load_source("shakespeare", str(tmp_path / "b"))


def test_plays(tmp_path):
    long = "\n".join(f"line {k} of a speech that is long enough" for k in range(30))
    (tmp_path / "play.txt").write_text(
        "THE PLAY\n\nby nobody\n\nACT I.\n\nSCENE II. A Camp.\n\n[Enter\nall.]\n\n"
        f"Kent.\n{long}\n\nFIRST WITCH.\n{long}\n[Aside.] More.\n\n[Exit.]\n\nKent.\nAgain.\n"
    )
    source = load_source("shakespeare", str(tmp_path), variant="plays")
    assert source.client_names == ("play: FIRST WITCH", "play: KENT")
    said = len(long) + len("\nAgain.")
    first = said - said // 5
    assert (source.client_train == 1).sum() == first - LENGTH
    assert (source.client_test == 1).sum() == said // 5 - LENGTH
    of_kent = source.x_train[source.client_train == 1]
    assert "".join(CHARACTERS[k] for k in of_kent[0]) == long[:LENGTH]


def test_tinyshakespeare(tmp_path):
    words = "\n".join(f"He said it {k} times, and then no more." for k in range(20))
    (tmp_path / "input.txt").write_text(f"First Citizen:\n{words}\n\n\nAll:\nSpeak.\n\nFirst Citizen:\n{words}\n")
    source = load_source("shakespeare", str(tmp_path), variant="tiny")
    assert source.client_names == ("All", "First Citizen")
    whole = f"{words}\n{words}"
    assert len(source.y_train) == len(whole) - len(whole) // 5 - LENGTH
    (tmp_path / "input.txt").write_text("All:\nSpeak.\n")
    with pytest.raises(UserError, match="has no role that says more than 80 characters"):
        load_source("shakespeare", str(tmp_path), variant="tiny")


def posts(folder: Path, rows: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Posts.xml").write_text(f'\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{rows}</posts>', "utf-8")
    return folder


def test_posts_of_stackoverflow(tmp_path):
    row = '<row Id="{0}" PostTypeId="{1}" OwnerUserId="{2}" Body="&lt;p&gt;{3}&lt;/p&gt;" />\n'
    rows = [row.format(k, 1 + k % 2, 7, "Grind it well. Then &amp;amp; brew") for k in range(5)]
    rows += [row.format(9, 1, 3, " ".join(["fine"] * 30)), row.format(10, 5, 3, "a wiki")]
    rows.append('<row Id="11" PostTypeId="2" Body="nobody wrote this" />\n')
    source = load_source("stackoverflow", str(posts(tmp_path, "".join(rows))))
    assert source.client_names == ("user 3", "user 7")
    assert "1 posts without an owner are left out" in source.notes[0]
    assert source.client_train.tolist() == [0, *[1] * 8]
    assert source.client_test.tolist() == [1, 1]
    number = {word: k for k, word in enumerate(source.class_names)}
    assert number["fine"] == 1, "the most frequent word"
    assert source.x_train[0].tolist() == [BEGIN, *[1] * 19]
    assert source.y_train[0].tolist() == [1] * 20, "words after the 20th are cut off"
    words = [number[word] for word in ("grind", "it", "well", ".")]
    assert source.x_train[1].tolist() == [BEGIN, *words, *[PADDING] * 15]
    assert source.y_train[1].tolist() == [*words, END, *[-100] * 15]
    assert source.classes == len(source.class_names) == WORDS + 4
    assert (source.y_test != UNKNOWN).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("<row", "is damaged or no dump of posts"),
        ("", "has no posts of users"),
        ('<row PostTypeId="1" OwnerUserId="1" Body="once" />', "no user has 5 posts"),
        ('<row PostTypeId="1" OwnerUserId="one" Body="once" />', "is damaged or no dump of posts"),
        ('<!DOCTYPE a [<!ENTITY b "b">]><row PostTypeId="1" OwnerUserId="1" Body="&b;" />', "is damaged"),
    ],
)
def test_damaged_posts(rows, message, tmp_path):
    with pytest.raises(UserError) as error:
        load_source("stackoverflow", str(posts(tmp_path, rows)))
    assert message in str(error.value)


def test_omniglot_by_drawer(tmp_path):
    for character in ("character01", "character02"):
        folder = tmp_path / "images_background" / "Greek" / character
        folder.mkdir(parents=True)
        for drawer in range(1, 11):
            picture = np.full((105, 105), 255, np.uint8)
            picture[: 10 * drawer] = 0
            Image.fromarray(picture).convert("1").save(folder / f"0001_{drawer:02}.png")
    source = load_source("omniglot", str(tmp_path))
    assert source.x_train.shape == (16, 1, 28, 28)
    assert source.y_test.tolist() == [0, 0, 1, 1]
    assert source.client_names[0] == "images_background/Greek 1"
    assert clients(source) == 8
    assert source.x_train[0, 0, 0, 0] == 255, "ink is bright"
    assert load_source("omniglot", str(tmp_path), image_size=20).x_train.shape[2:] == (20, 20)
    (folder / "0001_03.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"0001_03.png is not an image that Pillow knows"):
        load_source("omniglot", str(tmp_path))


def test_fire(tmp_path):
    for name in ("fire", "nofire"):
        (tmp_path / name).mkdir()
        for k in range(6):
            Image.fromarray(np.full((80, 70, 3), 30 * k, np.uint8)).save(tmp_path / name / f"a photo, {k}.jpg")
    source = load_source("fire", str(tmp_path))
    assert source.class_names == ("fire", "nofire")
    assert source.x_train.first.shape == (1, 3, 64, 64)
    assert (len(source.y_train), len(source.y_test)) == (10, 2)
    with pytest.raises(UserError, match="lacks fire"):
        load_source("fire", str(tmp_path / "fire"))


def test_a_run_by_role(tmp_path):
    """The whole way: roles are clients, and the model reads whole numbers."""
    words = "\n".join(f"He said it {k} times, and then no more." for k in range(20))
    (tmp_path / "input.txt").write_text(f"First Citizen:\n{words}\n\nSecond Citizen:\n{words}\n")
    settings = {
        "data.source": "shakespeare", "data.variant": "tiny", "data.root": str(tmp_path), "run.rounds": 2,
        "model.name": "shakespeare_lstm", "algorithm.name": "fedavg", "train.local_steps": 2, "engine.kind": "local",
        "run.output": str(tmp_path / "runs"), "train.lr": 0.5,
    }  # fmt: skip
    result = simulate(settings)
    assert result.summary["parameters"] == 133_520
    assert set(result.clients["client_name"]) == {"First Citizen", "Second Citizen"}
    assert result.metrics["train_loss"].iloc[-1] < result.metrics["train_loss"].iloc[0]
