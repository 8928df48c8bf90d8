"""Manages the folder of a run: its files, and whether a run may start in it, continue in it, or has ended in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from fedray.config import Config, documented_keys, flat, parse_yaml
from fedray.errors import UserError
from fedray.tracking.failure import has_failed
from fedray.tracking.lock import PATIENCE, folder_lock
from fedray.util.files import free_name
from fedray.warning import WARNING

RESULT_KEYS_OF_ENGINE = (
    "threads", "portable_bits", "device", "server_gpus", "channels_last", "vectorize", "compile",
)  # fmt: skip
KEYS_THAT_MAY_DIFFER = (
    "run.output", "run.working_copy", "run.output_timeout", "run.checkpoint_every", "run.keep_checkpoints",
    "run.resume", "run.rounds", "run.callbacks", "run.loggers", "run.group", "run.local_models_of",
    "run.local_models_in",
    # the data, model and weights behind these keys are compared directly
    "run.given", "data.root", "data.access", "model.weights",
)  # fmt: skip

UNRECORDED = MappingProxyType({"engine.compile": False, "engine.channels_last": False})
"""The values of keys in runs of older versions of fedray, which did not record them in config.yaml."""

INPUTS = "inputs.json"
"""The file with the digests of everything that a run depends on in addition to its configuration
(:mod:`fedray.experiment.inputs`)."""

BY_HAND = "changed by hand"
"""The name in :data:`INPUTS` under which stands what a user who steps through a run has changed, if anything."""

LOCAL = "local"
"""The folder with clients' models before they are averaged, which has a folder for each round."""

PERSONAL = "personal"
"""The folder with clients' personal models at the end of the run."""

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class FoundRun:
    """What was found in a run folder before a run starts in it.

    ``status`` is ``new`` if a new run starts in the folder, ``unfinished`` if the run in it is to be continued, and
    ``finished`` if there is nothing left to do. ``rounds`` is the number of rounds (``run.rounds``) in the
    configuration of the run that was found; 0 for a new run. ``summary`` is the content of its summary.json. It is None
    for a new run, or if the run has not ended, or if an error has ended it. ``line`` is what the user should be told;
    empty if there is nothing.
    """

    status: Status
    rounds: int = 0
    summary: Mapping[str, Any] | None = None
    line: str = ""


