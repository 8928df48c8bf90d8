"""CIFAR-10: the real files in both layouts, and what damaged, wrong and malicious ones lead to."""

import contextlib
import os
import pickle
import struct
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cifar_files import published, text, write

from fedray.cli.main import main
from fedray.data.sources.cifar import TEN, read_batch
from fedray.data.sources.source import load_source
from fedray.data.storage.contents import of_arrays, source_digests
from fedray.errors import UserError


def refused(message):
    return pytest.raises(UserError, match=message)


@pytest.fixture(params=[TEN.binary, TEN.python])
def layout(request):
    return request.param


def test_real_files():
    place = os.environ.get("FEDRAY_DATA")
    if not place:
        pytest.skip("FEDRAY_DATA is not set: no folder with the real data sets")
    if not (Path(place) / TEN.binary).is_dir():
        pytest.skip(f"$FEDRAY_DATA has no {TEN.binary}")
    source = load_source("cifar10")
    assert (source.name, source.classes) == ("cifar10", 10)
    assert (source.x_train.dtype, source.y_train.dtype) == (np.uint8, np.int64)
    assert source.x_train.shape == (50000, 3, 32, 32)
    assert source.x_test.shape == (10000, 3, 32, 32)
    assert source.y_train[:6].tolist() == [6, 9, 9, 4, 1, 1]
    assert np.bincount(source.y_train).tolist() == [5000] * 10
    assert np.bincount(source.y_test).tolist() == [1000] * 10
    for channel in range(3):
        share = np.bincount(source.x_train[:, channel].ravel(), minlength=256) / (50000 * 32 * 32)
        values = np.arange(256) * source.scale[channel] + source.shift[channel]
        mean = share @ values
        assert abs(mean) < 1e-3
        assert abs(np.sqrt(share @ (values - mean) ** 2) - 1) < 1e-3
    x, y = np.concatenate([source.x_train, source.x_test]), np.concatenate([source.y_train, source.y_test])
    cut = [slice(start, start + 10000) for start in range(0, 60000, 10000)]
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep the 180 MB
        write(Path(folder), {part: (x[rows], y[rows]) for part, rows in zip(TEN.parts, cut, strict=True)}, TEN.python)
        pickled = load_source("cifar10", folder)
    for name in ("x_train", "y_train", "x_test", "y_test", "scale", "shift"):
        assert np.array_equal(getattr(source, name), getattr(pickled, name)), name


def test_both_layouts_hold_what_was_written(batches, layout, tmp_path):
    write(tmp_path, batches, layout)
    source = load_source("cifar10", str(tmp_path))
    train = [batches[part] for part in TEN.parts[:5]]
    assert np.array_equal(source.x_train, np.concatenate([x for x, _ in train]))
    assert np.array_equal(source.y_train, np.concatenate([y for _, y in train]))
    assert np.array_equal(source.x_test, batches["test_batch"][0])
    assert (source.x_test.dtype, source.y_test.dtype, source.scale.dtype) == (np.uint8, np.int64, np.float32)


def test_pickle_agrees_on_what_was_written(batches):
    """So ``published`` makes real pickles, of real arrays."""
    x, y = batches["data_batch_1"]
    batch = pickle.loads(published(x, y), encoding="bytes")
    assert np.array_equal(batch[b"data"], x.reshape(20, 3072))
    assert batch[b"labels"] == y.tolist()
    assert batch[b"filenames"][19] == b"leptodactylus_s_000019.png"


def test_files_are_found_below_root(batches, layout, tmp_path):
    write(tmp_path / layout, batches, layout)
    assert len(load_source("cifar10", str(tmp_path)).y_train) == 66


def test_whole_layout_goes_before_an_incomplete_one(batches, tmp_path):
    write(tmp_path / TEN.binary, batches, TEN.binary)
    write(tmp_path / TEN.python, batches, TEN.python)
    (tmp_path / TEN.binary / "data_batch_5.bin").unlink()
    assert len(load_source("cifar10", str(tmp_path)).y_train) == 66
    (tmp_path / TEN.python / "data_batch_1").unlink()
    (tmp_path / TEN.python / "test_batch").unlink()
    with refused(f"data.root=.* lacks data_batch_5.bin .its companions are in .*{TEN.binary}.$"):
        load_source("cifar10", str(tmp_path))


