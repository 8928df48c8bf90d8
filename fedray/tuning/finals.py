"""The last part of a suite: the best trial of each sweep runs again, on seeds that no trial had, with the test set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.tuning.spec import SweepSpec, first_seed, overridden
from fedray.tuning.study import values_of
from fedray.tuning.trial import Assignment, Message, RunEnd, TrialEnd
from fedray.tuning.view import View

if TYPE_CHECKING:
    from fedray.tuning.sweep import Sweep


@dataclass(frozen=True)
class Final:
    """What is run on fresh seeds: the best trial of a sweep, as it is or with keys changed.

    ``changed``: dotted keys and their values; ``what``: what this makes of it, in the table; ``suffix``: the same in
    the name of its folder.
    """

    spec: SweepSpec
    changed: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""
    suffix: str = ""

    @property
    def label(self) -> str:
        """The algorithm, or what its space file calls a kind of it, and what is changed."""
        return ", ".join(filter(None, (label_of(self.spec), self.what)))

    def folder(self, trial: int) -> Path:
        """Where the runs of a trial are that has won: another may win when a suite goes on with more of them."""
        return self.spec.folder / "winners" / "-".join(filter(None, (f"trial-{trial:04d}", self.suffix)))


def label_of(spec: SweepSpec) -> str:
    """The name of a sweep without the suite's."""
    return spec.name.rpartition("/")[2]


def fresh_seeds(spec: SweepSpec, seeds: int) -> range:
    """Seeds that no trial of a sweep has."""
    first = first_seed(spec.base) + spec.tune.seeds
    return range(first, first + seeds)


def is_finished(run: Path) -> bool:
    """Whether the run in a folder has come to its end."""
    path = run / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] in ("completed", "diverged")


class Winners:
    """Hands out the runs of a final, one for each seed, as soon as its sweep is finished."""

    def __init__(self, sweep: Sweep, final: Final, seeds: int, view: View) -> None:
        self.sweep, self.final, self.view = sweep, final, view
        self.left = list(fresh_seeds(sweep.spec, seeds))
        self.failures = 0

    def run_folder(self, seed: int) -> Path:
        return self.final.folder(self.sweep.study.best()[0].number) / f"seed-{seed}"

    def _skip_finished(self) -> None:
        if self.sweep.finished and not self.sweep.study.best():
            self.left = []
        if self.sweep.finished:
            self.left = [seed for seed in self.left if not is_finished(self.run_folder(seed))]

    @property
    def exhausted(self) -> bool:
        self._skip_finished()
        return self.sweep.finished and not self.left

    def next(self) -> Assignment | None:
        self._skip_finished()
        if not self.sweep.finished or not self.left:
            return None
        seed = self.left.pop(0)
        folder = self.run_folder(seed)
        run = overridden(self.sweep.base, values_of(self.sweep.study.best()[0]))
        run = overridden(run, self.final.changed) | dict(self.sweep.engine)
        run |= {"run.output": str(folder.parent), "run.name": folder.name, "run.seed": seed, "run.resume": "auto"}
        return Assignment(str(seed), [run], "train_loss", "rounds", math.inf)

    def hear(self, key: str, message: Message) -> bool:
        if isinstance(message, RunEnd):
            accuracy = message.row.get("test_accuracy", math.nan)
            self._say(f"winner on seed {key}: {message.status}, accuracy {accuracy:.4f}")
        elif isinstance(message, TrialEnd) and message.error is not None:
            self.failed(key, message.error)
        return False

    def lost(self, key: str, error: str) -> None:
        self._say(f"winner on seed {key}: {error}; it goes on from its last checkpoint")

    def failed(self, key: str, error: str) -> None:
        self.failures += 1
        self._say(f"winner on seed {key} failed: {error.strip().splitlines()[-1]}")

    def _say(self, line: str) -> None:
        self.view.say(f"{self.sweep.name.removesuffix(label_of(self.sweep.spec))}{self.final.label}: {line}")
