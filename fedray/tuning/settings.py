"""The section ``tune`` of a space file: which keys it has, and what their values may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedray.config import Auto, Section, Whole, check, expand, flat
from fedray.config.section import at_home
from fedray.errors import UserError, near_miss
from fedray.util.uris import is_folder, is_uri, local_folder, problem_of_uri

COSTS = ("bytes", "bytes_down", "bytes_up", "flops", "virtual_seconds", "joules", "wall_seconds", "epsilon")
"""The costs that ``tune.objective`` may name: columns of metrics.csv, and ``bytes``, which is bytes_down + bytes_up.
``epsilon`` is what a private run costs its clients."""

KNOWN = ("validation_accuracy", "train_loss", "train_accuracy", *COSTS)
"""The names that ``tune.objective`` may have in any task. With another main metric, its columns are possible too."""

OF_THE_TEST_SET = (
    "test_",
    "personalized_",
    "representation_",
    "finetuned_",
    "averaged_",
    "server_",
    "clients_",
    "global_",
    "local_",
)
"""The beginnings of columns of metrics.csv that a sweep must not optimise, because only the winners of a suite may see
the test set."""


class PrunerConfig(Section):
    """The keys ``tune.pruner.*`` of a space file: which trials of a sweep are stopped early because their results are
    bad. The values of ``kind`` are named like the pruners of Optuna and Ray Tune."""

    kind: Literal["none", "asha", "median", "hyperband"] = Field(
        "none", description="which trials stop early: asha (successive halving), median (worse than it), or hyperband"
    )
    axis: Literal["auto", "rounds", "bytes", "flops", "virtual_seconds", "joules"] = Field(
        "auto",
        description="trials are compared at equal amounts of this, in percent of a whole run of the base config; "
        "auto: rounds, unless what is searched changes a round's cost by over 1 %: then flops, or bytes if FLOPs stay "
        "the same or are the objective",
    )
    grace_period: Whole = Field(10, ge=1, le=100, description="percent of the axis before a trial may be stopped")
    reduction_factor: Whole = Field(3, ge=2, description="asha, hyperband: one of so many trials passes each rung")
    n_startup_trials: Whole = Field(
        5, ge=1, description="median, and between seeds: so many other trials must be there to compare with"
    )


class TuneConfig(Section):
    """The keys ``tune.*`` of a space file, with their types and defaults: how a sweep searches its space."""

    name: str | None = Field(None, description="name of the sweep's folder; the space file's unless set")
    output: str = Field(
        "sweeps/", description="folder in which the sweep's folder is made; or its URI, such as s3://bucket/sweeps"
    )
    working_copy: str | None = Field(
        None, description="folder on every node in which a sweep works whose output is a URI; in the cache unless set"
    )
    space: str | None = Field(None, description="which of the file's spaces; unless set, the only one, else wide")
    objective: dict[str, Literal["max", "min"] | None] = Field(
        {},
        description="columns of metrics.csv, or bytes, each max or min (the metric's own unless given); several give a "
        "Pareto front; unless set, the task's main metric on the validation set, as in {validation_accuracy: max}",
    )
    trials: Whole | None = Field(
        None, ge=1, le=10**6, description="number of trials; 30, or the whole grid, unless set"
    )
    seeds: Whole = Field(
        1, ge=1, le=1000, description="runs of each trial, with run.seed, run.seed + 1, ...; their mean counts"
    )
    sampler: Literal["tpe", "random", "grid", "cmaes", "nsga2"] | None = Field(
        None, description="Optuna's sampler; unless set, grid where every key has a list of values, else tpe"
    )
    seed: Whole = Field(0, ge=0, lt=2**31, description="seed of the sampler")
    pruner: PrunerConfig = Field(default_factory=PrunerConfig)
    max_concurrent_trials: Annotated[Whole, Field(ge=1)] | Auto = Field(
        "auto", description="how many trials run at the same time; auto: as many as fit"
    )
    storage: str | None = Field(None, description="Optuna URL of the study; a journal in the sweep's folder unless set")
    resume: Literal["auto"] | bool = Field(
        "auto",
        description="auto: continue the sweep in the folder if it is the same; true: continue it or fail; false: "
        "rename its folder and start over",
    )

    @field_validator("name")
    @classmethod
    def _below_the_output(cls, name: str | None) -> str | None:
        parts = (name or "sweep").split("/")
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise ValueError(f"must be a folder's name, not {name!r}; tune.output is the folder in which it is made")
        return name

    @field_validator("output", "working_copy", mode="before")
    @classmethod
    def _find_home(cls, value: Any) -> Any:
        return at_home(value)

    @field_validator("output")
    @classmethod
    def _folder(cls, output: str) -> str:
        if is_uri(output):
            if problem := problem_of_uri(output):
                raise ValueError(problem)
            return output
        parts = Path(output).absolute().parts
        if not output.isprintable() or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"must be a folder or its URI, not {output!r}")
        return output

    @model_validator(mode="after")
    def _check_working_copy(self) -> TuneConfig:
        if self.working_copy is not None and not is_uri(self.output):
            raise ValueError("tune.working_copy is for a tune.output that is a URI, such as s3://bucket/sweeps")
        if is_folder(self.output, self.place):
            raise ValueError("tune.working_copy must be another folder than tune.output")
        return self

    @property
    def place(self) -> Path:
        """The folder on this machine in which the sweep's folder is made: ``tune.output`` itself, or, if that is a URI,
        the folder of its working copy (``tune.working_copy``, or one in the user's cache)."""
        return local_folder(self.output, self.working_copy)


def section(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Returns the section ``key`` of ``values``, the content of a YAML file or a part of it, as a mapping. If the
    section is missing, the mapping is empty.

    Raises :class:`UserError` if the section is not a mapping. The message begins with ``where``, which names the file.
    """
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"{where}{key} must be a section, not {found!r}")
    return found


def read_tune(of_file: Any, overrides: Mapping[str, Any], where: str) -> TuneConfig:
    """Reads and checks the section ``tune`` of a space file, the settings of a search over hyper-parameters, and
    returns it as :class:`TuneConfig`. ``of_file`` is the section as it stands in the file, or None; keys in
    ``overrides`` replace those of the file.

    An objective without a direction has None, as the task's metrics are not known yet. Raises :class:`UserError` for a
    wrong key or value. Its message begins with ``where``, which names the file.
    """
    written = expand(section({"tune": of_file}, "tune", where))
    both = expand(flat({**written, "objective": None}) | flat({**overrides, "objective": None}))
    both["objective"] = overrides.get("objective", written.get("objective"))
    for each in (written, both):
        said = each.get("objective") or {}
        each["objective"] = {said: None} if isinstance(said, str) else said
    tune: TuneConfig = check(TuneConfig, both, where, "tune.", before=written)
    if tune.storage is not None:
        tune = tune.model_copy(update={"storage": _permanent_url(tune.storage)})
    for name in tune.objective:
        if name.startswith(OF_THE_TEST_SET) or name.endswith("_on_shares_accuracy"):
            raise UserError(
                f"tune.objective: {name} is measured on the test set, which no trial may see; use validation_accuracy"
            )
        if name not in KNOWN and not name.startswith(("validation_", "train_")):
            raise UserError(f"tune.objective: there is no column {name!r}{near_miss(name, KNOWN)}")
    if len(tune.objective) > 1 and tune.pruner.kind != "none":
        raise UserError(
            f"tune.pruner.kind={tune.pruner.kind} goes with one objective, not with {len(tune.objective)}; use none"
        )
    if len(tune.objective) > 1 and tune.sampler == "cmaes":
        raise UserError("tune.sampler=cmaes goes with one objective; use tpe or nsga2")
    return tune


def _permanent_url(url: str) -> str:
    """Returns the Optuna URL ``url`` with an absolute path, so that it means the same file from every working
    directory. Raises :class:`UserError` for a database in memory."""
    found = re.fullmatch(r"(sqlite[^:]*:///?)(.*)", url)
    if not found:
        return url
    kind, path = found.groups()
    if path in ("", ":memory:"):
        raise UserError(
            f"tune.storage={url} keeps nothing, because it is in memory; name a file, as in sqlite:///studies.db"
        )
    return kind + str(Path(path).absolute())
