"""A space file means the sweeps that it describes, a mistake in it is one line, and fedray's own files can be read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import yaml
from optuna.trial import TrialState
from small_sweeps import described, opened

from fedray.algorithms import known_algorithms
from fedray.cli.main import main
from fedray.config import load, read_file
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source
from fedray.tuning.opening import number_of_trials, open_sweep
from fedray.tuning.spec import known_spaces, merge_settings, read_sweeps
from fedray.tuning.suite import known_suites, read_suite
from fedray.tuning.trial import run_trial


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"baes": {}}, (), "there is no section 'baes' (did you mean 'base'?)"),
        ({"spaces": {}}, (), "spaces: give at least one, as in"),
        ({"spaces": []}, (), "spaces: give at least one, as in"),
        ({"spaces": 3}, (), "spaces must be a section, not 3"),
        ({}, ("tune.space=wid",), "there is no space 'wid' (did you mean 'wide'?)"),
        ({}, ("tune.trials=0",), "tune.trials must be at least 1, not 0"),
        ({}, ("tune.trails=3",), "unknown key tune.trails (did you mean 'tune.trials'?)"),
        ({}, ("tune.sampler=tpee",), "did you mean 'tpe'?"),
        ({}, ("tune.search=tpe",), "unknown key tune.search (there are: max_concurrent_trials, name,"),
        ({}, ("tune.prune.by=asha",), "unknown key tune.prune (did you mean 'tune.pruner'?)"),
        (
            {},
            ("tune.pruner.startup=3",),
            "(did you mean 'tune.pruner.n_startup_trials'?)",
        ),
        ({}, ("tune.pruner.kind=ahsa",), "did you mean 'asha'?"),
        ({}, ("tune.sampler=grid",), "every key needs a list (grid or choice); use tpe"),
        ({}, ("tune.objective=test_accuracy",), "test_accuracy is measured on the test set"),
        ({}, ("tune.objective=accuracy",), "there is no column 'accuracy'"),
        ({}, ("tune.objective={bytes: least}",), "must be 'max' or 'min'"),
        (
            {},
            ("tune.objective={validation_accuracy: max, bytes: min}", "tune.pruner.kind=asha"),
            "goes with one objective",
        ),
        ({}, ("tune.objective={validation_accuracy: max, bytes: min}", "tune.sampler=cmaes"), "cmaes goes with one"),
        ({"first": [{"algorithm.muu": 1}]}, (), "first: algorithm.muu is not searched (did you mean 'algorithm.mu'?)"),
        ({"environments": {"data.partition.alpha": [0.1, 0.1]}}, (), "two of them have the same name"),
        ({}, ("run.name=x",), "run.name is set by the sweep; use tune.name"),
        ({}, ("run.eval_test=true",), "run.eval_test is set by the sweep"),
        ({"spaces": {"wide": {"engine.threads": {"choice": [1, 2]}}}}, (), "engine.threads can't be searched"),
        ({"spaces": {"wide": {"data.source": {"choice": ["a", "b"]}}}}, (), "data.source can't be searched"),
        ({"environments": {"data.partition.alpha": 3}}, (), "data.partition.alpha needs a list of values, not 3"),
        ({"environments": {"train.lr": [0.1, 0.3]}}, (), "environments: train.lr is searched; it can't be"),
        (
            {"spaces": {"wide": {1: {"choice": [1, 2]}}}},
            ("tune.max_concurrent_trials=0",),
            "tune.max_concurrent_trials must be 'auto' or at least 1, not 0",
        ),
        ({}, ("tune=3",), "tune must be a section, not 3"),
        ({}, ("tune.name=../up",), "must be a folder's name, not '../up'"),
        ({}, (f"tune.name={'x' * 151}",), "is longer than 150 bytes"),
        ({}, ("tune.name=/up",), "must be a folder's name"),
        ({}, ("tune.name=.",), "must be a folder's name"),
        ({}, ('tune.name="a\\0b"',), "must be a folder's name"),
        ({}, (f"tune.output={'x' * 300}",), "must be a folder or its URI"),
        ({}, ("tune.storage=sqlite://",), "tune.storage=sqlite:// keeps nothing"),
        ({}, ("tune.seeds=1e30",), "tune.seeds must be at most 1000"),
        (
            {"base": {"run.rounds": "four"}, "spaces": {"wide": {"train.local_steps": {"choice": [1, 2]}}}},
            (),
            "run.rounds",
        ),
        ({"environments": {"data.source": ["a", "b"]}}, (), "data.source can't be searched"),
        ({"first": {"algorithm.mu": 1}}, (), "first must be a list"),
        ({"base": "nowhere.yaml"}, (), "can't read the config file nowhere.yaml"),
    ],
)
def test_one_line_for_what_is_wrong_in_a_space_file(values, overrides, message):
    with pytest.raises(UserError) as error:
        read_sweeps({**described(), **values}, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "more", "message"),
    [
        (["algorithm.muu=1"], {}, "unknown key algorithm.muu (did you mean 'algorithm.mu'?)"),
        ([], {"spaces": {"wide": {"algorithm.mew": {"uniform": [0, 1]}}}}, "unknown key algorithm.mew"),
        (
            [],
            {"spaces": {"wide": {"algorithm.mu": {"uniform": [-1, 1]}}}},
            "with algorithm.mu=-1: algorithm.mu must be",
        ),
        ([], {"spaces": {"wide": {"model.name": {"choice": ["mlp", "lenet6"]}}}}, "with model.name=lenet6"),
        (["data.validation_samples=0"], {}, "needs data.validation_samples"),
        (["tune.objective=virtual_seconds"], {}, "virtual_seconds is not recorded"),
        (["tune.objective=train_accuracy"], {}, "needs run.eval_train_samples"),
        (["tune.storage=nothing://"], {}, "tune.storage=nothing://"),
        (["tune.resume=true"], {}, "tune.resume=true, but there is no sweep in"),
        ([f"run.seed={2**63 - 1}"], {}, "leaves no room for further seeds"),
        (
            [],
            {"spaces": {"wide": {"train.lr": {"uniform": [0.1, 1], "when": {"algorithm.muu": 1}}}}},
            "train.lr: when names algorithm.muu, which is no key here (did you mean 'algorithm.mu'?)",
        ),
    ],
)
def test_one_line_for_what_can_not_be_run(overrides, more, message, tmp_path):
    with pytest.raises(UserError) as error, opened(tmp_path, *overrides, **more):
        pass
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s" / "study.journal").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "give one space file, or one of: adabest"),
        (["tune", "pfedno"], "there is no space file or sweep pfedno (did you mean 'pfedmo'?)"),
        (["tune", "a", "b"], "give one space file"),
        (["tune", "--suite", "smaple"], "there is no suite smaple (did you mean 'sample'?)"),
        (["tune", "pfedmo", "--suite", "sample"], "--suite names its space files itself"),
        (["tune", "pfedmo", "--report", "tune.name=nowhere"], "there is no sweep in "),
        (["run", "--from-trial", "nowhere"], "there is no run in it"),
        (["run", "--from-trial", ""], "there is no run in it"),
        (["run", "--from-trial", "nowhere", "--print-config"], "--print-config goes without --from-trial"),
        (["tune", "pfedmo", "tune.objective={bytes:", "min}"], "a key=value with blanks needs quotes"),
        (["run", "my.yaml", "--from-trial", "nowhere"], "no file beside it, not my.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_fixed_on_the_command_line_is_searched_no_more():
    (spec,) = read_sweeps(described(), ["algorithm.mu=0.25"])
    assert list(spec.raw_space) == ["train.lr"]
    assert spec.base["algorithm.mu"] == 0.25


def test_the_work_stays_the_same_where_local_steps_are_searched():
    space = {"spaces": {"wide": {"train.local_steps": {"choice": [2, 4, 8]}}}}
    (spec,) = read_sweeps(described(**space))
    assert spec.base["run.iterations"] == 40
    assert "run.rounds" not in spec.base
    for steps in (2, 4, 8):
        assert load(merge_settings(spec.base, {"train.local_steps": steps})).rounds * steps == 40
    (spec,) = read_sweeps(described(**space), ["run.iterations=80"])
    assert spec.base["run.iterations"] == 80
    (spec,) = read_sweeps({**described(**space), "base": {"run.rounds": 1e1, "train.local_steps": 2}})
    assert spec.base["run.iterations"] == 20


def test_each_environment_is_a_sweep_of_its_own():
    values = {"data.partition.alpha": [0.1, 1], "train.cohort_size": [3, 5]}
    specs = read_sweeps(described(environments=values), ["tune.name=n"])
    assert [spec.name for spec in specs] == [
        f"n/alpha-{a}-cohort_size-{c}" for a, c in itertools.product([0.1, 1], [3, 5])
    ]
    assert [spec.base["data.partition.alpha"] for spec in specs] == [0.1, 0.1, 1, 1]
    assert len(read_sweeps(described(environments=values), ["data.partition.alpha=2"])) == 2


def test_a_file_and_its_base_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text("algorithm: {name: fedavgm}\ntrain.lr: 0.5\n")
    (tmp_path / "my.yaml").write_text("base: base.yaml\nspaces: {wide: {algorithm.beta: {uniform: [0, 0.9]}}}\n")
    (spec,) = read_sweeps(tmp_path / "my.yaml")
    assert spec.name == "my"
    assert spec.base == {"algorithm.name": "fedavgm", "train.lr": 0.5}


@pytest.mark.parametrize(
    ("asked", "way", "warned"),
    [
        ("validation_accuracy", "max", False),
        ("train_loss", "min", False),
        ("bytes", "min", False),
        ("validation_own", "max", False),
        ("{validation_own: }", "max", False),
        ("{train_loss: max}", "max", True),
        ("{validation_own: min}", "min", True),
    ],
)
def test_what_is_better_of_an_objective(asked, way, warned, tmp_path):
    """That of the metric, also of the user's own, unless it is said."""
    (tmp_path / "own.py").write_text("def own(logits, targets):\n    return (logits.argmax(1) == targets).float()\n")
    keys = [f"task.metrics={{own: {tmp_path}/own.py:own}}", "task.metric=own", "task.mode=max"]
    with opened(tmp_path, *keys, f"tune.objective={asked}") as sweep:
        assert list(sweep.spec.tune.objective.values()) == [way]
        assert sweep.study.best() == []
        assert any("although" in note for note in sweep.notes) is warned