def test_root_without_files_is_not_passed_over(batches, tmp_path, monkeypatch):
    write(tmp_path, batches, TEN.binary)
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with refused(f"data.root=.*empty lacks data_batch_1.bin or data_batch_1 .*{TEN.binary} or {TEN.python}"):
        load_source("cifar10", str(tmp_path / "empty"))
    with refused("nowhere is not a folder"):
        load_source("cifar10", str(tmp_path / "nowhere"))


def test_fedray_data_comes_first_and_the_cache_later(batches, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "cache/fedray" / layout, batches, layout)
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path / "mine"))
    assert len(load_source("cifar10").y_train) == 66
    write(tmp_path / "mine", dict.fromkeys(TEN.parts, batches["test_batch"]), layout)
    assert len(load_source("cifar10").y_train) == 45


def test_no_files_and_no_network(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    def offline(*arguments, **named):
        raise RuntimeError("Error downloading\n cifar")

    monkeypatch.setattr(utils, "download_and_extract_archive", offline)
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refused(
        r"cifar10 is not in .*mine, .*cache/fedray and .* get the files data_batch_1.bin, .*data.root or"
    ) as raised:
        load_source("cifar10")
    assert "\n" not in str(raised.value)


def test_a_download_is_moved_into_the_cache_whole(batches, tmp_path, monkeypatch):
    from torchvision.datasets import utils

    def download(url, root, filename, md5):
        assert url.endswith(filename)
        assert len(md5) == 32
        (Path(root) / filename).write_bytes(b"the archive")
        write(Path(root) / TEN.python, batches, TEN.python)

    monkeypatch.setattr(utils, "download_and_extract_archive", download)
    monkeypatch.delenv("FEDRAY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(load_source("cifar10").y_train) == 66
    assert [path.name for path in (tmp_path / "cache/fedray").iterdir()] == [TEN.python]


def test_datasets_lists_it(capsys):
    assert main(["datasets"]) == 0
    listed = capsys.readouterr().out
    assert "cifar10" in listed
    assert "Krizhevsky 2009" in listed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "is damaged or no batch of CIFAR-10 .*3073"),
        (lambda content: content + b"\0", "is damaged or no batch of CIFAR-10 .*3073"),
        (lambda content: b"", "is damaged or no batch of CIFAR-10 .it has no images"),
        (lambda content: b"<html>404</html>", "is damaged or no batch of CIFAR-10"),
        (lambda content: content[:6146] + b"\x0a" + content[6147:], "has label 10 in row 2; labels must be 0..9"),
    ],
)
def test_damaged_binary_files_are_named(batches, damage, message, tmp_path):
    write(tmp_path, batches, TEN.binary)
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(damage(path.read_bytes()))
    with refused(f"data_batch_1.bin {message}") as raised:
        load_source("cifar10", str(tmp_path))
    assert "\n" not in str(raised.value)


def test_unreadable_files_are_named(tmp_path):
    with refused("can't read .*data_batch_1.bin: No such file"):
        read_batch(TEN, tmp_path / "data_batch_1.bin")


def changed(old, new, content):
    assert content.count(old) == 1
    return content.replace(old, new)


