"""Sources of image files: federated csv files, as GLDv2 and iNaturalist have them, and folders of classes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_files import SIZE, USERS, picture, split
from PIL import Image
from processes import python

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.sources.images import read_image
from fedray.data.sources.source import source_of


def settings(folder: Path, source: str = "federated_csv", **keys: object) -> dict[str, object]:
    return {
        "data.source": source, "data.root": str(folder), "data.image_size": SIZE, "algorithm.name": "fedavg",
        "model.name": "logistic", "run.rounds": 2, "engine.kind": "local", "train.batch_size": 4,
        "train.local_steps": 3, "run.output": str(folder.parent / "runs"), **keys,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("deep", [True, False])
def test_a_federated_split(deep, tmp_path):
    folder = split(tmp_path / "split", deep)
    shas = {}
    for access in ("lazy", "mapped", "memory"):
        result = simulate(settings(folder, **{"data.access": access, "run.name": access}))
        shas[access] = result.summary["model_sha256"]
        assert set(result.clients["client_name"]) == {f"u{i}" for i in range(USERS - 1)}
        assert result.metrics["test_accuracy"].notna().all()
    assert len(set(shas.values())) == 1


def test_an_image_is_what_pillow_makes_of_it(tmp_path):
    picture(tmp_path / "a.png", 3, (50, 30))
    expected = np.asarray(
        Image.open(tmp_path / "a.png").crop((10, 0, 40, 30)).resize((10, 10), Image.Resampling.BILINEAR)
    )
    # at its edges, the crop knows pixels beyond them
    np.testing.assert_allclose(read_image(tmp_path / "a.png", 10).transpose(1, 2, 0).astype(int), expected, atol=6)
    picture(tmp_path / "grey.png", 3, (10, 10), "L")
    red, green, blue = read_image(tmp_path / "grey.png", 10)
    assert (red == green).all()
    assert (red == blue).all()


def remove_an_image(folder: Path) -> None:
    next((folder / "train").rglob("*.jpg")).unlink()


def cut_an_image(folder: Path) -> None:
    for path in (folder / "train").rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:200])


def no_image(folder: Path) -> None:
    for path in (folder / "train").rglob("*.jpg"):
        path.write_text("no image")


def longer_rows(folder: Path) -> None:
    header, *lines = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join([header, *(f"{line},7" for line in lines)]))


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_an_image, r"train\.csv, line \d+: image '\w+' is in none of .*train, .*test"),
        (cut_an_image, r"\.jpg can't be read as an image: "),
        (no_image, r"\.jpg is not an image that Pillow knows"),
        (edit("train.csv", "user_id", "user"), r"train\.csv has no column 'user_id'.*'user'"),
        (edit("train.csv", "u1,001", "u1,000"), r"line 3: image '0009+' is listed before \(1 such line"),
        (
            edit("train.csv", "u1,0019999999999999,1", "u1,0019999999999999,x"),
            "line 3: class 'x' is no whole number from 0",
        ),
        (
            edit("train.csv", "u1,0019999999999999,1", "u1,0019999999999999,-1"),
            "line 3: class '-1' is no whole number",
        ),
        (
            edit("test.csv", "9,1", "9,70000"),
            r"test\.csv, line \d: class 70000 is out of range, as 4 classes occur: number them from 0",
        ),
        (edit("train.csv", "u1,001", ",001"), "line 3: user_id has nothing"),
        (edit("train.csv", "u1,001", "\n\nu1,000"), r"line 5: image '0009+' is listed before"),
        (longer_rows, r"train\.csv, line 2: there are 4 cells, and the header has 3"),
        (edit("train.csv", "u1,0019999999999999", "u1,../../0019"), r"line 3: image '\.\./\.\./0019' is in none of"),
        (lambda folder: (folder / "test.csv").unlink(), r"can't read .*test\.csv: No such file"),
        (lambda folder: (folder / "train.csv").unlink(), "lacks train.csv or federated_train.csv"),
    ],
)
def test_bad_splits(spoil, message, tmp_path):
    folder = split(tmp_path / "split")
    spoil(folder)
    with pytest.raises(UserError, match=message) as raised:
        simulate(settings(folder, **{"data.access": "mapped"}))
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache" / "fedray" / "mapped").glob("*/columns.json"))


def test_a_zip_bomb(tmp_path):
    folder = split(tmp_path / "split")
    bomb = next((folder / "train").rglob("*.jpg"))
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    with pytest.raises(UserError, match=r"\.jpg can't be read as an image: .*decompression bomb"):
        simulate(settings(folder, **{"data.access": "mapped"}))


def test_published_counts_are_checked(tmp_path):
    folder = split(tmp_path / "split")
    with pytest.raises(UserError, match="has 5 users, but gldv2 has 1,262"):
        source_of(load(settings(folder, "gldv2")).data, load({}).task)
    message = r"inaturalist is not in .*: get federated_train.csv, test.csv and the images of .* from http"
    with pytest.raises(UserError, match=message):
        simulate({"data.source": "inaturalist"})
    with pytest.raises(UserError, match=r"data.source=federated_csv needs data.image_size"):
        simulate({"data.source": "federated_csv", "data.root": str(folder)})


KILLED = """
import os, signal, sys
from pathlib import Path
import fedray.data.sources.images as images, fedray.data.storage.lazy as lazy, fedray.data.storage.mapping as mapping
from fedray import simulate
from test_image_sources import SIZE, settings

