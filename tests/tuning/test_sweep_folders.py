"""A sweep goes on in its folder, which holds that sweep alone; what was recorded is never harmed."""

from __future__ import annotations

import errno

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from small_sweeps import described, ends, opened

from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.testing.contracts import small_source
from fedray.tuning.opening import open_sweep
from fedray.tuning.recorded import check_record, with_recorded_objective
from fedray.tuning.spec import check_together, read_sweeps
from fedray.tuning.trial import TrialEnd


class Said(Exception):
    @classmethod
    def at_once(cls, line):
        raise cls(line)


def test_a_sweep_goes_on_with_what_was_running(tmp_path):
    with opened(tmp_path, "tune.trials=4") as sweep:
        first = [sweep.next_trial() for _ in range(3)]
        ends(sweep, 1, 0.5)
        with pytest.raises(Said, match="is in use by process"), opened(tmp_path, "tune.trials=4", say=Said.at_once):
            pass
    with opened(tmp_path, "tune.trials=4") as sweep:
        again = [sweep.next_trial() for _ in range(3)]
        assert again[:2] == [first[0], first[2]]
        assert again[2].key == "3"
        assert sweep.next_trial() is None
        assert not sweep.finished
        for key in (0, 2, 3):
            ends(sweep, key, 0.1)
        assert sweep.finished
    with opened(tmp_path, "tune.trials=5") as sweep:
        assert sweep.next_trial().key == "4"


def test_an_interrupted_trial_goes_on_with_the_sweep(tmp_path):
    with opened(tmp_path, "tune.trials=1") as sweep:
        first = sweep.next_trial()
        sweep.report("0", TrialEnd(interrupted=True))
        assert not sweep.running
    with opened(tmp_path, "tune.trials=1") as sweep:
        assert sweep.next_trial() == first


def test_a_report_takes_the_direction_of_an_objective_from_the_sweep(tmp_path):
    with opened(tmp_path, tune={"objective": "validation_accuracy"}):
        pass
    said = [f"tune.output={tmp_path}", "tune.name=s"]
    (spec,) = read_sweeps(described(tune={"objective": "validation_accuracy"}), said)
    check_record(spec)
    assert with_recorded_objective(spec).tune.objective == {"validation_accuracy": "max"}
    (other,) = read_sweeps(described(tune={"objective": {"validation_accuracy": "min"}}), said)
    with pytest.raises(UserError, match=r"\(tune.objective differs\)"):
        check_record(other)
    (nowhere,) = read_sweeps(described(), [f"tune.output={tmp_path}", "tune.name=t"])
    with pytest.raises(UserError, match=r"there is no sweep in .*/t$"):
        check_record(nowhere)


def test_a_folder_holds_one_sweep(tmp_path):
    with opened(tmp_path):
        pass
    with (
        pytest.raises(UserError, match=r"holds another sweep \(tune.seeds differs\)"),
        opened(tmp_path, "tune.seeds=2"),
    ):
        pass
    with pytest.raises(UserError, match=r"train.batch_size differs"), opened(tmp_path, "train.batch_size=9"):
        pass
    # a run may be made longer; a sweep would have trials of two kinds
    with pytest.raises(UserError, match=r"\(run.rounds differs\)"), opened(tmp_path, "run.rounds=20"):
        pass
    with opened(tmp_path, "engine.actors=2", "tune.trials=5", "tune.max_concurrent_trials=1"):
        pass
    with opened(tmp_path, "tune.seeds=2", "tune.resume=false"):
        pass
    assert (tmp_path / "s.bak-1" / "study.journal").exists()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").touch()
    with pytest.raises(UserError, match="is not a sweep's folder"), opened(tmp_path, "tune.name=t"):
        pass


def test_the_order_of_objectives_and_the_kind_of_numbers_make_another_sweep(tmp_path):
    one = "tune.objective={train_loss: min, validation_accuracy: max}"
    with opened(tmp_path, one):
        pass
    other = "tune.objective={validation_accuracy: max, train_loss: min}"
    with pytest.raises(UserError, match=r"\(tune.objective differs\)"), opened(tmp_path, other):
        pass
    with opened(tmp_path, "tune.name=t", spaces={"wide": {"algorithm.mu": {"choice": [0, 1]}}}):
        pass
    floats = {"wide": {"algorithm.mu": {"choice": [0.0, 1.0]}}}
    with pytest.raises(UserError, match=r"\(spaces differs\)"), opened(tmp_path, "tune.name=t", spaces=floats):
        pass