NO_ARRAY = "its data are no numpy array of bytes by rows"
UNEQUAL = "its images are not equally many as its labels"
PICKLES = {
    "no data": (partial(changed, b"U\x04data", b"U\x04dada"), "it is no dict of data, labels"),
    "no labels": (partial(changed, b"U\x06labels", b"U\x06labelz"), "it is no dict of data, labels"),
    "a list": (lambda content: b"\x80\x02]q\x01.", "it is no dict of data, labels"),
    "float32": (partial(changed, b"U\x02u1", b"U\x02f4"), NO_ARRAY),
    "objects": (partial(changed, b"U\x02u1", b"U\x02O8"), NO_ARRAY),
    "by columns": (partial(changed, b"tb\x89T", b"tb\x88T"), NO_ARRAY),
    "by columns, in numbers": (
        partial(changed, b"tb\x89T", b"tb\x4b\x01T"),
        NO_ARRAY,
    ),
    "wide": (partial(changed, b"M\x00\x0c\x86", b"M\x01\x0c\x86"), UNEQUAL),
    "flat": (partial(changed, b"K\x14M\x00\x0c\x86", b"M\x00\xf0\x85"), NO_ARRAY),
    "negative": (partial(changed, b"K\x14M\x00\x0c\x86", b"J\xff\xff\xff\xffM\x00\x0c\x86"), UNEQUAL),
    "shape of no numbers": (partial(changed, b"K\x14M\x00\x0c\x86", b"N"), NO_ARRAY),
    "more labels": (partial(changed, b"]q\x05(", b"]q\x05(K\x01"), UNEQUAL),
    "more rows": (partial(changed, b"K\x14M\x00\x0c\x86", b"K\x15M\x00\x0c\x86"), UNEQUAL),
    "more bytes": (partial(changed, b"T\x00\xf0\0\0", b"T\x01\xf0\0\0\0"), "cannot reshape array"),
    "label 10": (partial(changed, b"]q\x05(K\x00K\x01", b"]q\x05(K\x00K\x0a"), "has label 10 in row 1; .* 0..9"),
    "label -1": (partial(changed, b"]q\x05(K\x00", b"]q\x05(J\xff\xff\xff\xff"), "has label -1 in row 0"),
    "label of letters": (partial(changed, b"]q\x05(K\x00", b"]q\x05(U\x03cat"), "has label b'cat' in row 0"),
    "labels in a dict": (partial(changed, b"]q\x05(", b"]q\x05}("), "is damaged or no batch"),
    "labels of another kind": (
        partial(changed, b"U\x06labelsq\x04", b"U\x06labelsK\x01U\x02no"),
        UNEQUAL,
    ),
    "no array": (partial(changed, b"U\x04dataq\x06", b"U\x04dataq\x06NU\x03was"), NO_ARRAY),
    "truncated": (lambda content: content[:-1000], "is damaged or no batch of CIFAR-10"),
    "truncated pixels": (lambda content: content[:20000], "pickle data was truncated.; get the file again"),
    "extra": (lambda content: content + b"\0", "it has extra bytes at its end"),
    "html": (lambda content: b"<!DOCTYPE html><title>404</title>", "is damaged or no batch .*invalid load key, '<'"),
    "empty": (lambda content: b"", "is damaged or no batch"),
    "no stack": (lambda content: b"\x80\x02b.", "is damaged or no batch"),
    "Python 3's": (lambda content: pickle.dumps({"data": 0}), "it is no dict of data, labels"),
}


@pytest.mark.parametrize(("damage", "message"), PICKLES.values(), ids=PICKLES.keys())
def test_wrong_pickles_are_named(batches, damage, message, tmp_path):
    write(tmp_path, batches, TEN.python)
    path = tmp_path / "data_batch_1"
    path.write_bytes(damage(path.read_bytes()))
    with refused(f"data_batch_1:? .*{message}") as raised:
        load_source("cifar10", str(tmp_path))
    assert "\n" not in str(raised.value)


def test_any_damage_is_a_users_error(tmp_path):
    rng = np.random.Generator(np.random.Philox(3))
    whole = np.frombuffer(published(np.zeros((2, 3, 32, 32), np.uint8), np.arange(2)), np.uint8)
    outside = np.flatnonzero(whole)  # pixels are zeros
    path = tmp_path / "test_batch"
    refusals = []
    for _ in range(500):
        content = whole.copy()
        content[rng.choice(outside, 2)] = rng.integers(0, 256, 2)
        path.write_bytes(content.tobytes())
        try:
            x, y = read_batch(TEN, path)
        except UserError as error:
            refusals.append(str(error))
        else:
            assert x.shape == (2, 3, 32, 32)
            assert len(y) == 2
    assert len(refusals) > 100
    assert not any("\n" in message for message in refusals)


