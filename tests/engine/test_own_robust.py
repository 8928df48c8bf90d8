"""Robust rules and attacks of the user's: named in a configuration, recorded, on Ray, and told of what is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import run
from torch import Tensor

from fedray import UserError, evaluate
from fedray.robust import Attack, AttackedRows, AttackedRun, Rule
from fedray.testing.contracts import assert_same, small_source

HERE = __name__

FILE = """
import torch

from fedray.robust import Attack, Rule


class Half(Rule):
    def __init__(self, share=0.5):
        self.share = share

    def __call__(self, rows, weights, before):
        return self.share * rows.mean(dim=0)


class Wrong(Attack):
    def __init__(self, scale, shift=1):
        self.scale, self.shift = scale, shift

    def prepare(self, run):
        self.classes = run.classes

    def upload(self, rows, sent):
        return self.scale * rows

    def poison(self, stored, labels, indices):
        return stored, (labels + self.shift) % self.classes


class Other:
    pass


number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    return tmp_path / "mine.py"


BOTH = {
    "train__aggregation": {"kind": "mine.py:Half", "options": {"share": 0.25}},
    "attack": {"kind": "mine.py:Wrong", "fraction": 0.3, "options": {"scale": 2.0}},
}


def test_the_same_as_what_comes_with_fedray(tmp_path: Path) -> None:
    """A median and a flip of signs, written again."""
    ours = {"train__aggregation": {"kind": "median"}, "attack": {"kind": "sign_flip", "fraction": 0.3, "scale": 3.0}}
    own = {
        "train__aggregation": {"kind": f"{HERE}:Middle"},
        "attack": {"kind": f"{HERE}:Opposite", "fraction": 0.3, "options": {"scale": 3.0}},
    }
    assert_same(run(tmp_path / "ours", **ours), run(tmp_path / "own", **own))


class Middle(Rule):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        ordered = rows.sort(dim=0).values
        return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


class Opposite(Attack):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        return rows.mul_(-self.scale)


def test_on_actors_the_bits_are_the_same(mine: Path, ray_cluster: None) -> None:
    """The file is sent to them, which poison samples by it."""
    local = run(mine.parent / "local", **BOTH)
    ray = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.1}
    assert_same(local, run(mine.parent / "ray", **BOTH, **ray))
    assert local.summary["model_sha256"] != run(mine.parent / "plain").summary["model_sha256"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("self.share * rows", r"rule of train\.aggregation differs"),
        ("self.scale * rows", r"attack differs"),
    ],
)
def test_a_run_goes_on_with_the_same_code_only(mine: Path, change: str, message: str) -> None:
    """Whoever evaluates its model needs none of it."""
    folder = mine.parent / "runs"
    run(folder, **BOTH, call={"callbacks": [lambda report: report.round == 2]})
    mine.write_text(FILE.replace(change, f"1.0 * {change}"))
    with pytest.raises(UserError, match=message):
        run(folder, **BOTH)
    mine.unlink()
    assert evaluate(folder / "fedavg-small", data=small_source()).metrics["accuracy"] > 0


class Drawn(Rule):
    """Leaves out a client that is drawn."""

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        rows[random.randrange(len(rows))] = 0
        return rows.mean(dim=0) + 1e-3 * torch.randn(rows.shape[1])


def test_what_a_rule_draws_is_seeded(tmp_path: Path) -> None:
    keys = {"train__aggregation": {"kind": f"{HERE}:Drawn"}}
    random.seed(1)
    one = run(tmp_path / "one", **keys)
    state = random.getstate()
    random.seed(2)
    assert_same(one, run(tmp_path / "other", **keys))
    random.seed(1)
    assert random.getstate() == state
    other = run(tmp_path / "seed", **keys, run__seed=1)
    assert other.summary["model_sha256"] != one.summary["model_sha256"]


class Labels(Attack):
    """Draws labels while clients train, from a generator that nobody has seeded for it."""

    def poison(self, stored: Any, labels: Tensor, indices: Any) -> tuple[Any, Tensor]:
        return stored, torch.randint_like(labels, 4)


