"""Which files of a folder of classes are taken, what is said of the others, and what a picture's pixels become."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedray import UserError, simulate
from fedray.data.sources.federated_csv import federated_csv
from fedray.data.sources.image_folder import class_folders, image_folder
from fedray.data.sources.images import SUFFIXES, decode_image, read_image
from fedray.data.sources.source import Source

GREY = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
DEEP = GREY.astype(np.uint16)


def save(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((16, 16, 3), value, np.uint8)).save(path)


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        save(root / name)
    return root


def read(root: Path) -> Source:
    return image_folder(str(root), 16)


def shape(source: Source) -> tuple[tuple[str, ...] | None, list[int], list[int]]:
    return source.class_names, np.bincount(source.y_train).tolist(), np.bincount(source.y_test).tolist()


FIVE = [f"cat/{i}.png" for i in range(5)]
TEN = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(5)]


@pytest.mark.parametrize(
    "suffix", [each for pair in zip(SUFFIXES, map(str.upper, SUFFIXES), strict=True) for each in pair]
)
def test_every_ending_in_small_and_capital_letters(suffix, tmp_path):
    source = read(folder_of(tmp_path, *FIVE, *(f"dog/{i}{suffix}" for i in range(5))))
    assert shape(source) == (("cat", "dog"), [4, 4], [1, 1])
    assert source.x_train.chosen(np.arange(8)).shape == (8, 3, 16, 16)


PARTS = [("train", "test"), ("Train", "Test"), ("TRAIN", "VAL"), ("Training", "Testing"), ("train", "valid")]


@pytest.mark.parametrize(("train", "test"), PARTS)
def test_test_images_are_never_trained_on(train, test, tmp_path):
    names = [f"{part}/{name}/1.png" for part in (train, test) for name in ("cat", "dog")]
    assert shape(read(folder_of(tmp_path, *names))) == (("cat", "dog"), [1, 1], [1, 1])


def test_a_training_set_alone(tmp_path):
    source = read(folder_of(tmp_path, *(f"Train/{name}/{i}.png" for name in ("cat", "dog") for i in range(5))))
    assert shape(source) == (("cat", "dog"), [4, 4], [1, 1])
    vehicles = read(
        folder_of(tmp_path / "vehicles", *(f"{name}/{i}.png" for name in ("bus", "train") for i in range(5)))
    )
    assert shape(vehicles) == (("bus", "train"), [4, 4], [1, 1])


def test_links_are_followed(tmp_path):
    elsewhere = folder_of(tmp_path / "elsewhere", *(f"{i}.png" for i in range(5)))
    root = folder_of(tmp_path / "root", *FIVE)
    (root / "dog").symlink_to(elsewhere)
    (root / "eel").mkdir()
    (root / "eel" / "deep").symlink_to(elsewhere)
    (root / "fox").mkdir()
    for i in range(5):
        (root / "fox" / f"{i}.png").symlink_to(elsewhere / f"{i}.png")
    assert shape(read(root)) == (("cat", "dog", "eel", "fox"), [4, 4, 4, 4], [1, 1, 1, 1])


def spoil_loop(root: Path) -> None:
    (root / "cat" / "again").symlink_to(root / "cat")


def spoil_link(root: Path) -> None:
    (root / "dog").symlink_to(root / "nowhere")


def spoil_class(root: Path) -> None:
    (root / "dog").mkdir()
    for i in range(3):
        (root / "dog" / f"{i}.heic").write_text("")


def spoil_test_class(root: Path) -> None:
    folder_of(root, "train/cat/1.png", "test/cat/1.png")
    (root / "test" / "dog").mkdir()


def spoil_names(root: Path) -> None:
    folder_of(root, "Test/cat/1.png", "test/cat/1.png")


def spoil_train(root: Path) -> None:
    folder_of(root, "test/cat/1.png")


def spoil_file_name(root: Path) -> None:
    os.rename(root / "cat" / "1.png", os.fsencode(root) + b"/cat/\xff.png")


def spoil_class_name(root: Path) -> None:
    os.rename(root / "cat", os.fsencode(root) + b"/\xe9t\xe9")


def spoil_one_level(root: Path) -> None:
    folder_of(root, *(f"pics/{part}/{name}/1.png" for part in ("Train", "val") for name in ("cat", "dog")))


def spoil_two_levels(root: Path) -> None:
    folder_of(root, *(f"train/my/pics/{part}/cat/1.png" for part in ("train", "test")), "test/my/1.png")


def spoil_divided_class(root: Path) -> None:
    folder_of(root, "cat/train/1.png", "cat/test/1.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_loop, r"cat/again is a link to a folder in which it lies: remove it"),
        (spoil_link, r"dog is a link to .*nowhere, which is not there"),
        (
            spoil_class,
            r"dog would be a class without images, as it has only 3 \.heic: move it away, or convert its files",
        ),
        (spoil_test_class, r"test/dog would be a class without images, as it has no files"),
        (spoil_names, r"has the folders Test and test: keep one of them"),
        (spoil_train, r"has a folder test, but none called train"),
        (spoil_file_name, r"cat/\\xff\.png' has a name that is not UTF-8, which can't be shown: rename it"),
        (spoil_class_name, r"\\xe9t\\xe9' has a name that is not UTF-8"),
        (
            spoil_one_level,
            r"/pics would be a part of the class pics, but has the folders Train and val, as a set has: set "
            r"data.root=\S*/pics to use that set; if it is a class, put its images into train/pics and test/pics",
        ),
        (spoil_two_levels, r"train/my/pics would be a part of the class my, but has the folders train and test"),
        (spoil_divided_class, r"/cat would be a part of the class cat, but has the folders train and test"),
    ],
)
def test_what_is_refused(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    root = folder_of(tmp_path, *FIVE)
    spoil(root)
    with pytest.raises(UserError, match=message) as refused:
        read(root)
    assert "\n" not in str(refused.value)


DIVIDED = " has no folder test: of each class, every fifth image is a test image"


def warned(source: Source) -> list[str]:
    """The warnings, but for that of a folder without a part for tests."""
    return [note for note in source.notes if note.startswith("warning: ") and not note.endswith(DIVIDED)]


def test_what_is_not_taken_is_counted(tmp_path):
    root = folder_of(tmp_path, *TEN, "cat/.ipynb_checkpoints/0.png", ".ipynb_checkpoints/1.png", "cat/._0.png", "2.png")
    for name in ("cat/a.txt", "cat/b.TXT", "cat/c.heic", "cat/deep/LICENSE", "cat/.DS_Store", "README.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    source = read(root)
    assert shape(source) == (("cat", "dog"), [4, 4], [1, 1])
    (line,) = warned(source)
    kinds = {
        "2 .txt", "1 .heic", "1 without an ending", "1 hidden", "2 hidden folders with images",
        "1 beside the folders of classes",
    }  # fmt: skip
    listed, rest = line.removeprefix(f"warning: {root}: not taken for images: ").split("; the first is ")
    named = listed.removesuffix(" and 1 others").split(", ")
    assert (set(named) < kinds, len(named), listed.endswith(" and 1 others")) == (True, 5, True)
    assert (root / rest).exists()


def test_nothing_more_is_said_where_all_is_taken(tmp_path):
    root = folder_of(tmp_path, *TEN)
    (root / "cat" / ".DS_Store").write_text("")
    (root / "labels.csv").write_text("")
    source = read(root)
    assert warned(source) == []
    assert f"warning: {root}{DIVIDED}" in source.notes


@pytest.mark.parametrize(("others", "said"), [(["val"], "val is"), (["val", "__MACOSX"], "__MACOSX, val are")])
def test_folders_beside_the_parts_are_named(others, said, tmp_path):
    """One of them may have train and test in it, as it is not read."""
    names = [f"{part}/{name}/1.png" for part in ("train", "test") for name in ("cat", "dog")]
    source = read(folder_of(tmp_path, *names, *(f"{other}/{name}" for other in others for name in names)))
    assert warned(source) == [
        f"warning: {tmp_path}: {said} not read: train and test are the sets to train on and to test on"
    ]


def test_a_pipe_is_not_waited_for(tmp_path):
    root = folder_of(tmp_path, *TEN)
    os.mkfifo(root / "cat" / "pipe.png")
    # so that the test fails, and does not wait, if it is taken
    assert [each.path.name for each in class_folders(root).left_out] == ["pipe.png"]
    source = read(root)
    assert shape(source) == (("cat", "dog"), [4, 4], [1, 1])
    (line,) = warned(source)
    assert line.endswith("not taken for images: 1 pipes or devices; the first is cat/pipe.png")
    (root / "eel").mkdir()
    os.mkfifo(root / "eel" / "pipe.png")
    with pytest.raises(UserError, match="eel would be a class without images, as it has only 1 pipes or devices"):
        class_folders(root)


@pytest.mark.parametrize("above", ["pics", "train/pics"])
def test_one_class_is_suspected(above, tmp_path):
    (line,) = warned(read(folder_of(tmp_path, *(f"{above}/{name}" for name in TEN))))
    assert line.startswith(
        f"warning: {(tmp_path / above).parent} has one class, pics, so that every answer is right; if"
    )
    parts = folder_of(tmp_path / "parts", *(f"{part}/pics/{name}" for part in ("train", "test") for name in TEN))
    assert f"warning: {parts / 'train'} has one class, pics" in warned(read(parts))[0]


def test_parts_of_other_names_are_suspected(tmp_path):
    names = [f"seg_{part}/{name}/{i}.png" for part in ("train", "test") for name in ("cat", "dog") for i in range(5)]
    (line,) = warned(read(folder_of(tmp_path, *names)))
    assert line.startswith("warning: seg_test, seg_train are taken for classes, but all have the folders cat, dog; if")


def deep(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # older versions of Pillow write such .pgm files from 32 bits alone
    Image.fromarray(values.astype(np.int32 if path.suffix == ".pgm" else np.uint16)).save(path)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm", ".jp2"])
def test_pictures_of_16_bits_have_their_grey_values(suffix, tmp_path):
    """They were white. A picture that was 8 bits before it was stored as 16 is the same again."""
    deep(tmp_path / f"a{suffix}", DEEP * 257)
    Image.fromarray(GREY).save(tmp_path / "b.png")
    assert (read_image(tmp_path / f"a{suffix}", 16) == read_image(tmp_path / "b.png", 16)).all()
    deep(tmp_path / f"c{suffix}", DEEP * 256 + 200)
    assert (decode_image(tmp_path / f"c{suffix}", "c", None)[0] == GREY).all()


def test_all_sources_of_pictures_decode_alike(tmp_path):
    datasets = pytest.importorskip("datasets")
    values = DEEP * 257
    for i in range(5):
        deep(tmp_path / "folders" / "cat" / f"{i}.PNG", values)
        deep(tmp_path / "csv" / "train" / f"{i}.TIF", values)
    (tmp_path / "csv" / "train.csv").write_text("user_id,image_id,class\nann,0,0\nbob,1,0\n")
    (tmp_path / "csv" / "test.csv").write_text("image_id,class\n2,0\n")
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 2, "label": [0, 1]}
    table = datasets.Dataset.from_dict(
        rows, datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    )
    from fedray.data.sources.user_data import user_source

    for source in (
        read(tmp_path / "folders"),
        federated_csv(str(tmp_path / "csv"), 16),
        user_source(table, table),
    ):
        assert (source.x_train.chosen(np.array([0]))[0] == GREY).all()


def test_dark_pictures_of_16_bits_are_told(tmp_path):
    for i in range(5):
        for name in ("cat", "dog"):
            deep(tmp_path / "bright" / name / f"{i}.png", DEEP * 257)
            deep(tmp_path / "dark" / name / f"{i}.png", DEEP * 16)
    (line,) = [note for note in read(tmp_path / "bright").notes if "16 bits" in note]
    assert line.startswith("images of 16 bits, such as")
    (line,) = warned(read(tmp_path / "dark"))
    assert "the largest value is 4080, so that they become dark: multiply them by 16" in line


def pages(path: Path, sizes: list[int], mode: str = "L") -> None:
    first, *others = (Image.new(mode, (size, size), 100) for size in sizes)
    first.save(path, save_all=True, append_images=others)


def test_pictures_of_which_only_a_part_could_be_read(tmp_path):
    pages(tmp_path / "pages.tif", [16, 16, 16])
    with pytest.raises(UserError, match=r"pages.tif has several pages, of which only one could be read"):
        read_image(tmp_path / "pages.tif", 16)
    pages(tmp_path / "preview.tif", [16, 4])
    assert (read_image(tmp_path / "preview.tif", 16) == 100).all()
    pages(tmp_path / "moving.gif", [16, 16])
    assert read_image(tmp_path / "moving.gif", 16).shape == (3, 16, 16)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(kind, tmp_path):
    Image.fromarray(GREY.astype(kind)).save(tmp_path / "bytes.tif")
    assert (read_image(tmp_path / "bytes.tif", 16)[0] == GREY).all()
    for change in (200, -3):
        Image.fromarray(GREY.astype(kind) + kind(change)).save(tmp_path / "a.tif")
        with pytest.raises(
            UserError, match=r"a.tif has pixels of 32 bits that are not 0, 1, ..., 255, of which nobody"
        ):
            read_image(tmp_path / "a.tif", 16)


def test_the_lines_are_shown(tmp_path, capsys):
    root = folder_of(tmp_path / "root", *(f"{name}/{i}.png" for name in ("cat", "dog") for i in range(10)))
    (root / "cat" / "a.heic").write_text("")
    settings = {
        "data.source": "image_folder", "data.root": str(root), "data.image_size": 16, "algorithm.name": "fedavg",
        "model.name": "logistic", "run.rounds": 1, "engine.kind": "local", "train.local_steps": 1, "data.clients": 2,
        "data.partition.kind": "iid", "run.output": str(tmp_path / "runs"),
    }  # fmt: skip
    simulate(settings, verbose=True)
    assert f"not taken for images: 1 .heic; the first is {os.path.join('cat', 'a.heic')}" in capsys.readouterr().out
