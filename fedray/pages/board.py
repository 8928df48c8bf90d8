"""Shows runs in TensorBoard, under names that say what they are (``fedray tensorboard``)."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from fedray.errors import UserError
from fedray.results.grouping import group_runs
from fedray.results.runs import SET_ASIDE, Run, run_folders, settings_of, walk
from fedray.tracking.tensorboard import write_layout
from fedray.tuning.spec import RECORD

EVENTS = "events.out.tfevents.*"

LOOK_AGAIN = 30
"""Seconds after which it is looked for runs that have begun since."""

CHARTS = {
    "accuracy": {
        "test accuracy": ["accuracy/test"],
        "validation accuracy": ["accuracy/validation"],
        "all models": ["accuracy/(test|representation|personalized|finetuned|averaged|server)"],
    },
    "loss": {"test loss": ["loss/test"], "training loss": ["loss/train"]},
}
"""The charts of the tab Custom Scalars. Each has the curves of all runs."""


MOST_TICKED = 40
"""The number of runs above which TensorBoard begins with none of them ticked, and empty charts."""


@contextlib.contextmanager
def board(folder: Path, host: str, port: int | None) -> Iterator[tuple[str, int, Callable[[threading.Event], object]]]:
    """A context in which TensorBoard shows the runs in ``folder`` and below it.

    It yields the address, the number of runs, and a function that waits until an event is set, while it looks for new
    runs. The folder of a sweep is shown as it is, since its trials have numbers. Raises :class:`UserError` if there are
    no events, or if the port is taken.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is {'no folder' if folder.exists() else 'not there'}: give one with runs")
    shown = sum(1 for _, _, files in walk(folder) if fnmatch.filter(files, EVENTS))
    if not shown:
        raise UserError(f"there are no events of a run in {folder}")
    if (folder / RECORD).exists():
        yield _launch(folder, host, port), shown, lambda stop: stop.wait()
        return
    with tempfile.TemporaryDirectory(prefix="fedray-tensorboard-") as scratch:
        write_layout(Path(scratch), CHARTS)
        link(folder, Path(scratch))

        def wait(stop: threading.Event) -> None:
            while not stop.wait(LOOK_AGAIN):
                link(folder, Path(scratch))

        yield _launch(Path(scratch), host, port), shown, wait


def _launch(folder: Path, host: str, port: int | None) -> str:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(logdir=str(folder), host=host, port=port)
    # it also tells there that it reads events in the fast way
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return str(board.launch())
    except (program.TensorBoardServerException, OverflowError) as error:
        raise UserError(f"TensorBoard can't be started: {error}") from None
    except SystemExit:
        raise UserError(f"TensorBoard can't be started at {host}: {' '.join(told.getvalue().split())}") from None


def link(folder: Path, into: Path) -> None:
    """Makes a link in ``into`` for each run in ``folder`` and below it, under a name that says what it is.

    Of a sweep there is one link to its folder, whose trials have numbers. A link that is there stays, so that
    TensorBoard does not lose the run.
    """
    linked = {os.readlink(path): path.name for path in into.iterdir() if path.is_symlink()}
    taken = set(linked.values())
    sweeps = [place for place, _, files in walk(folder) if RECORD in files]
    runs = [run for run in run_folders([folder]) if not any(sweep in run.parents for sweep in sweeps)]
    found = [(sweep, str(sweep.relative_to(folder)).replace("/", "_")) for sweep in sweeps]
    found += [(run, name) for run, name in names_of(runs).items() if next(run.glob(EVENTS), None) is not None]
    for path, name in found:
        target = str(path.resolve())
        if target in linked:
            continue
        free = next(each for number in range(1, 10_000) if (each := _numbered(name, number)) not in taken)
        taken.add(free)
        (into / free).symlink_to(target)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} ({number})"


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns a name for each run folder: what it differs in from the others, and its seed. Whatever can't be read, or
    was set aside, has the name of its folder."""
    names, runs = {}, []
    for folder in folders:
        names[folder] = folder.resolve().name
        with contextlib.suppress(UserError, OSError):
            if SET_ASIDE not in folder.name:
                runs.append(Run(folder, settings_of(folder), {}, {}, pd.DataFrame()))
    for group in group_runs(runs):
        for run in group.runs:
            parts = [group.place, group.label, f"seed {run.seeds[0]}" if len(group.runs) > 1 else ""]
            names[run.folder] = ", ".join(filter(None, parts)).replace("/", "_")
    return names
