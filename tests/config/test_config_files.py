"""Config files that extend others, and what they say for single algorithms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedray import UserError
from fedray.cli.main import main
from fedray.cli.settings import load_settings, split
from fedray.config import flat, load
from fedray.config.files import merged
from fedray.experiment.resolve import resolve

BASE = """
data: {source: sample, clients: 4, partition.alpha: 0.2}
train: {lr: 0.1, momentum: 0.9}
for_algorithm:
  fedtrip: {algorithm.mu: 0.4}
  slowmo: {train.momentum: 0, algorithm: {beta: 0.7}}
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.yaml").write_text(BASE)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: bases/base.yaml\nalgorithm.name: fedtrip\ndata.partition.kind: dirichlet_fixed\ntrain.lr: 0.2\n"
    )
    return path


def test_a_file_adds_to_the_one_that_it_extends(files):
    config = load(files)
    assert (config.data.clients, config.data.partition.alpha, config.data.partition.kind) == (4, 0.2, "dirichlet_fixed")
    assert (config.train.lr, config.train.momentum) == (0.2, 0.9)


def test_files_extend_files_that_extend_files(files):
    last = files.parent / "bases" / "last.yaml"
    last.write_text("extends: ../mine.yaml\nfor_algorithm: {fedtrip: {algorithm.mu: 2}, slowmo: {train.lr: 3}}\n")
    assert load(last).algorithm.mu == 2
    assert load(last).train.lr == 0.2
    slowmo = load(last, ["algorithm.name=slowmo"])
    assert (slowmo.train.lr, slowmo.train.momentum, slowmo.algorithm.beta) == (3, 0, 0.7)


def test_of_several_files_the_later_ones_go_over_the_earlier(files):
    folder = files.parent
    (folder / "overlay.yaml").write_text("train: {lr: 0.7}\nfor_algorithm: {fedtrip: {algorithm.mu: 9}}\n")
    both = folder / "both.yaml"
    both.write_text(f"extends: [{files.name}, overlay.yaml]\ndata.clients: 5\n")
    config = load(both)
    assert (config.train.lr, config.train.momentum, config.algorithm.mu, config.data.clients) == (0.7, 0.9, 9, 5)
    both.write_text(f"extends: [overlay.yaml, {files.name}]\n")
    assert load(both).train.lr == load(files).train.lr


def test_each_algorithm_has_what_is_said_for_it(files):
    """The rest is the same for all, and what the command line says comes last."""
    assert load(files).algorithm.model_dump() == {"name": "fedtrip", "mu": 0.4}
    slowmo = load(files, ["algorithm.name=slowmo"])
    assert slowmo.algorithm.model_dump() == {"name": "slowmo", "beta": 0.7}
    assert slowmo.train.momentum == 0
    assert load(files, ["algorithm.name=slowmo", "train.momentum=0.5"]).train.momentum == 0.5
    assert load(files, ["algorithm.name=fedavg"]).algorithm.model_dump() == {"name": "fedavg"}
    assert load(files, ["algorithm.name=fedavg"]).train.momentum == 0.9


def test_the_default_algorithm_too(tmp_path):
    (tmp_path / "a.yaml").write_text("for_algorithm: {pfedmo: {algorithm.gamma: 0.7}}")
    assert load(tmp_path / "a.yaml").algorithm.gamma == 0.7


def test_names_with_dots(tmp_path):
    said = {"for_algorithm": {"near.py:Near": {"train.lr": 0.3}}, "algorithm.name": "near.py:Near"}
    assert load(said).train.lr == 0.3