def test_a_warning_names_numbers_that_are_not_seeded(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has drawn random numbers .* an attack from run\.generator"):
        run(tmp_path, attack={"kind": f"{HERE}:Labels", "fraction": 0.3})


class Giving(Rule):
    """Returns what ``give`` says."""

    def __init__(self, give: str) -> None:
        self.give = give

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        wrong: dict[str, Any] = {
            "None": None, "narrow": rows[0, 1:], "rows": rows, "double": rows[0].double(), "numpy": rows[0].numpy(),
            "nan": rows[0] * np.nan,
        }  # fmt: skip
        return wrong[self.give]


class AnyAttack(Attack):
    """Returns what ``upload`` or ``labels`` say."""

    def __init__(self, upload: str = "", labels: str = "") -> None:
        self.wrong, self.labels = upload, labels

    def prepare(self, run: AttackedRun) -> None:
        if self.wrong == "prepare":
            raise KeyError("boom")

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        wrong: dict[str, Any] = {"None": None, "one": rows[0], "double": rows.double(), "nan": rows * np.nan}
        return wrong[self.wrong]

    def poison(self, stored: Any, labels: Tensor, indices: Any) -> tuple[Any, Tensor]:
        return stored, {"": labels, "floats": labels.float(), "one": labels[:, :1, :1]}[self.labels]


@pytest.mark.parametrize(
    ("give", "message"),
    [
        ("None", r"train\.aggregation: Giving must return \[144\] torch\.float32, not NoneType"),
        ("narrow", r"Giving must return \[144\] torch\.float32, not \[143\] torch\.float32"),
        ("rows", r"must return \[144\] torch\.float32, not \[5, 144\]"),
        ("double", r"not \[144\] torch\.float64"),
        ("numpy", "not ndarray"),
        ("nan", "Giving has made NaN of the upload 'y' of round 1, all of whose rows were finite"),
        ("other", r"Giving failed on the upload 'y' of round 1: KeyError: 'other' \(test_own_robust\.py, line \d+\)"),
    ],
)
def test_wrong_results_of_a_rule_are_told(give: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, train__aggregation={"kind": f"{HERE}:Giving", "options": {"give": give}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upload": "None"}, r"attack: AnyAttack\.upload must return \[\d, 140\] torch\.float32, not NoneType"),
        ({"upload": "one"}, r"AnyAttack\.upload must return \[\d, 140\] torch\.float32, not \[140\]"),
        ({"upload": "double"}, r"torch\.float32, not \[\d, 140\] torch\.float64"),
        ({"upload": "other"}, "AnyAttack.upload failed on the upload 'y' of round 1: KeyError: 'other'"),
        ({"upload": "prepare"}, r"attack\.kind=.*:AnyAttack: prepare\(\) failed: KeyError: 'boom'"),
        ({"labels": "floats"}, r"AnyAttack\.poison must return .* torch\.int64, not .* torch\.float32"),
        ({"labels": "one"}, r"AnyAttack\.poison must return \[\d+, 1, \d+\] torch\.int64, not \[\d+, 1, 1\]"),
    ],
)
def test_wrong_results_of_an_attack_are_told(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, attack={"kind": f"{HERE}:AnyAttack", "fraction": 0.3, "options": options})


def test_an_attacker_may_send_numbers_that_are_none(tmp_path: Path) -> None:
    keys = {"attack": {"kind": f"{HERE}:AnyAttack", "fraction": 0.3, "options": {"upload": "nan"}}}
    made = run(tmp_path, train__aggregation={"kind": "median"}, **keys)
    assert made.summary["status"] == "completed"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "crum", "f": 2}, r"kind must name a rule, or your own as file.py:Name .*, not 'crum' .*'krum'"),
        ({"kind": "mine.py:Haf"}, r"train\.aggregation\.kind=mine\.py:Haf: mine\.py has no 'Haf' .*'Half'"),
        ({"kind": "mein.py:Half"}, r"train\.aggregation\.kind=mein\.py:Half: can't read the file .*'mine\.py'"),
        ({"kind": "mine.py"}, r"train\.aggregation\.kind=mine\.py is not of the form file\.py:Name"),
        ({"kind": "mine.py:Half", "options": {"shar": 1}}, r"Half has no option 'shar' \(did you mean 'share'\?\)"),
        ({"kind": "mine.py:Half", "f": 1}, r"f is not for kind=mine\.py:Half, .* in options|into options"),
        ({"kind": "median", "options": {"f": 1}}, "options is for a class of your own, .*, not for kind=median"),
        ({"kind": "mine.py:Other"}, r"must be a subclass of fedray\.robust\.Rule, not the class Other"),
        ({"kind": "mine.py:number"}, r"must be a subclass of fedray\.robust\.Rule, not int"),
        ({"kind": "mine.py:Wrong"}, r"must be a subclass of fedray\.robust\.Rule, not the class Wrong"),
        ({"kind": f"{HERE}:Large"}, r"Large with m=7 needs cohorts of at least 7 clients, and there are 5"),
        ({"kind": f"{HERE}:Large", "options": {"m": "x"}}, r"Large: least\(\) failed: TypeError"),
    ],
)
def test_rules_that_can_not_be_used_are_told(rule: dict[str, Any], message: str, mine: Path) -> None:
    if rule["kind"].endswith("Large"):
        rule = {"options": {"m": 7}, **rule}
    with pytest.raises(UserError, match=message):
        run(mine.parent, train__aggregation=rule)


class Large(Middle):
    def __init__(self, m: int) -> None:
        self.m = m

    def least(self) -> int:
        return self.m


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"kind": "sign_flop"}, r"attack\.kind must name an attack, or your own .*, not 'sign_flop' .*'sign_flip'"),
        ({"kind": "mine.py:Wrong"}, r"attack\.kind=mine\.py:Wrong needs the option scale$"),
        ({"kind": "mine.py:Wrong", "options": {"scale": 1, "shfit": 2}}, "has no option 'shfit' .*'shift'"),
        ({"kind": "mine.py:Half"}, r"must be a subclass of fedray\.robust\.Attack, not the class Half"),
        ({"kind": "ipm", "options": {"eps": 1}}, "options is for a class of your own, .*, not for kind=ipm"),
    ],
)
def test_attacks_that_can_not_be_used_are_told(attack: dict[str, Any], message: str, mine: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(mine.parent, attack={"fraction": 0.2, **attack})


def test_steps_of_uploads_have_near_misses_too(mine: Path) -> None:
    with pytest.raises(UserError, match=r"train\.upload=topk has no option 'error_fedback' .*'error_feedback'"):
        run(mine.parent, train__upload=[{"topk": {"k": 1, "error_fedback": False}}])