def test_what_is_given_is_not_searched_under_another_name(tmp_path):
    space = {"train.cohort_size": {"int": [2, 5]}, "algorithm.mu": {"uniform": [0, 1]}}
    (spec,) = read_sweeps(described(spaces={"wide": space}), ["train.participation=0.5"])
    assert list(spec.raw_space) == ["algorithm.mu"]


@pytest.mark.parametrize("kind", ["grid", "uniform"])
def test_first_values_that_are_outside_the_space_are_told(kind, tmp_path):
    space = {"algorithm.mu": {kind: [0.1, 0.2]}}
    first = [{"algorithm.mu": 0.5}]
    sampler = ["tune.sampler=grid"] if kind == "grid" else []
    with opened(tmp_path, *sampler, spaces={"wide": space}, first=first) as sweep:
        told = [note for note in sweep.notes if "algorithm.mu=0.5 is not tried first" in note]
    assert [note.startswith("warning: ") for note in told] == [True]


def test_a_storage_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (spec,) = read_sweeps(described(), ["tune.storage=sqlite:///all.db"])
    assert spec.tune.storage == f"sqlite:///{tmp_path / 'all.db'}"
    (spec,) = read_sweeps(described(), ["tune.storage=sqlite:////all.db"])
    assert spec.tune.storage == "sqlite:////all.db"