def test_the_record_of_a_sweep_is_a_space_file_that_means_the_same(tmp_path):
    (spec,) = read_sweeps(described(first=[{"algorithm.mu": 0.1, "train.lr": 0.1}]), ["tune.trials=7", "tune.name=r"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "sweep.yaml").write_text(yaml.safe_dump(spec.record()))
    for where in (tmp_path / "r", tmp_path / "r" / "sweep.yaml"):
        (again,) = read_sweeps(where)
        assert again.record() == spec.record()
        assert again.folder == tmp_path / "r"
    (tmp_path / "r").rename(tmp_path / "renamed")
    (again,) = read_sweeps(tmp_path / "renamed")
    assert again.folder == tmp_path / "renamed"


def test_a_folder_of_sweeps_is_all_of_them(tmp_path):
    values = described(environments={"data.partition.alpha": [0.1, 1]})
    values["base"] |= {"data.partition.kind": "dirichlet"}
    specs = read_sweeps(values, [f"tune.output={tmp_path}", "tune.name=s"])
    for spec in specs:
        with open_sweep(spec, CustomObjects(small_source())):
            pass
    again = read_sweeps(tmp_path / "s")
    assert [spec.folder for spec in again] == [spec.folder for spec in specs]
    assert [spec.name for spec in again] == ["s/alpha-0.1", "s/alpha-1"]
    check_together(again)
    (tmp_path / "s").rename(tmp_path / "moved")
    assert [spec.folder.parent for spec in read_sweeps(tmp_path / "moved")] == [tmp_path / "moved"] * 2
    (tmp_path / "moved").rename(tmp_path / "s")
    (other,) = read_sweeps(described(), ["data.source=mnist", f"tune.output={tmp_path}", "tune.name=s/other"])
    with open_sweep(other, CustomObjects(small_source())):
        pass
    with pytest.raises(
        UserError, match=r"s/alpha-0.1 and s/other can't be run together, as data.source differs: name one"
    ):
        check_together(read_sweeps(tmp_path / "s"))


def test_a_sweep_that_was_killed_before_its_study_goes_on(tmp_path, monkeypatch):
    """The record is written first, so that the folder is known as a sweep's."""
    monkeypatch.setattr("fedray.tuning.opening.storage_of", no_room)
    with pytest.raises(UserError, match="can't write"), opened(tmp_path):
        pass
    monkeypatch.undo()
    with opened(tmp_path) as sweep:
        assert sweep.next_trial() is not None


def no_room(spec):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_study_in_a_storage_of_the_users(tmp_path):
    url = f"tune.storage=sqlite:///{tmp_path / 'all.db'}"
    with opened(tmp_path, url) as sweep:
        sweep.next_trial()
        ends(sweep, 0, 0.5)
    with opened(tmp_path, url) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 1
    assert not (tmp_path / "s" / "study.journal").exists()
    # another folder is another sweep, also one that would start over
    other = f"tune.output={tmp_path / 'elsewhere'}"
    for more in ([], ["tune.resume=false"]):
        with pytest.raises(UserError, match="has a study s already"), opened(tmp_path, url, other, *more):
            pass
    with opened(tmp_path, url, "tune.resume=false") as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 0
    assert (tmp_path / "s.bak-1").is_dir()
    with opened(tmp_path, url) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 0
    old = optuna.load_study(study_name="s.bak-1", storage=url.partition("=")[2])
    assert [trial.value for trial in old.trials] == [0.5]


def test_a_sweep_without_its_study_is_not_begun_again(tmp_path):
    with opened(tmp_path):
        pass
    # killed before its first trial
    (tmp_path / "s" / "study.journal").unlink()
    with opened(tmp_path) as sweep:
        sweep.next_trial()
        (tmp_path / "s" / "trials" / "0000").mkdir(parents=True)
        ends(sweep, 0, 0.5)
    record = (tmp_path / "s" / "sweep.yaml").read_bytes()
    elsewhere = f"tune.storage=sqlite:///{tmp_path / 'all.db'}"
    with pytest.raises(UserError, match=r"their study 's' is not in sqlite"), opened(tmp_path, elsewhere):
        pass
    assert (tmp_path / "s" / "sweep.yaml").read_bytes() == record
    whole = (tmp_path / "s" / "study.journal").read_bytes()
    for damaged, message in (
        (b"", "their study 'sweep' is not in study.journal"),
        (whole[: len(whole) // 2] + b"}\n" + whole[len(whole) // 2 :], "can't be read as a study: "),
        (b"\xff\xfe\n", "can't be read as a study: "),
        (b"[1]\n", "can't be read as a study: "),
    ):
        (tmp_path / "s" / "study.journal").write_bytes(damaged)
        with pytest.raises(UserError, match=message), opened(tmp_path):
            pass
        if damaged:
            assert (tmp_path / "s" / "study.journal").read_bytes() == damaged
    (tmp_path / "s" / "study.journal").write_bytes(whole)
    with opened(tmp_path) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 1
    for damaged in (b"", record[: len(record) // 2], b"base: {}\nspaces: {}\ntune: {}\n"):
        (tmp_path / "s" / "sweep.yaml").write_bytes(damaged)
        with pytest.raises(UserError, match=r"sweep.yaml is "), opened(tmp_path):
            pass
        with pytest.raises(UserError, match=r"sweep.yaml is "):
            read_sweeps(tmp_path / "s")