class RunFolder:
    """The folder in which a run writes its files: the folder ``run.name`` in ``run.output``, or, if ``run.output`` is a
    URI, in the run's working copy on this machine.

    ``config`` is the run's resolved configuration. ``inputs`` has the digests, by name, of everything else that the run
    depends on, such as the data. ``defaults`` maps dotted keys to the values that they take in this run if they are
    null in the configuration.
    """

    def __init__(
        self, config: Config, inputs: Mapping[str, str], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.config, self.inputs, self.defaults = config, inputs, defaults
        assert config.run.name is not None
        self.path = config.run.place / config.run.name
        self.checkpoints = self.path / "checkpoints"

    def look(self, stepped: bool = False) -> FoundRun:
        """Finds out whether the folder is new, or holds this run unfinished or finished. Nothing is changed.
        ``stepped`` says whether the run is a :class:`fedray.Simulation`, some of whose rounds may have been changed by
        hand.

        With ``run.resume: false`` the folder always counts as new. Otherwise :class:`UserError` is raised if the folder
        has other files but no run, if its files are damaged, or if it holds a run with another configuration, data,
        model or code. A run of which no round was finished gives way to another one, though: the folder then counts as
        new, and the line of the result says so. With ``run.resume: true`` it does not, and :class:`UserError` is also
        raised if there is no run yet.
        """
        resume = self.config.run.resume
        if resume is False or not (self.path / "config.yaml").exists():
            if resume is True:
                raise UserError(f"run.resume=true, but there is no run in {self.path}; use run.resume=auto")
            if resume is not False and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise UserError(f"{self.path} exists and is not a run folder: choose another run.name or run.output")
            return FoundRun("new")
        old = read_config(self.path)
        if not isinstance(old.get("run"), Mapping) or not isinstance(old["run"].get("rounds"), int):
            raise UserError(f"{self.path / 'config.yaml'} is damaged: use run.resume=false to start over")
        summary = _read_object(self.path / "summary.json", ("status", "rounds", "final_accuracy", "model_sha256"))
        if has_failed(self.path):
            summary = None
        status = None if summary is None else summary["status"]
        rounds, wanted = old["run"]["rounds"], self.config.run.rounds or 0
        differ = keys_that_differ(old, self.config.model_dump(mode="json"), self.defaults)
        differ += ["run.rounds"] if wanted < rounds and status in ("completed", "diverged") else []
        # what clients had begun of rounds that this run did not have was never trained
        differ += ["run.rounds"] if wanted > rounds and self.config.system.mode == "buffered" else []
        known = _read_object(self.path / INPUTS)
        by_hand = (known or {}).pop(BY_HAND, None)
        gives_way = resume is not True and not has_rounds(self.path)
        if by_hand and not stepped and not gives_way:
            raise UserError(
                f"{self.path} holds a run that was changed by hand ({by_hand}), and not the one that its settings "
                "describe: go on with it as a fedray.Simulation, use run.resume=false to start over (the old one is "
                "renamed), or another run.name"
            )
        differ += [BY_HAND] if by_hand and not stepped else []
        differ += names_that_differ(self.inputs if known is None else known, self.inputs)
        which = f"{', '.join(differ[:6])} differ{'s' if len(differ) == 1 else ''}"
        if differ and gives_way:
            line = (
                f"no round of the run in {self.path} was finished, and {which}: starting over (the old one is renamed)"
            )
            return FoundRun("new", line=WARNING + line)
        if differ:
            raise UserError(
                f"{self.path} holds another run ({which}): "
                "use run.resume=false to start over (the old one is renamed), or another run.name"
            )
        if known is None and resume is not True:
            raise UserError(
                f"{self.path} has no {INPUTS}, so that nobody can tell whether it is of the same data and code: "
                "run.resume=true takes it for the same run, run.resume=false starts over (the old one is renamed)"
            )
        keeps = bool(self.config.run.checkpoint_every or self._saved())
        if summary and status == "interrupted" and summary["rounds"] and not keeps and resume is not True:
            line = (
                f"the run in {self.path} was interrupted after {summary['rounds']} rounds, of which "
                "run.checkpoint_every=0 has kept nothing to go on from: starting over (the old one is renamed)"
            )
            return FoundRun("new", line=WARNING + line)
        self._check_past(old["run"], summary)
        is_complete = summary is not None and (summary["rounds"] == wanted or bool(summary.get("stopped_by")))
        is_finished = status == "diverged" or (status == "completed" and is_complete)
        return FoundRun("finished" if is_finished else "unfinished", rounds, summary)

    def _saved(self) -> list[int]:
        """Returns the rounds of the checkpoints that the folder has."""
        return [int(path.name[6:]) for path in self.checkpoints.glob("round-" + "[0-9]" * 8)]

    def _check_past(self, old: Mapping[str, Any], summary: Mapping[str, Any] | None) -> None:
        """Raises :class:`UserError` if clients' models are asked for that the run in the folder, whose section ``run``
        is ``old`` and which ended with ``summary``, can't save any more, because their rounds are over."""
        run, known = self.config.run, {*old.get("local_models_of", [])}
        saved = old.get("local_models_in", []) if {*run.local_models_of} <= known else []
        done = (summary or {}).get("rounds", max(self._saved(), default=0))
        files = {
            number: [
                self.path / LOCAL / f"round-{number:08}" / f"client-{each}.safetensors" for each in run.local_models_of
            ]
            for number in run.local_models_in
        }
        past = [n for n in files if n <= done and n not in saved and not all(each.exists() for each in files[n])]
        if past:
            raise UserError(
                f"run.local_models_in: round {past[0]} of the run in {self.path} is over, and clients' models were not "
                "saved in it: leave it out, or choose another run.name"
            )

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
        """Keeps other runs out of the run folder, in a ``with`` statement.

        If another run is using the folder, ``say`` shows a line at once, and :class:`UserError` is raised if that run
        has not ended after ``patience`` seconds.
        """
        with contextlib.ExitStack() as stack:
            try:
                busy = "is being written by another run; choose another run.name"
                stack.enter_context(folder_lock(self.path, busy, say, patience))
            except OSError as error:
                raise UserError(f"can't write to {self.config.run.place_setting}: {error.strerror}") from None
            yield

    def prepare(self, anew: bool) -> None:
        """Creates the run folder. With ``anew``, an old folder is first renamed to NAME.bak-K.

        Raises :class:`UserError` if the folder can't be written to.
        """
        try:
            if anew and self.path.exists():
                self.path.rename(free_name(self.path))
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"can't write to {self.path}: {error.strerror}") from None