mapping.CHUNK_BYTES, lazy.HASHED, real, read = 2 * 3 * SIZE * SIZE, 4, images.read_image, []

def dying(path, size):
    read.append(path)
    if len(read) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, size)

images.read_image = dying
simulate(settings(Path(sys.argv[1]), **{"data.access": "mapped"}))
"""


def test_preparing_goes_on_after_sigkill(tmp_path, monkeypatch):
    monkeypatch.setattr("fedray.data.storage.mapping.CHUNK_BYTES", 2 * 3 * SIZE * SIZE)
    monkeypatch.setattr("fedray.data.storage.lazy.HASHED", 4)
    folder = split(tmp_path / "split")
    assert python(KILLED, str(folder)).returncode == -signal.SIGKILL
    (staging,) = (tmp_path / "cache" / "fedray" / "mapped").glob("*.partial")
    assert 0 < len((staging / "x.done").read_text().split()) < 25
    mapped = simulate(settings(folder, **{"data.access": "mapped", "run.name": "mapped"}))
    lazy = simulate(settings(folder, **{"run.name": "lazy"}))
    assert mapped.summary["model_sha256"] == lazy.summary["model_sha256"]
    assert not staging.exists()


def test_a_folder_of_classes(tmp_path, capsys):
    folder = tmp_path / "classes"
    for i in range(40):
        picture(folder / ["cat", "dog", "hen"][i % 3] / f"{i:02}.png", i)
    keys = settings(folder, "image_folder", **{"data.clients": 4, "data.partition.kind": "iid"})
    result = simulate(keys, verbose=True)
    assert result.summary["class_names"] == ["cat", "dog", "hen"]
    assert "of each class, every fifth image is a test image" in capsys.readouterr().out
    divided = tmp_path / "divided"
    for i in range(40):
        picture(divided / ("val" if i % 4 == 3 else "train") / ["cat", "dog"][i % 2] / "deep" / f"{i:02}.png", i)
    found = source_of(load(settings(divided, "image_folder")).data, load({}).task)
    assert (len(found.y_train), len(found.y_test), found.class_names) == (30, 10, ("cat", "dog"))
    (divided / "val" / "cow").mkdir()
    picture(divided / "val" / "cow" / "1.png", 1)
    with pytest.raises(UserError, match=r"has class 'cow', which .*train does not have"):
        source_of(load(settings(divided, "image_folder")).data, load({}).task)


def test_the_real_split_of_camera_traps():
    folder = Path(os.environ.get("FEDRAY_DATA") or "/nowhere") / "iwildcam"
    if not folder.exists():
        pytest.skip("$FEDRAY_DATA has no iwildcam")
    config = load(settings(folder, **{"data.image_size": 64}))
    source = source_of(config.data, config.task)
    assert (len(source.y_train), len(source.y_test), source.classes) == (3265, 1093, 62)
    assert source.client_train is not None
    sizes = np.bincount(source.client_train)
    assert (len(sizes), sizes.min(), sizes.max(), int(np.median(sizes))) == (40, 50, 169, 69)
    # as the first lines of train.csv and test.csv have them
    assert (source.y_train[:4].tolist(), source.y_test[:4].tolist()) == ([3, 0, 3, 28], [3, 3, 28, 3])
    assert source.x_train.chosen(np.array([0, 3264])).shape == (2, 3, 64, 64)


def test_another_image_makes_another_cache(tmp_path, monkeypatch):
    """Also one that is not among those whose content is compared."""
    monkeypatch.setattr("fedray.data.storage.lazy.HASHED", 4)
    folder = split(tmp_path / "split")
    keys = settings(folder, **{"data.access": "mapped"})
    simulate(keys)
    picture(sorted((folder / "train").rglob("*.jpg"))[-2], 7, (90, 70))
    with pytest.raises(UserError, match=r"holds another run \(training data differs"):
        simulate(keys)
    again = simulate({**keys, "run.name": "again"})
    lazy = simulate({**keys, "run.name": "lazy", "data.access": "lazy"})
    assert again.summary["model_sha256"] == lazy.summary["model_sha256"]
