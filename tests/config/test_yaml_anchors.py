"""Anchors and merge keys of YAML in the files that fedray reads: configs, spaces and suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedray import UserError
from fedray.config import load, read_file
from fedray.tuning.spec import read_sweeps
from fedray.tuning.suite import read_suite


def written(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def test_a_config(tmp_path: Path) -> None:
    config = load(
        written(
            tmp_path,
            "x-slow: &slow {lr: 0.01, momentum: 0.5}\n"
            "x-slower: &slower\n  <<: *slow\n  lr: 0.001\n"
            "x-none:\n"
            "train:\n  <<: *slower\n  batch_size: 8\n",
        )
    )
    assert (config.train.lr, config.train.momentum, config.train.batch_size) == (0.001, 0.5, 8)


def test_what_is_merged_is_replaced_in_either_form(tmp_path: Path) -> None:
    text = "x-a: &a {train.lr: 0.1, train.batch_size: 8}\n<<: *a\ntrain: {lr: 0.2}\n"
    config = load(written(tmp_path, text))
    assert (config.train.lr, config.train.batch_size) == (0.2, 8)
    with pytest.raises(UserError, match=r"says train\.lr twice"):
        load(written(tmp_path, text + "train.lr: 0.3\n"))


def test_merged_before_it_is_made(tmp_path: Path) -> None:
    """What is merged into a section that is itself merged elsewhere is not taken for a key given twice."""
    path = written(
        tmp_path,
        "x-a: &a {lr: 0.1}\nx-b: {inner: {train: &t {<<: *a, lr: 0.2}}}\nx-c: {<<: *t, momentum: 0.3}\ntrain: *t\n",
    )
    assert load(path).train.lr == 0.2
    several = written(tmp_path, "x-a: &a {lr: 0.1}\nx-b: &b {lr: 0.2, momentum: 0.4}\ntrain: {<<: [*a, *b]}\n")
    assert (load(several).train.lr, load(several).train.momentum) == (0.1, 0.4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x-a: &a {lr: 0.1, lr: 0.2}\ntrain: *a\n", "key 'lr' is given twice"),
        ("x-a: &a {lr: 0.1}\ntrain: {<<: *a, <<: *a}\n", "key '<<' is given twice"),
        ("x-a: 1\nx-a: 2\n", "key 'x-a' is given twice"),
        ("train: {x-lr: 0.1}\n", "unknown key train.x-lr"),
        ("train: {<<: 3}\n", "is not valid YAML"),
        ("train: *a\n", "is not valid YAML"),
        ("xa: &a {lr: 0.1}\n", "unknown key xa"),
    ],
)
def test_what_is_still_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        load(written(tmp_path, text))
    assert words in str(caught.value)


def test_a_space(tmp_path: Path) -> None:
    (spec,) = read_sweeps(
        written(
            tmp_path,
            "x-lr: &lr {loguniform: [0.001, 1]}\n"
            "x-base: &base {algorithm.name: fedavg, run.rounds: 3}\n"
            "base: {<<: *base, data.clients: 4}\n"
            "spaces: {wide: {train.lr: *lr}}\n",
        )
    )
    assert dict(spec.base) == {"algorithm.name": "fedavg", "run.rounds": 3, "data.clients": 4}
    assert dict(spec.raw_space) == {"train.lr": {"loguniform": [0.001, 1]}}


def test_a_suite(tmp_path: Path) -> None:
    suite = read_suite(
        written(
            tmp_path,
            "x-base: &base {data.source: sample, run.rounds: 3}\n"
            "base: {<<: *base, data.clients: 4}\n"
            "space: {train.lr: {uniform: [0.01, 0.1]}}\nalgorithms: [fedavg]\n",
        )
    )
    assert suite.specs[0].base["run.rounds"] == 3


def test_what_is_read_has_no_anchors_left(tmp_path: Path) -> None:
    assert read_file(written(tmp_path, "x-a: 1\ntrain: {lr: 1}\n")) == {"train": {"lr": 1}}