def has_rounds(folder: Path) -> bool:
    """Returns whether a round of the run in ``folder`` was finished, or may have been, if a file can't be read."""
    checkpoints, summary = folder / "checkpoints", folder / "summary.json"
    try:
        if checkpoints.exists() and any(checkpoints.iterdir()):
            return True
        if summary.exists() and json.loads(summary.read_text())["rounds"]:
            return True
        return any((folder / "metrics.csv").read_text(encoding="utf-8", errors="replace").splitlines()[1:])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def names_that_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the names that have different values in the mappings ``old`` and ``new``, or that only one of them
    has."""
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def keys_that_differ(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Returns the dotted keys that differ between two configurations and can change a result, such as ``train.lr``.

    A run is not continued if there are any. ``old`` and ``new`` are configurations as nested dicts. ``defaults`` are
    the values that null stands for, by dotted key.
    """
    a, b = _comparable(old, defaults), _comparable(new, defaults)
    vectorized = b.get("engine.vectorize") is True

    def matters(key: str) -> bool:
        if key.startswith("engine."):
            name = key.removeprefix("engine.")
            return name in RESULT_KEYS_OF_ENGINE or (name == "chunk" and vectorized)
        return key not in KEYS_THAT_MAY_DIFFER

    return [key for key in names_that_differ(a, b) if matters(key)]


def _comparable(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted key, with null replaced by resolved defaults, so that two configurations can
    be compared.

    ``engine.server_gpus`` becomes whether the server computes on a GPU, because the result depends on nothing else
    in it.
    """
    found = {key: defaults.get(key) if value is None else value for key, value in with_unrecorded(config).items()}
    on_gpu = found["engine.device"] == "cuda" and bool(found["engine.server_gpus"])
    return dict(sorted(found.items())) | {"engine.server_gpus": on_gpu}


def with_unrecorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings of a run by dotted key, from ``config``, the content of its config.yaml.

    Older versions of fedray did not record some keys. These get the values that were in effect then:
    :data:`UNRECORDED`, or else their defaults.
    """
    return {key: default for key, default, *_ in documented_keys()} | UNRECORDED | flat(config)


def device_of(folder: Path) -> Literal["cpu", "cuda"] | None:
    """Returns the device on which the run in ``folder`` began, ``cpu`` or ``cuda``, since a resumed run must keep it.

    Returns None if there is no run, or its configuration is damaged.
    """
    device = _recorded_engine(folder).get("device")
    return device if device in ("cpu", "cuda") else None


def decided_in(folder: Path) -> dict[str, bool]:
    """Returns the values of ``engine.compile`` and ``engine.channels_last`` with which the run in ``folder`` began,
    since a resumed run must keep them.

    They are booleans, under the names ``compile`` and ``channels_last``. The result is empty if there is no run, or its
    configuration is damaged.
    """
    recorded = _recorded_engine(folder)
    found = {name.removeprefix("engine."): value for name, value in UNRECORDED.items() if recorded} | dict(recorded)
    return {name: found[name] for name in ("compile", "channels_last") if isinstance(found.get(name), bool)}


def _recorded_engine(folder: Path) -> Mapping[str, Any]:
    """Returns the section ``engine`` of the run in ``folder``. It is empty if it can't be read, or if no round of the
    run was finished, so that nothing has to be kept."""
    if not has_rounds(folder):
        return {}
    found = read_config(folder).get("engine")
    return found if isinstance(found, Mapping) else {}


def read_config(folder: Path) -> Mapping[str, Any]:
    """Returns the content of the config.yaml in a folder, or an empty mapping if it can't be read."""
    try:
        found = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _read_object(path: Path, keys: Sequence[str] = ()) -> dict[str, Any] | None:
    """Returns the object in a JSON file of a run as a dict, or None if the file does not exist.

    Raises :class:`UserError` if the file does not hold an object with the keys ``keys``.
    """
    if not path.exists():
        return None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and all(key in found for key in keys):
            return found
    raise UserError(f"{path} is damaged: use run.resume=false to start over")


def is_finished(run: Path) -> bool:
    """Returns whether the run in the folder ``run`` has completed or diverged. False means that the run still has to be
    made or continued.

    Raises :class:`UserError` if the summary.json of the run is damaged.
    """
    path = run / "summary.json"
    try:
        return path.exists() and json.loads(path.read_text())["status"] in ("completed", "diverged")
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: remove {run}, and the run is made again") from None