class Doing:
    """Pickled as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def unicode(value):
    return b"X" + struct.pack("<i", len(value)) + value


CODE = b"open('done', 'w').close()"
SYSTEM = b"cposix\nsystem\nU\x0atouch done\x85R"
SMALL = published(np.zeros((2, 3, 32, 32), np.uint8), np.arange(2))
OBJECTS = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01\x85"
    b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb\x89]"
)
EVIL = {
    "os.system": (pickle.dumps(Doing(os.system, ("touch done",)), 0), "names 'posix.system'"),
    "os.system, protocol 2": (pickle.dumps(Doing(os.system, ("touch done",)), 2), "names 'posix.system'"),
    "os.system, newest": (pickle.dumps(Doing(os.system, ("touch done",))), "names 'posix.system'"),
    "eval": (pickle.dumps(Doing(eval, (CODE,)), 2), "names '__builtin__.eval'"),
    "exec of Python 2": (b"\x80\x02c__builtin__\nexec\n" + text(CODE) + b"\x85R.", "names '__builtin__.exec'"),
    "a chain of getattr": (
        b"\x80\x02cbuiltins\ngetattr\ncbuiltins\n__import__\n"
        + b"".join([unicode(b"os"), b"\x85R", unicode(b"system"), b"\x86R", unicode(b"touch done"), b"\x85R."]),
        "names 'builtins.getattr'",
    ),
    "a dotted name": (
        b"\x80\x04" + unicode(b"tempfile") + unicode(b"_os.system") + b"\x93" + text(b"touch done") + b"\x85R.",
        "names 'tempfile._os.system'",
    ),
    "INST": (b"(S'touch done'\niposix\nsystem\n.", "names 'posix.system'"),
    "OBJ": (b"\x80\x02(cposix\nsystem\n" + text(b"touch done") + b"o.", "names 'posix.system'"),
    "in an array of objects": (OBJECTS + SYSTEM + b"atb.", "names 'posix.system'"),
    "in the labels": (changed(b"]q\x05(K\x00", b"]q\x05(" + SYSTEM, SMALL), "names 'posix.system'"),
    "in a field that is not used": (changed(b"]q\r(", b"]q\r(" + SYSTEM, SMALL), "names 'posix.system'"),
    "after the end of a right batch": (SMALL[:-1] + b"0" + SYSTEM + b".", "names 'posix.system'"),
}


@pytest.mark.parametrize(("content", "message"), EVIL.values(), ids=EVIL.keys())
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_malicious_pickles_do_nothing(content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tmp_path / "done"
    with contextlib.suppress(Exception):
        pickle.loads(content, encoding="bytes")
    assert done.exists(), "no attack at all"
    done.unlink()
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    with refused(f"test_batch is damaged or no batch of CIFAR-10 .*{message}") as raised:
        read_batch(TEN, path)
    assert "\n" not in str(raised.value)
    assert not done.exists()


def test_cifar100_in_both_layouts(tmp_path):
    rng = np.random.default_rng(0)
    x, fine = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8), np.array([0, 99, 5, 7, 5, 5])
    coarse = np.array([19, 0, 3, 4, 3, 3])
    of_images = np.concatenate([np.array([coarse, fine], np.uint8).T, x.reshape(6, -1)], axis=1)
    (tmp_path / "train.bin").write_bytes(of_images.tobytes())
    (tmp_path / "test.bin").write_bytes(of_images[:2].tobytes())
    source = load_source("cifar100", str(tmp_path))
    assert (source.y_train.tolist(), source.classes) == (fine.tolist(), 100)
    assert np.array_equal(source.x_train, x)
    groups = load_source("cifar100", str(tmp_path), variant="coarse")
    assert (groups.y_train.tolist(), groups.classes) == (coarse.tolist(), 20)
    assert not np.array_equal(load_source("cifar100", str(tmp_path), "ghbm").scale, source.scale)
    # the digests that are kept are those of each one's labels
    assert [source_digests(each) for each in (source, groups, source)] == list(map(of_arrays, (source, groups, source)))
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for part, rows in (("train", 6), ("test", 2)):
        (tmp_path / f"{part}.bin").unlink()
        labels = {"fine_labels": fine[:rows], "coarse_labels": coarse[:rows]}
        (folder / part).write_bytes(published(x[:rows], fine[:rows], **labels))
    again = load_source("cifar100", str(tmp_path))
    assert np.array_equal(again.x_train, x)
    assert again.y_test.tolist() == fine[:2].tolist()
    for coarse_labels, message in (
        (coarse[:4], "not equally many as its labels"),
        (np.array([1, 2, 20, 3, 3, 3]), r"has label 20 in row 2; labels must be 0..19"),
    ):
        (folder / "train").write_bytes(published(x, fine, fine_labels=fine, coarse_labels=coarse_labels))
        with refused(message):
            load_source("cifar100", str(tmp_path))
    (folder / "train").write_bytes(published(x, fine))
    with refused("no batch of CIFAR-100 .it is no dict of data, coarse_labels and fine_labels"):
        load_source("cifar100", str(tmp_path))
