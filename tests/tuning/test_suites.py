"""Suites compare one thing: what each algorithm brings of its own, and what is the same for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import run

from fedray.config import load
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.results.measure import Measure
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.finals import label_of
from fedray.tuning.spec import SweepSpec
from fedray.tuning.suite import Suite, read_suite
from fedray.tuning.suite_rows import Row, compare_rows
from fedray.tuning.suite_table import by_what_clients_have

BASE = {"model.name": "mlp", "train.lr": 0.03, "train.local_steps": 4, "run.rounds": 3}


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    monkeypatch.setattr("fedray.data.sources.source.load_source", lambda *a: small_source())


def written(folder: Path, algorithms: list[str], *overrides: str, base: dict[str, Any] = BASE, **more: Any) -> Suite:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({"base": base, "algorithms": algorithms, **more}))
    return read_suite(path, overrides)


def of(suite: Suite, label: str) -> SweepSpec:
    return next(spec for spec in suite.specs if spec.name == f"s/{label}")


def said(suite: Suite, *words: str) -> bool:
    return any(all(word in line for word in words) for line in suite.notes)


def test_an_algorithms_own_file_sets_and_searches_the_optimizers(tmp_path):
    """FedAdam at a server's learning rate of 1 is at chance: its file has 0.01, and a range."""
    suite = written(tmp_path, ["fedavg", "fedadam", "fedtrip"], space={"train.lr": {"loguniform": [0.01, 0.1]}})
    adam = of(suite, "fedadam")
    assert adam.base["train.server_lr"] == 0.01
    assert adam.raw_space["train.server_lr"] == {"loguniform": [0.001, 1.0]}
    assert of(suite, "fedtrip").base["train.momentum"] == 0.9
    assert "train.momentum" not in adam.base
    assert said(suite, "train.server_lr", "searched for fedavg, fedadam", "1.0 for the others")
    assert said(suite, "train.momentum", "0.9 for fedtrip", "0.0 for the others")


def test_the_comparisons_frame_is_the_suites_alone(tmp_path):
    """Data, model, rounds, local work, cohorts and batches of an algorithm's own file are not taken."""
    suite = written(tmp_path, ["fedavg", "moon", "fedtrip", "pfedmo"], "model.head=auto", "train.weighting=auto")
    frames = [
        {key: value for key, value in spec.base.items() if key.startswith(("data.", "model.", "run."))}
        | {key: spec.base.get(key) for key in ("train.local_steps", "train.local_epochs", "train.batch_size")}
        | {key: spec.base.get(key) for key in ("train.cohort_size", "train.participation")}
        for spec in suite.specs
    ]
    assert frames == [frames[0]] * 4
    assert not any("train.local_steps" in spec.raw_space for spec in suite.specs)
    assert said(suite, "because the suite decides it", "train.local_steps of pfedmo")


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ((), {"base": BASE | {"train.server_lr": 0.5, "train.momentum": 0.1}}),
        ((), {"base": {**BASE, "train": {"server_lr": 0.5, "momentum": 0.1}}}),
        (("train.server_lr=0.5", "train.momentum=0.1"), {}),
    ],
)
def test_what_a_suite_sets_holds_for_all(overrides, more, tmp_path):
    more = {"base": BASE, "space": {"train.weight_decay": {"choice": [0.0, 0.1]}}} | more
    suite = written(tmp_path, ["fedavg", "fedadam", "fedtrip"], *overrides, **more)
    for spec in suite.specs:
        config = load(spec.base)
        assert (config.train.server_lr, config.train.momentum) == (0.5, 0.1)
        assert "train.server_lr" not in spec.raw_space
        assert spec.raw_space["train.weight_decay"] == {"choice": [0.0, 0.1]}
    assert not said(suite, "train.server_lr comes from each")
    assert said(suite, "because the suite decides it", "train.server_lr of fedavg, fedadam")


def test_what_a_suite_searches_begins_alike(tmp_path):
    """A value of the file's own for it would make another first trial."""
    suite = written(tmp_path, ["fedavg", "fedadam"], space={"train.server_lr": {"choice": [0.1, 1.0]}})
    for spec in suite.specs:
        assert "train.server_lr" not in spec.base
        assert spec.raw_space["train.server_lr"] == {"choice": [0.1, 1.0]}