def test_numbers_of_numpys():
    base = {**described()["base"], "data.clients": np.int64(4)}
    choice = np.array([0.01, 0.1])
    space = {"train.lr": {"loguniform": [1e-3, np.float64(1)]}, "algorithm.mu": {"choice": choice}}
    (spec,) = read_sweeps({"base": base, "spaces": {"wide": space}, "first": [{"train.lr": 1e-2}]})
    assert spec.base["data.clients"] == 4
    assert [(p.low, p.high, p.values) for p in spec.space.parameters] == [(0.001, 1.0, ()), (0, 0, (0.01, 0.1))]
    assert spec.space.stored(spec.first[0], {"algorithm.mu": 0.01}) == {"train.lr": 0.01, "algorithm.mu": "0.01"}
    assert yaml.safe_load(yaml.safe_dump(spec.record())) == spec.record()


def test_every_algorithm_has_a_space_file():
    assert set(known_algorithms()) <= set(known_spaces())


@pytest.mark.parametrize("name", known_spaces())
def test_a_space_file_is_of_its_algorithm_and_begins_with_the_base(name):
    """Both spaces can be read, and the wide one holds the algorithm's defaults in its paper's setting."""
    for space in read_file(known_spaces()[name])["spaces"]:
        for spec in read_sweeps(name, [f"tune.space={space}"]):
            algorithm = spec.base["algorithm.name"]
            assert name.startswith(algorithm)
            assert number_of_trials(spec, spec.base) == (30 if space == "wide" else len(spec.space.grid({})))
            hyper = known_algorithms()[algorithm]().hyper.model_dump()
            defaults = {f"algorithm.{key}": value for key, value in hyper.items()} | {"train.server_lr": 1.0}
            defaults |= {"train.weight_decay": 0.0} | spec.base | (spec.first[0] if spec.first else {})
            if space == "wide":
                assert set(spec.space.stored({}, defaults)) == set(spec.raw_space)
            assert load(spec.base).rounds >= 25


