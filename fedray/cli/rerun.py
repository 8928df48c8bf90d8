"""Repeats a run, or all runs of a sweep's trial, from their folders on disk, and compares the results."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedray.config import assign, expand, flat, plain, read_file
from fedray.errors import UserError
from fedray.tuning.spec import RECORD, read_record

if TYPE_CHECKING:
    from fedray.tracking.result import RunResult


@dataclass(frozen=True)
class Rerun:
    """A run that was made a second time, to check that its results can be reproduced.

    ``original`` is the folder of the first run, and ``result`` the result of the second. ``rounds`` is the number of
    rounds that both runs have, in which they are compared. ``differ`` names what is not the same to the bit: columns of
    metrics.csv in these rounds, and ``model`` for the final model.
    """

    original: Path
    result: RunResult
    rounds: int
    differ: tuple[str, ...]


def rerun(folder: Path, overrides: Iterable[str] = (), verbose: bool = False) -> list[Rerun]:
    """Repeats a run, or all runs of a sweep's trial, and compares the results, to check that they can be reproduced.

    Args:
        folder: The folder of the run, or of the trial (one choice of hyper-parameters). Each run is repeated with the
            configuration that is recorded in its folder, in a new folder below ``runs/``.
        overrides: Texts ``key=value`` that replace keys of the recorded configuration.
        verbose: Whether progress is shown.

    Returns:
        A :class:`Rerun` for each run that was repeated. After an interruption the remaining runs are left out.

    Raises:
        UserError: There is no run in ``folder``, or a run there has not finished a round.
    """
    from fedray.api import simulate
    from fedray.tracking.folder import UNRECORDED

    done = []
    for original in runs_in(folder):
        values = expand({**UNRECORDED, **flat(read_file(original / "config.yaml"))})
        name = plain(
            "-".join(part for part in original.absolute().parts[_parts_outside_sweep(original) :] if part != "trials")
        )
        if Path("runs", name).resolve() == original.resolve():
            name = f"{name}-again"
        values["run"] |= {"output": "runs/", "name": name, "resume": "auto"}
        for override in overrides:
            assign(values, override)
        if not (original / "metrics.csv").exists():
            raise UserError(
                f"--from-trial {folder}: {original} has made no round; {original.parent}/error.txt says why"
            )
        if Path(values["run"]["output"], values["run"]["name"]).resolve() == original.resolve():
            raise UserError(
                f"--from-trial {folder}: {original} can't be repeated in its own folder; leave run.output and "
                "run.name out"
            )
        _require_whole(folder, original)
        result = simulate(values, verbose=verbose)
        done.append(Rerun(original, result, *_compare(original, result.folder)))
        if result.summary["status"] == "interrupted":
            break
    return done


def _parts_outside_sweep(run: Path) -> int:
    """Returns how many parts of a run's path come before the name of its sweep, which may itself consist of several
    folders. The parts from there on name the repeated run.

    For a run that belongs to no sweep it returns -1, the index of the last part.
    """
    for parent in run.absolute().parents:
        if (parent / RECORD).is_file():
            return len(parent.parts) - len(Path(read_record(parent)["tune"]["name"]).parts)
    return -1


def runs_in(folder: Path) -> list[Path]:
    """Finds the runs in ``folder`` and returns their folders: ``folder`` itself if it is the folder of a run, or the
    folders of the runs with different seeds if it is the folder of a sweep's trial.

    Raises :class:`UserError` if there is no run.
    """
    found = [path.parent for path in (*folder.glob("config.yaml"), *sorted(folder.glob("seed-*/config.yaml")))]
    if not found:
        raise UserError(f"--from-trial {folder}: there is no run in it, as in sweeps/NAME/trials/0007")
    return found


MEASURED = ("round_seconds", "wall_seconds")
"""The columns of metrics.csv that differ each time. ``virtual_seconds`` does not."""


def _compare(original: Path, again: Path) -> tuple[int, tuple[str, ...]]:
    """Compares a run with its repetition, both given by their folders. Returns the number of rounds that both have, and
    the names of the columns that differ in these rounds, with ``model`` for the final model.

    Times are not compared. The final models are compared only if both runs have the same number of rounds.
    """
    one, other = (_rows(folder) for folder in (original, again))
    common = sorted(one.keys() & other.keys(), key=int)
    differ = {
        name
        for number in common
        for name, value in one[number].items()
        if name not in MEASURED and value and other[number].get(name) and value != other[number][name]
    }
    hashes = [_model_sha256(folder) for folder in (original, again)]
    if len(one) == len(other) and None not in hashes and hashes[0] != hashes[1]:
        differ.add("model")
    return len(common), tuple(sorted(differ))


def _require_whole(folder: Path, original: Path) -> None:
    try:
        _rows(original)
        _model_sha256(original)
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        raise UserError(
            f"--from-trial {folder}: the metrics.csv or summary.json of {original} is damaged, so that nothing can be "
            "compared with it"
        ) from None


def _rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return {row["round"]: row for row in csv.DictReader(file)}


def _model_sha256(folder: Path) -> str | None:
    path = folder / "summary.json"
    return json.loads(path.read_text())["model_sha256"] if path.exists() else None
