"""Steps of uploads, selections, rules and attacks that are handed over from Python: the same bits as by their names,
recorded with what they contain, and told of in one line if they are wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedray import UserError, simulate, simulate_many
from fedray.config import load
from fedray.robust.attacks.sign_flip import SignFlip
from fedray.robust.rules.trimmed_mean import TrimmedMean
from fedray.selection.power_of_choice import PowerOfChoice
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult

CODE = """
import numpy as np

from fedray import UploadStep
from fedray.robust import Attack, Rule
from fedray.selection import Chosen, Selection


def halved(rows, upload):
    return rows * {factor}


class Scaled(UploadStep):
    def __init__(self, factor=0.5):
        self.factor = factor

    def follows(self, before):
        self.number = len(before)

    def __call__(self, rows, upload):
        return self.factor * rows + self.number


class Apart(Selection):
    def __init__(self, step=2):
        self.step = step

    def choose(self, known):
        order = np.argsort(np.arange(len(known.ids)) % self.step, kind="stable")
        return Chosen(known.ids[np.sort(order[: known.count])])


class First(Rule):
    def __init__(self, count=3):
        self.count = count

    def __call__(self, rows, weights, before):
        return rows[: self.count].mean(dim=0)


class Labels(Attack):
    def __init__(self, scale=1.0):
        self.scale = scale

    def prepare(self, run):
        self.classes = run.classes

    def upload(self, rows, sent):
        return -self.scale * rows

    def poison(self, stored, labels, indices):
        return stored, (labels + 1) % self.classes
"""

NAMED = {
    "train.upload": [{"topk": 0.5}, {"name": "mine.py:Scaled", "factor": 0.25}, "mine.py:halved"],
    "train.sampling": {"kind": "mine.py:Apart", "step": 3},
    "train.aggregation": {"kind": "mine.py:First", "options": {"count": 2}},
    "attack": {"kind": "mine.py:Labels", "fraction": 0.3, "options": {"scale": 2.0}},
}


def cell(factor: float = 0.5) -> dict[str, Any]:
    """Returns what a notebook's cell defines: classes of ``__main__``, where no other process finds them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CODE.replace("{factor}", str(factor)), names)
    return names


def parts(**changed: Any) -> dict[str, Any]:
    mine = cell()
    objects = {
        "upload": [{"topk": 0.5}, mine["Scaled"](0.25), mine["halved"]], "sampling": mine["Apart"](step=3),
        "aggregation": mine["First"](2), "attack": mine["Labels"](scale=2.0),
    }  # fmt: skip
    return {**objects, **changed}


def run(folder: Path, keys: dict[str, Any] | None = None, **objects: Any) -> RunResult:
    config = {**SETTINGS, "algorithm.name": "fedavg", "run.rounds": 2, "run.output": str(folder), "run.name": "run"}
    attacked = {"attack.fraction": 0.3} if "attack" in objects else {}
    return simulate({**config, **attacked, **(keys or {})}, data=small_source(), **objects)


@pytest.mark.parametrize("workers", ["local", "fedray.testing.pickling:PicklingPool"])
def test_the_same_bits_as_by_name(workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE.replace("{factor}", "0.5"))
    by_name = run(tmp_path / "named", {**NAMED, "engine.kind": workers})
    handed_over = run(tmp_path / "objects", {"engine.kind": workers}, **parts())
    assert_same(by_name, handed_over)
    assert_same(by_name, run(tmp_path / "local", **parts()))
    found = load(handed_over.folder / "config.yaml")
    assert found.train.upload == [{"topk": 0.5}, "__main__:Scaled", "__main__:halved"]
    assert found.train.sampling == "__main__:Apart"
    assert (found.train.aggregation.kind, found.attack.kind) == ("__main__:First", "__main__:Labels")


def test_a_class_is_made_as_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE.replace("{factor}", "0.5"))
    options = {key: NAMED[key] for key in ("train.aggregation", "attack")}
    by_name = run(
        tmp_path / "named", {**options, "train.upload": ["mine.py:Scaled"], "train.sampling": "mine.py:Apart"}
    )
    mine = cell()
    keys = {"train.aggregation.options": {"count": 2}, "attack.options": {"scale": 2.0}}
    classes = {"sampling": mine["Apart"], "aggregation": mine["First"], "attack": mine["Labels"]}
    assert_same(by_name, run(tmp_path / "classes", keys, upload=[mine["Scaled"]], **classes))


def test_an_object_stays_as_it_was_and_may_be_used_again(tmp_path: Path) -> None:
    objects = parts()
    before = [dict(vars(each)) for each in (objects["upload"][1], objects["attack"])]
    result = run(tmp_path, **objects)
    assert [vars(each) for each in (objects["upload"][1], objects["attack"])] == before
    assert run(tmp_path, {"run.rounds": 3}, **objects).summary["rounds"] == 3
    assert result.folder == tmp_path / "run"