SMALL = {
    "data.clients": 6, "data.partition.kind": "iid", "data.samples_per_client": None, "model.name": "mlp",
    "model.hidden": [8], "train.local_steps": 2, "train.local_epochs": None, "run.iterations": 4,
    "run.rounds": None, "train.cohort_size": 3, "data.augment": "none", "data.source": "sample",
    "data.partition.overlap": False, "data.partition.capped": False, "engine.kind": "local",
}  # fmt: skip
"""What makes the trials of any space file short, on other data and a smaller model."""


@pytest.mark.parametrize("name", known_spaces())
def test_a_trial_of_every_space_file_can_be_run(name, tmp_path):
    """The second one, which has sampled values; the first one is the base."""
    spec = read_sweeps(name)[0]
    base = {key: value for key, value in spec.base.items() if not key.startswith(("data.", "model.name"))}
    space = {key: text for key, text in spec.raw_space.items() if key != "train.local_steps"}
    values = {"base": {**base, **SMALL}, "spaces": {"wide": space}, "first": spec.first}
    (spec,) = read_sweeps(values, [f"tune.output={tmp_path}", "tune.trials=2"])
    with open_sweep(spec, CustomObjects(small_source())) as sweep:
        sweep.next_trial()
        assignment = sweep.next_trial()
        end = run_trial(
            assignment, CustomObjects(small_source()), lambda message: sweep.report(assignment.key, message)
        )
        sweep.report(assignment.key, end)
        first, second = sweep.study.trials
        assert (first.state, second.state) == (TrialState.RUNNING, TrialState.COMPLETE)
        assert first.params != second.params


def test_papers_grids():
    """The grids that are expected were written down by hand."""

    def grid(name):
        (spec,) = read_sweeps(name, ["tune.space=paper"])
        return {key.partition(".")[2]: text["grid"] for key, text in spec.raw_space.items()}

    common = {"server_lr": [1.0, 0.5, 0.1], "lr": [0.1, 0.05, 0.01], "weight_decay": [0.001, 0.0008, 0.0004]}
    assert grid("fedavg") == grid("scaffold") == grid("mime") == common
    assert grid("fedprox") == {"mu": [0.1, 0.01, 0.001], **common}
    without = {key: values for key, values in common.items() if key != "server_lr"}
    assert grid("feddyn") == {"alpha": [0.1, 0.01, 0.001], **without}
    assert grid("adabest") == {"mu": [0.1, 0.01, 0.001], **without}
    assert grid("fedavgm") == {"beta": [0.99, 0.9], **common}
    assert grid("mimemom") == {"beta": [0.99, 0.95, 0.9], **common, "lr": [0.3, 0.1, 0.05, 0.03, 0.01]}
    assert grid("fedcm") == {"alpha": [0.05, 0.1, 0.5], **common, "lr": [1.0, 0.5, 0.1]}
    assert grid("ghbm") == {"tau": [5, 10, 20, 40], "beta": [0.9], **common, "lr": [1.0, 0.5, 0.1]}
    assert grid("fedhbm") == {"beta": [1.0, 0.99, 0.9], **common}
    assert grid("scaffold_m") == {"beta": [0.05, 0.1, 0.5], **common, "lr": [1.0, 0.5, 0.1]}
    assert grid("fedacg") == {"lam": [0.85], "beta": [0.1, 0.01, 0.001], **without}
    assert grid("fedtrip")["mu"][0] == 0.1
    assert grid("fedtrip")["mu"][-1] == 2.5
    assert grid("fedsiam_da") == {"mu": [0.05, 0.1, 0.2, 1.0]}
    assert grid("moon") == {"mu": [0.1, 1.0, 5.0, 10.0]}
    assert {spec.base["data.partition.alpha"] for spec in read_sweeps("pfedmo_xi")} == {0.05, 0.1, 1.0}