def test_what_a_file_wants_first_is_kept_as_far_as_it_is_its_own(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "base": {"algorithm.name": "fedavgm"},
                "spaces": {"wide": {"algorithm.beta": {"uniform": [0, 1]}, "train.local_steps": {"choice": [4, 8]},
                                    "train.lr": {"uniform": [0.01, 1]}}},
                "first": [{"algorithm.beta": 0.5, "train.local_steps": 8, "train.lr": 0.1}, {"train.local_steps": 8}],
            }
        )
    )  # fmt: skip
    (spec,) = written(tmp_path, ["mine.yaml"]).specs
    assert spec.first == [{"algorithm.beta": 0.5}]


def parameters(spec: SweepSpec) -> int:
    settings = {**SETTINGS, **spec.base, "data.public_samples": 36}
    del settings["train.local_epochs"]
    return resolve(load(settings), CustomObjects(small_source()))[0].facts.parameters


def test_one_architecture_weighting_and_public_set_for_all(tmp_path):
    suite = written(tmp_path, ["fedavg", "moon", "scaffold", "pfedmo"])
    for spec in suite.specs:
        config = load(spec.base)
        assert (config.model.head, config.train.weighting, config.data.public_samples) == ("moon", "samples", 36)
    assert len({parameters(spec) for spec in suite.specs}) == 1
    assert said(suite, "model.head=moon for all algorithms", "moon can't do without")
    assert said(suite, "train.weighting=samples for all", "scaffold have uniform weights")
    assert said(suite, "data.public_samples=36 for all", "pfedmo")


def test_what_nobody_needs_is_not_there_and_not_said(tmp_path):
    suite = written(tmp_path, ["fedavg", "fedprox"])
    for spec in suite.specs:
        config = load(spec.base)
        assert (config.model.head, config.train.weighting, config.data.public_samples) == ("none", "samples", 0)
    assert not any("for all" in line for line in suite.notes)


@pytest.mark.parametrize(
    "overrides",
    [("model.head=auto", "train.weighting=auto", "data.public_samples=auto"),
     ("model.head=siam", "train.weighting=uniform", "data.public_samples=50")],
)  # fmt: skip
def test_a_suite_may_ask_for_something_else(overrides, tmp_path):
    suite = written(tmp_path, ["fedavg", "moon", "scaffold", "pfedmo"], *overrides)
    for spec in suite.specs:
        assert {f"{key}={spec.base[key]}" for key in ("model.head", "train.weighting", "data.public_samples")} == set(
            overrides
        )
    assert not any("for all" in line for line in suite.notes)


def test_the_smallest_head_that_serves_all_is_found(tmp_path):
    suite = written(tmp_path, ["fedavg", "moon", "fedsiam_da"])
    assert {spec.base["model.head"] for spec in suite.specs} == {"siam"}
    suite = written(tmp_path, ["fedavg", "moon"])
    assert {spec.base["model.head"] for spec in suite.specs} == {"moon"}


def test_a_public_set_of_the_sources_own_is_the_common_one(tmp_path, monkeypatch):
    source = small_source()
    source = replace(source, x_public=source.x_test[:20], y_public=source.y_test[:20])
    monkeypatch.setattr("fedray.data.sources.source.load_source", lambda *a: source)
    suite = written(tmp_path, ["fedavg", "pfedmo"])
    assert {spec.base["data.public_samples"] for spec in suite.specs} == {20}