def test_another_object_is_another_run(tmp_path: Path) -> None:
    run(tmp_path, **parts())
    mine = cell()
    for changed, what in (
        ({"upload": [{"topk": 0.5}, mine["Scaled"](0.125), mine["halved"]]}, "step 2 of train.upload"),
        ({"upload": [{"topk": 0.5}, mine["Scaled"](0.25), cell(factor=0.75)["halved"]]}, "step 3 of train.upload"),
        ({"sampling": mine["Apart"](step=2)}, "code of train.sampling"),
        ({"aggregation": mine["First"](1)}, "rule of train.aggregation"),
        ({"attack": mine["Labels"](3.0)}, "attack"),
    ):
        with pytest.raises(UserError, match=rf"holds another run \({what} differs\)"):
            run(tmp_path, **parts(**changed))


def test_objects_of_fedrays_count_with_what_they_contain(tmp_path: Path) -> None:
    objects = {"sampling": PowerOfChoice(6), "aggregation": TrimmedMean(b=1), "attack": SignFlip(scale=2.0)}
    keys = {
        "train.sampling": {"kind": "power_of_choice", "candidates": 6},
        "train.aggregation": {"kind": "trimmed_mean", "b": 1},
        "attack": {"kind": "sign_flip", "scale": 2.0, "fraction": 0.3},
    }
    assert_same(run(tmp_path / "named", keys), run(tmp_path / "objects", **objects))
    others = {"sampling": PowerOfChoice(7), "aggregation": TrimmedMean(b=2), "attack": SignFlip(scale=3.0)}
    for name, other in others.items():
        with pytest.raises(UserError, match=r"holds another run \(.* differs\)"):
            run(tmp_path / "objects", **{**objects, name: other})


def test_names_alone_are_entries_of_the_configuration(tmp_path: Path) -> None:
    entries = [{"clip": 2.0}, {"topk": 1e-05}]
    named = run(tmp_path / "named", {"train.upload": entries})
    found = run(tmp_path / "objects", upload=entries)
    assert_same(named, found)
    assert load(found.folder / "config.yaml").run.given == ["data"]
    assert load(run(tmp_path / "none", {"train.upload": entries}, upload=[]).folder / "config.yaml").train.upload == []


MINE = cell()


class Needy(MINE["Scaled"]):  # type: ignore[misc]
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Locked(Needy):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"upload": Needy(1.0)}, r"upload= takes a list of steps, as in \[{'clip': 1.0}, Half\(\)\], not <"),
        ({"upload": "topk"}, "upload= takes a list of steps, as in .*, not 'topk'"),
        ({"upload": [3]}, "train.upload: 3 must be a function or a class of such, not int"),
        ({"upload": [Needy]}, r"train.upload=[\w.]+:Needy needs the option factor"),
        ({"upload": [Locked()]}, r"train.upload=[\w.]+:Locked can't be copied: TypeError: cannot pickle"),
        ({"upload": [{"topk": Needy(1.0)}]}, "train.upload has a value of the type list, which no file can hold"),
        ({"upload": [{"topkk": 0.5}, Needy(1.0)]}, "train.upload: .*topkk"),
        ({"sampling": "oort"}, "sampling= takes the object itself, not 'oort': train.sampling names one"),
        ({"sampling": MINE["First"]()}, "train.sampling=__main__:First must be a selection, a class with the method"),
        ({"aggregation": {"kind": "median"}}, "aggregation= takes the object itself, not .*: train.aggregation.kind"),
        ({"aggregation": MINE["Apart"]}, r"train.aggregation.kind=__main__:Apart must be a subclass of fedray\.robust\."
                                         "Rule, not the class Apart"),
        ({"aggregation": torch.relu}, r".*=torch:relu must be a subclass of fedray\.robust\.Rule, not builtin_"),
        ({"attack": MINE["First"]()}, r"attack.kind=__main__:First must be a subclass of .*\.Attack, not First"),
    ],
)  # fmt: skip
def test_what_is_no_such_object(objects: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{message}") as raised:
        run(tmp_path, **objects)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_options_and_keys_that_do_not_belong_to_an_object(tmp_path: Path) -> None:
    for keys, message in (
        ({"train.aggregation.options": {"count": 1}}, "only a class takes options, such as count"),
        ({"train.aggregation": {"kind": "krum", "f": 1}}, "f is not for kind=__main__:First, but for krum and"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, keys, aggregation=MINE["First"](2))
    with pytest.raises(UserError, match="kind=__main__:Labels needs fraction"):
        simulate(SETTINGS, data=small_source(), attack=MINE["Labels"])


def test_a_product_of_runs_is_refused_before_the_first(tmp_path: Path) -> None:
    wrong = {"upload": [3]}, {"sampling": MINE["First"]}, {"aggregation": MINE["Apart"]}
    for objects, message in zip(
        wrong, ("must be a function", "must be a selection", "must be a subclass"), strict=True
    ):
        with pytest.raises(UserError, match=f"^seed_0: train.*{message}"):
            simulate_many({**SETTINGS, "algorithm.name": "fedavg", "run.output": str(tmp_path)}, **objects)


def test_names_that_no_import_could_have(tmp_path: Path) -> None:
    result = run(tmp_path, upload=[lambda rows, upload: rows / 2])
    (name,) = load(result.folder / "config.yaml").train.upload
    assert str(name).endswith(":_lambda_")