def test_help_shows_all_keys_and_spaces(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    shown = capsys.readouterr().out
    assert "tune.pruner.kind = none" in shown
    assert all(name in shown for name in known_spaces())


@pytest.mark.parametrize("name", known_suites())
def test_a_suite_gives_all_the_same_data_work_and_trials(name, monkeypatch):
    monkeypatch.setattr("fedray.data.sources.source.load_source", lambda *a: small_source())
    suite = read_suite(name)
    assert len(suite.specs) >= 5
    for spec in suite.specs:
        first = suite.specs[0]
        assert spec.tune.trials == first.tune.trials
        assert {k: v for k, v in spec.base.items() if k.startswith("data.")} == {
            k: v for k, v in first.base.items() if k.startswith("data.")
        }
        assert spec.base["data.public_samples"] == (0 if name in ("cifar10", "personal", "shakespeare") else 36)
        config, of_first = load(spec.base), load(first.base)
        assert (config.train.weighting, config.model.head) == ("samples", "linear" if name == "personal" else "none")
        assert (config.train.momentum, config.train.weight_decay) == (0, of_first.train.weight_decay)
        assert config.rounds * (config.train.local_steps or 0) == of_first.rounds * (of_first.train.local_steps or 0)


def test_first_values_are_for_spaces_that_search_them():
    file = {
        "base": {"algorithm.name": "ditto"}, "first": [{"algorithm.personal_lr": 0.05}],
        "spaces": {
            "wide": {"algorithm.personal_lr": {"uniform": [0, 1]}}, "paper": {"algorithm.lam": {"grid": [0.1, 1.0]}},
        },
    }  # fmt: skip
    found = {space: read_sweeps(file, [f"tune.space={space}"])[0].first for space in ("wide", "paper")}
    assert found == {"wide": [{"algorithm.personal_lr": 0.05}], "paper": []}


TWO_CLASSES = "data.partition.kind=label_skew data.partition.alpha=null data.partition.classes_per_client=2"


@pytest.mark.parametrize("keys", ["data.partition.alpha=0.5", TWO_CLASSES])
def test_the_settings_that_the_suite_personal_names(keys):
    assert keys in yaml.safe_load(known_suites()["personal"].read_text())["about"]
    (spec, *_) = read_suite("personal", [*keys.split(), "tune.name=other", "data.source=sample"]).specs
    experiment, data = resolve(load(spec.base))
    assert spec.name == "other/fedavg"
    if keys == TWO_CLASSES:
        assert experiment.config.data.partition.classes_per_client == 2
        assert all(len({*data.y[data.client(client)].tolist()}) == 2 for client in range(data.clients))


def test_a_suite_has_no_algorithm_of_its_own(tmp_path):
    for base in ({"algorithm.name": "fedprox"}, {"algorithm": {"name": "fedprox"}}):
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({"base": base, "algorithms": ["fedavg"]}))
        with pytest.raises(UserError, match=r"algorithm.name comes from each space file"):
            read_suite(tmp_path / "s.yaml")
    with pytest.raises(UserError, match=r"algorithm.name comes from each space file"):
        read_suite("sample", ["algorithm.name=fedprox"])
