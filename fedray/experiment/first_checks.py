"""Finds mistakes in the configuration of a run within a moment, before slow imports and before Ray is started.

Everything is checked again, and in more detail, where it is used.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from fedray.config import Config, run_name
from fedray.data.sources.columns import Columns
from fedray.data.sources.registry import check_source
from fedray.errors import UserError
from fedray.loggers import LOGGERS
from fedray.usercode.extensions import check_entry
from fedray.usercode.importing import check_user_object, is_user_defined
from fedray.util.uris import is_uri


def check_first(config: Config, custom: Collection[str] = ()) -> None:
    """Finds mistakes in a configuration within a moment, before slow imports and before Ray is started.

    ``custom`` has the names of the objects that the user passed from Python, such as ``data`` and ``model``. The keys
    that these objects replace are not checked. Raises :class:`UserError` if a key names something that does not exist,
    such as an unknown algorithm or a missing file, if the configuration does not fit the objects, or if the run folder
    can't be written to.
    """
    check_custom(config, custom)
    if "data" not in custom:
        check_source(config.data)
    if "algorithm" not in custom:
        _check_name(config.algorithm.name, "algorithm.name", "algorithms", "find_algorithm")
    if "model" not in custom:
        _check_name(config.model.name, "model.name", "models", "find_model")
    _check_name(config.model.head, "model.head", "models.heads", "find_head")
    _check_extensions(config)
    weights = config.model.weights
    if weights is not None:
        try:
            Path(weights).stat()
        except (OSError, ValueError) as error:
            raise UserError(f"model.weights: can't read {weights}: {getattr(error, 'strerror', error)}") from None
    _check_output(config, custom)


def _check_extensions(config: Config) -> None:
    """Raises :class:`UserError` for an impossible name in the keys that can name user-defined objects, such
    as ``task.loss``."""
    kinds = {
        "engine.kind": config.engine.kind,
        "train.aggregation.kind": config.train.aggregation.kind,
        "attack.kind": config.attack.kind or "",
    }
    for key, kind in kinds.items():
        check_user_object(kind, key)
    for entry in config.run.callbacks:
        check_entry(entry, "run.callbacks")
    loggers = [check_entry(entry, "run.loggers", LOGGERS) for entry in config.run.loggers]
    for name in loggers:
        if name in LOGGERS and loggers.count(name) > 1:
            raise UserError(f"run.loggers has {name} more than once: a run is shown in one place of each tool")
    for entry in config.train.upload:
        check_entry(entry, "train.upload", importlib.import_module("fedray.uploads").STEPS)
    check_entry(config.train.sampling, "train.sampling", importlib.import_module("fedray.selection").SELECTIONS, "kind")
    functions = [("task.metrics", name) for name in config.task.named_metrics.values()]
    for key, name in [*([("task.loss", config.task.loss)] if config.task.loss else []), *functions]:
        if is_user_defined(name):
            check_user_object(name, key)
        else:
            check_entry(name, key, importlib.import_module("fedray.core.task").LOSSES)


def check_custom(config: Config, names: Collection[str]) -> None:
    """Checks that ``config`` can be used with the objects that the user passes from Python. ``names`` has the names of
    these objects, such as ``data``.

    Raises :class:`UserError` if ``config`` was made with objects (``run.given``) that are not passed now, or if it sets
    keys that have no meaning with the objects that are passed.
    """
    missing = [f"{name}=" for name in config.run.given if name not in names]
    if missing:
        call = "".join(f", {name}=..." + (", test=..." if name == "data" else "") for name in config.run.given)
        raise UserError(
            f"run.given: this configuration was made with {' and '.join(missing)} given from Python, which it does not "
            f"hold: use fedray.simulate(CONFIG{call})"
        )
    if "data" in names and (keys := Columns.of(config.data).keys_set):
        raise UserError(
            f"{keys[0]} is for data.source; with data=... columns are named by label_column= and client_column=, and "
            "all others are inputs"
        )
    for key in ("root", "variant") if "data" in names else ():
        if (value := getattr(config.data, key)) is not None:
            raise UserError(f"data.{key}={value} is for data.source, and data=... takes its place")


def _check_name(name: str, key: str, module: str, find: str) -> None:
    """Raises :class:`UserError` if ``find``, a function in fedray's ``module``, does not know ``name``.

    The module imports torch, which takes seconds. So ``find`` is called only if the source files beside the module
    have ``name`` neither as a class nor as a text.
    """
    if is_user_defined(name):
        return check_user_object(name, key)
    folder = Path(__file__).parent.parent / module.partition(".")[0]
    code = "".join(file.read_text("utf-8") for file in folder.glob("*.py"))
    known = {word.lower() for pair in re.findall(r'class (\w+)|"(\w+)"', code) for word in pair}
    if name not in known:
        getattr(importlib.import_module(f"fedray.{module}"), find)(name)


def _check_output(config: Config, custom: Collection[str]) -> None:
    if is_uri(config.run.output) and "data" in custom and not config.run.name:
        raise UserError(f"run.output={config.run.output} needs run.name, because the data have no name of their own")
    folder = config.run.place / run_name(config, config.data.source)
    try:
        os.fsencode(folder)
    except UnicodeEncodeError:
        raise UserError(
            f"run.output={config.run.output}, run.name={config.run.name}: this system's locale has no such letters in "
            "the names of files; set LC_ALL=C.UTF-8"
        ) from None
    try:
        has_ended = (folder / "summary.json").is_file()
        above = next(each for each in folder.absolute().parents if each.exists())
    except OSError as error:
        raise UserError(f"can't write to {config.run.place_setting}: {error.strerror}") from None
    if has_ended and config.run.resume is not False:
        # a run that has ended is only read, and any other is checked when its folder is opened
        return
    effective = os.access in os.supports_effective_ids
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK, effective_ids=effective):
        reason = "Permission denied" if above.is_dir() else "Not a directory"
        raise UserError(f"can't write to {config.run.place_setting}: {reason}")