def test_the_baseline_with_the_public_samples_dealt_out_is_run_where_a_server_has_them(tmp_path):
    def labels(algorithms, *overrides, baseline="fedavg"):
        return [final.label for final in written(tmp_path, algorithms, *overrides, baseline=baseline).finals]

    dealt = "fedavg, the public samples divided among its clients"
    assert labels(["pfedmo", "fedavg"]) == ["pfedmo", "fedavg", dealt]
    assert labels(["pfedmo", "fedavg"], baseline="pfedmo") == ["pfedmo", "fedavg"]
    # these hold the samples out for nobody, or not for FedAvg
    assert labels(["fedprox", "fedavg"], "data.public_samples=20") == ["fedprox", "fedavg"]
    assert labels(["pfedmo", "fedavg"], "data.public_samples=auto") == ["pfedmo", "fedavg"]
    assert labels(["pfedmo", "fedavg"], "data.public_overlap=true") == ["pfedmo", "fedavg"]
    _, plain, final = written(tmp_path, ["pfedmo", "fedavg"], baseline="fedavg").finals
    assert final.folder(3) != plain.folder(3)
    assert final.changed == {"data.public_to": "clients"}


def test_a_suites_own_file_names_it(tmp_path):
    assert written(tmp_path, ["fedavg"], tune={"name": "paper"}).name == "paper"
    assert written(tmp_path, ["fedavg"], "tune.name=mine", tune={"name": "paper"}).name == "mine"


def test_the_baseline_is_one_of_the_algorithms(tmp_path):
    assert label_of(written(tmp_path, ["fedprox", "fedavg"]).baseline) == "fedprox"
    assert label_of(written(tmp_path, ["fedprox", "fedavg"], baseline="fedavg").baseline) == "fedavg"
    with pytest.raises(
        UserError, match=r"baseline: 'fedavgm' is none of the suite's algorithms \(did you mean 'fedavg'"
    ):
        written(tmp_path, ["fedprox", "fedavg"], baseline="fedavgm")


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_an_adaptive_server_at_rate_1_is_warned_of(name):
    settings = {**SETTINGS, "algorithm.name": name}
    notes = resolve(load(settings), CustomObjects(small_source()))[0].notes
    assert [line for line in notes if line.startswith("warning: train.server_lr=1.0") and "0.01" in line]
    assert not resolve(load(settings | {"train.server_lr": 0.01}), CustomObjects(small_source()))[0].notes
    assert not resolve(load({**SETTINGS, "algorithm.name": "fedavgm"}), CustomObjects(small_source()))[0].notes


def test_what_a_space_file_has_and_a_suite_leaves_out_is_said(tmp_path):
    own = {
        "base": {"algorithm.name": "fedprox", "train.local_steps": 5},
        "spaces": {
            "wide": {
                "train.local_steps": {"choice": [5, 10]},
                "algorithm.mu": {"uniform": [0, 1], "when": {"train.local_steps": [5]}},
            }
        },
        "environments": {"data.partition.alpha": [0.1, 1]},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    whole = {"base": {"data.source": "sample", "train.local_steps": 4}, "algorithms": ["mine.yaml"]}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(whole))
    notes = read_suite(tmp_path / "suite.yaml").notes
    (line,) = [note for note in notes if "because the suite decides it" in note]
    assert line.endswith("search it: train.local_steps of mine; algorithm.mu of mine; environments of mine")


def test_personal_models_are_compared_by_what_clients_have(tmp_path):
    keys = {"run__eval_clients": "all", "run__finetune_steps": 2, "run__rounds": 2}
    made = {name: run(tmp_path / name, algorithm=name, **keys) for name in ("fedavg", "fedper")}
    given = [Row(name, [result.folder]) for name, result in made.items()]
    rows = by_what_clients_have(given)
    columns = {
        "fedavg": "clients_accuracy_mean", "fedavg, fine-tuned": "clients_finetuned_accuracy_mean",
        "fedper": "clients_personal_accuracy_mean",
    }  # fmt: skip
    assert {row.label: row.measure.column for row in rows} == columns
    table = compare_rows(rows, "fedavg", None).set_index("algorithm")
    for label, column in columns.items():
        assert table.accuracy[label] == made[label.partition(",")[0]].metrics[column].iloc[-1]
    # a model of the server's that no client has is no row of such a table
    server = replace(Row("pfedmo, representation model alone", []), measure=Measure(of="representation"))
    assert len(by_what_clients_have([*given, server])) == len(rows)
    alone = [Row("fedavg", [made["fedavg"].folder])]
    assert by_what_clients_have(alone)[0].measure.column == "test_accuracy"
