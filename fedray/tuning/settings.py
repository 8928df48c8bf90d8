"""How a space is searched: the keys of a space file's section ``tune``, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from fedray.config import Auto, Section, Whole, check, expand, flat
from fedray.errors import UserError, near_miss

OBJECTIVES = (
    "validation_accuracy", "train_loss", "train_accuracy", "bytes", "bytes_down", "bytes_up", "flops",
    "virtual_seconds", "wall_seconds",
)  # fmt: skip
"""What can be optimised: columns of metrics.csv, and ``bytes``, both ways together."""

OF_THE_TEST_SET = (
    "test_accuracy", "test_loss", "personalized_accuracy", "representation_accuracy", "global_on_shares_accuracy",
    "representation_on_shares_accuracy", "finetuned_accuracy", "averaged_accuracy", "server_accuracy",
    "clients_accuracy_mean", "clients_accuracy_worst_tenth", "clients_accuracy_std",
)  # fmt: skip


class PruneConfig(Section):
    """When trials that do badly are given up."""

    by: Literal["none", "asha", "median", "hyperband"] = Field(
        "none", description="asha (successive halving), median (of the others), or hyperband"
    )
    axis: Literal["auto", "rounds", "bytes", "flops"] = Field(
        "auto",
        description="what trials are compared at equal amounts of, in percent of the base config's whole run; auto: "
        "rounds, unless what is searched changes a round's cost by over 1 %: then flops, or bytes if FLOPs stay the "
        "same or are the objective",
    )
    grace: Whole = Field(10, ge=1, le=100, description="percent of the axis before the first decision")
    reduction: Whole = Field(3, ge=2, description="asha, hyperband: one of so many goes on from each rung")
    startup: Whole = Field(5, ge=1, description="median: trials before the first decision")


class TuneConfig(Section):
    """How a space is searched."""

    name: str | None = Field(None, description="name of the sweep's folder; the space file's unless set")
    output: str = Field("sweeps/", description="folder in which the sweep's folder is made")
    space: str | None = Field(None, description="which of the file's spaces; unless set, the only one, else wide")
    objective: dict[str, Literal["max", "min"]] = Field(
        {"validation_accuracy": "max"}, description="columns of metrics.csv (or bytes); several give a Pareto front"
    )
    trials: Whole | None = Field(None, ge=1, le=10**6, description="trials in all; 30, or the whole grid, unless set")
    seeds: Whole = Field(
        1, ge=1, le=1000, description="runs of a trial, with run.seed, run.seed + 1, ...: their mean counts"
    )
    search: Literal["tpe", "random", "grid", "cmaes", "nsga2"] | None = Field(
        None, description="Optuna's sampler; grid where every key has one, else tpe, unless set"
    )
    seed: Whole = Field(0, ge=0, lt=2**31, description="seed of the search")
    prune: PruneConfig = Field(default_factory=PruneConfig)
    concurrency: Annotated[Whole, Field(ge=1)] | Auto = Field(
        "auto", description="trials at once; auto: as many as fit"
    )
    storage: str | None = Field(None, description="Optuna URL of the study; a journal in the sweep's folder unless set")
    resume: Literal["auto"] | bool = Field(
        "auto", description="auto: go on if it is there and the same; true: go on or fail; false: move the old folder"
    )

    @field_validator("name")
    @classmethod
    def _below_the_output(cls, name: str | None) -> str | None:
        parts = (name or "sweep").split("/")
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise ValueError(f"must be a folder's name, not {name!r}; tune.output says where it is")
        return name

    @field_validator("output")
    @classmethod
    def _folder(cls, output: str) -> str:
        parts = Path(output).absolute().parts
        if "://" in output or not output.isprintable() or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"must be a local folder, not {output!r}")
        return output


def section(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A mapping within ``values``, empty if it is not there."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"{where}{key} must be a section, not {found!r}")
    return found


def read_tune(of_file: Any, given: Mapping[str, Any], where: str) -> TuneConfig:
    """The section ``tune`` of a file, under what was given on the command line."""
    written = expand(section({"tune": of_file}, "tune", where))
    objective = given.get("objective", written.get("objective"))
    if isinstance(objective, str):
        objective = {objective: "max" if objective.endswith("accuracy") else "min"}
    both = expand(flat(_without(written, "objective")) | flat(_without(given, "objective")))
    if objective is not None:
        both["objective"] = objective
    tune = check(TuneConfig, both, where, "tune.")
    if tune.storage is not None:
        tune = tune.model_copy(update={"storage": _lasting(tune.storage)})
    for name in tune.objective:
        if name in OF_THE_TEST_SET:
            raise UserError(
                f"tune.objective: {name} is of the test set, which is for the winners alone; use validation_accuracy"
            )
        if name not in OBJECTIVES:
            raise UserError(f"tune.objective: there is no column {name!r}{near_miss(name, OBJECTIVES)}")
    if len(tune.objective) > 1 and tune.prune.by != "none":
        raise UserError(f"tune.prune.by={tune.prune.by} goes with one objective, not with {len(tune.objective)}")
    if len(tune.objective) > 1 and tune.search == "cmaes":
        raise UserError("tune.search=cmaes goes with one objective; use tpe or nsga2")
    if not tune.objective:
        raise UserError("tune.objective must name at least one column, as in {validation_accuracy: max}")
    return tune


def _lasting(url: str) -> str:
    """``url``, if it keeps what is written, from wherever it is asked for."""
    found = re.fullmatch(r"(sqlite[^:]*:///?)(.*)", url)
    if not found:
        return url
    kind, path = found.groups()
    if path in ("", ":memory:"):
        raise UserError(f"tune.storage={url} keeps nothing: name a file, as in sqlite:///studies.db")
    return kind + str(Path(path).absolute())


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