def test_it_is_not_part_of_the_resolved_configuration(files):
    """config.yaml has the values, and not where they came from."""
    config = resolve(load(files, ["algorithm.name=slowmo"]))[0].config
    written = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert "for_algorithm" not in written
    assert written["algorithm"] == {"name": "slowmo", "beta": 0.7, "alpha": 1.0, "buffer": "reset"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nowhere.yaml", "can't read the config file .*nowhere.yaml: No such file"),
        ("extends: bad.yaml", "bad.yaml extends itself"),
        ("extends: [3]", r"bad.yaml: extends must be the path of a config file, or a list, not \[3\]"),
        ("for_algorithm: {slowmo: {train.mometum: 0}}", "bad.yaml: for_algorithm: slowmo: unknown key train.mometum"),
        ("for_algorithm: {slowmo: {train.momentum: 3}}", "for_algorithm: slowmo: train.momentum must be below 1"),
        ("for_algorithm: {slowm: {train.momentum: 0}}", "slowm: unknown algorithm 'slowm' .did you mean 'slowmo'"),
        ("for_algorithm: {fedavg: {for_algorithm: {}}}", "for_algorithm: fedavg: for_algorithm can't be nested"),
        ("for_algorithm: {moon: {algorithm.muu: 1}}", "for_algorithm: moon: moon: unknown key algorithm.muu"),
        ("for_algorithm: {'no.py:Foo': {}}", "for_algorithm: no.py:Foo: .*can't read the file .*no.py"),
        ("extends:", "bad.yaml: extends must be the path of a config file, or a list, not nothing"),
        ("extends: mine.yaml\ntrain.momentum: 3", "bad.yaml, which extends .*mine.yaml and .*base.yaml: .*train"),
        ("train.lr: 1\ntrain: {lr: 2}", "bad.yaml says train.lr twice, with dots and within a section"),
        ("data: {partition.alpha: 1, partition: {alpha: 1}}", "says data.partition.alpha twice"),
        ("for_algorithm: {slowmo: {train.lr: 1, train: {lr: 2}}}", "says for_algorithm.slowmo.train.lr twice"),
        ("for_algorithm: {slowmo: 3}", "for_algorithm.* must be"),
        ("for_algorithm: 3", "for_algorithm must be sections by name, not 3"),
        ("for_algorithm: {fedavg: {algorithm.name: slowmo}}", "for_algorithm: fedavg: .*algorithm.name"),
        ("extend: mine.yaml", "unknown key extend"),
    ],
)  # fmt: skip
def test_mistakes(text, message, files, capsys):
    bad = files.parent / "bad.yaml"
    bad.write_text(text)
    assert main(["run", str(bad), "--print-config"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(err)


def test_a_section_of_an_override_may_have_dots():
    """Whether a file has the section too or not."""
    for config in ({}, {"train.lr": 0.1}):
        found = load(config, ["train={lr_schedule.kind: cosine}"])
        assert found.train.lr_schedule.kind == "cosine"


def test_a_name_of_an_algorithm_that_is_no_text(files):
    for value in ("[slowmo]", "{a: 1}"):
        with pytest.raises(UserError, match=r"algorithm\.name must be "):
            load(files, [f"algorithm.name={value}"])


def test_a_section_may_be_said_at_two_places(files):
    (files.parent / "a.yaml").write_text("train.lr: 0.3\ntrain: {momentum: 0.4}\ntask: {metrics: {a.b: f.py:f}}\n")
    config = load(files.parent / "a.yaml")
    assert (config.train.lr, config.train.momentum) == (0.3, 0.4)


def test_a_section_that_is_empty_says_nothing(files):
    (files.parent / "a.yaml").write_text(
        "extends: mine.yaml\ntrain:\ndata.partition.alpha:\nfor_algorithm: {fedtrip: }\n"
    )
    config = load(files.parent / "a.yaml")
    assert config.train.lr == 0.2
    assert config.data.partition.alpha is None
    assert config.algorithm.mu == 0.4


def test_it_is_for_files_of_runs(files, capsys):
    """On a command line it could not be told from the run's own keys, and a sweep searches some of them."""
    with pytest.raises(UserError, match=r"for_algorithm is for config files: give the run's own keys"):
        load(files, ["for_algorithm.fedavg.train.lr=3"])
    space = {"base": str(files), "spaces": {"one": {"train.lr": [0.1, 0.2]}}}
    (files.parent / "space.yaml").write_text(yaml.safe_dump(space))
    inline = {"base": {"for_algorithm": {"fedavg": {"train.lr": 1}}}, "spaces": {"one": {"train.lr": [0.1, 0.2]}}}
    (files.parent / "inline.yaml").write_text(yaml.safe_dump(inline))
    suite = {"base": str(files), "algorithms": ["fedavg"]}
    (files.parent / "suite.yaml").write_text(yaml.safe_dump(suite))
    for words in (["space.yaml"], ["inline.yaml"], ["--suite", "suite.yaml"]):
        assert main(["tune", *(str(files.parent / word) if word.endswith("yaml") else word for word in words)]) == 2
        assert "base: for_algorithm is for runs" in capsys.readouterr().err


nested = st.recursive(
    st.none() | st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.sampled_from("abc"), nested), st.dictionaries(st.sampled_from("abc"), nested))
def test_merging(below, above):
    """What is above wins, nothing else of what is below is lost, and neither is changed."""

    def flat(values, prefix=()):
        for key, value in values.items():
            yield from flat(value, (*prefix, key)) if isinstance(value, dict) and value else [((*prefix, key), value)]

    def there(values, path):
        for key in path:
            values = values.get(key) if isinstance(values, dict) else None
        return values

    before = repr(below), repr(above)
    found = dict(flat(merged(below, above)))
    for path, value in flat(above):
        empty = value is None and isinstance(there(below, path), dict)
        assert empty or found.get(path, {}) == value or (value == {} and any(key[: len(path)] == path for key in found))
    for path, value in flat(below):
        hidden = any(path[: len(key)] == key or key[: len(path)] == path for key, _ in flat(above))
        assert hidden or found[path] == value
    assert (repr(below), repr(above)) == before
    assert merged(merged(below, above), above) == merged(below, above)


def test_what_is_asked_for_is_not_written_into_what_is_said_of_an_algorithm(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text("for_algorithm: {slowmo: {algorithm.beta: 0.25}}")
    config = load(path, ["algorithm.name=slowmo", "algorithm.alpha=0.5"])
    assert config.for_algorithm == {"slowmo": {"algorithm": {"beta": 0.25}}}
    assert config.algorithm.model_extra == {"beta": 0.25, "alpha": 0.5}


def test_a_mapping_that_is_a_value_is_replaced_as_a_whole(tmp_path):
    """The metrics of a file are not added to those of the file that it extends, and their names may have dots."""
    (tmp_path / "base.yaml").write_text("task.metrics: {one: m.py:one, two: m.py:two}\ntrain: {lr: 0.5}")
    (tmp_path / "mine.yaml").write_text(
        "extends: base.yaml\ntask: {metrics: {v1.5: m.py:three}}\ntrain: {momentum: 0.5}"
    )
    config = load(tmp_path / "mine.yaml")
    assert config.task.metrics == {"v1.5": "m.py:three"}
    assert (config.train.lr, config.train.momentum) == (0.5, 0.5)
    assert flat(config.model_dump())["task.metrics"] == {"v1.5": "m.py:three"}
    assert load({"task.metrics": {"a.b": "m.py:c"}}, ["task.metrics={d: m.py:d}"]).task.metrics == {"d": "m.py:d"}


def test_a_section_and_keys_with_dots_are_one(tmp_path):
    """The dotted keys had gone without a word."""
    path = tmp_path / "a.yaml"
    path.write_text("data.partition.alpha: 0.05\ntrain.lr: 0.5\ndata:\n  partition: {kind: dirichlet}\ntrain:\n")
    found = load(str(path))
    assert (found.data.partition.alpha, found.data.partition.kind, found.train.lr) == (0.05, "dirichlet", 0.5)
    # a later value replaces an earlier one, and nothing else
    kept = {"train": {"lr": 0.1, "momentum": 0.9}}
    for said in (
        {**kept, "train.lr": 0.2},
        {"train.lr": 0.1, "train.momentum": 0.9, "x": None, **{"train": {"lr": 0.2}}},
    ):
        found = load({key: value for key, value in said.items() if key != "x"}).train
        assert (found.lr, found.momentum) == (0.2, 0.9)


def test_an_override_of_a_section_adds_to_it():
    found = load({"train": {"lr": 0.1, "local_steps": 3}}, ["train={momentum: 0.9}", "data.partition={alpha: 0.3}"])
    assert (found.train.lr, found.train.local_steps, found.train.momentum) == (0.1, 3, 0.9)
    assert load({"task.metrics": {"a": "x.py:A"}}, ["task.metrics={b: 'x.py:B'}"]).task.metrics == {"b": "x.py:B"}


def test_numbers_of_numpy_and_torch_are_numbers():
    asked = {"train.upload": [{"topk": np.float64(0.5)}], "train.lr": torch.tensor(0.25), "run.seed": np.int64(3)}
    found = load({**asked, "run.local_models_of": np.arange(2), "run.local_models_in": (np.int32(1),)})
    assert (found.train.upload, found.train.lr, found.run.seed) == ([{"topk": 0.5}], 0.25, 3)
    assert (found.run.local_models_of, found.run.local_models_in) == ([0, 1], [1])


def test_home_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("run.output: ~/runs\nmodel.weights: ~/w.pt\nsystem.devices: {~/fast.yaml: 1}\n")
    (tmp_path / "mine.yaml").write_text("extends: ~/base.yaml\n")
    found = load(str(tmp_path / "mine.yaml"), ["engine.spill_dir=~/spill"])
    places = (found.run.output, found.model.weights, *found.system.devices, found.engine.spill_dir)
    assert places == tuple(str(tmp_path / each) for each in ("runs", "w.pt", "fast.yaml", "spill"))


def test_a_key_that_is_given_twice_has_a_line(capsys):
    words = ["train.lr=0.1", "run.rounds=2", "data.partition={kind: iid}", "data.partition={min_samples: 2}"]
    assert main(["run", *words, "train.lr=-1", "run.rounds=2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: train.lr is given more than once: the last one counts, train.lr=-1"
    assert second.startswith("fedray: train.lr must be above 0")


def test_a_config_file_may_have_a_sign_of_equality_in_its_path(own_folder):
    Path("lr=0.1").mkdir()
    Path("lr=0.1/config.yaml").write_text("train: {lr: 0.1}")
    assert split(["lr=0.1/config.yaml", "train.lr=0.2"]) == (["lr=0.1/config.yaml"], ["train.lr=0.2"])
    assert load_settings(["lr=0.1/config.yaml"]).train.lr == 0.1
