"""Runs the product of settings by one call: :func:`simulate_many`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.api import custom_objects, handed_over, names_of
from fedray.config import Config, flat, load, plain
from fedray.errors import UserError
from fedray.experiment.first_checks import check_first
from fedray.tuning.planned import Made, Planned, Watcher, make_runs, named_data
from fedray.tuning.planned_view import RunsView
from fedray.usercode.importing import short_name
from fedray.util.arguments import as_text, callbacks_of, override_texts, whole_number
from fedray.util.uris import below, is_uri
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    from fedray.algorithms import Algorithm
    from fedray.experiment.custom import CustomObjects
    from fedray.results.compare import Comparison

MOST_RUNS = 10_000
"""The largest number of runs of one call. A product of long lists is mostly a mistake."""

LONGEST = 120
"""The number of characters that the name of a run may have."""


@dataclass(frozen=True)
class ManyRuns:
    """What :func:`simulate_many` returns.

    ``place`` is the folder of all runs, or its URI. ``runs`` maps the name of each run to the values that it has of the
    keys that differ. ``failures`` maps the names of runs that failed to the reason, and ``interrupted`` says whether
    the user has stopped them; then the same call goes on.

    Example:
        many = fedray.simulate_many({"data.clients": 20}, seeds=3, over={"algorithm.name": ["fedavg", "fedprox"]})
        print(many.compare().table)
    """

    place: str
    runs: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def __fspath__(self) -> str:
        """The folder of all runs or its URI, so that a result can be handed over in its place."""
        return self.place

    def compare(self, **arguments: Any) -> Comparison:
        """Compares the runs that have ended, as :func:`fedray.compare` does, with the same keyword arguments."""
        from fedray.results.compare import compare

        folders = [path_of(self.place, run) for run in self.runs if run not in self.failures]
        ended = [path for path in folders if is_uri(path) or (Path(path) / "summary.json").exists()]
        if not ended:
            raise UserError(f"{self.place}: no run has ended that could be compared")
        return compare(*ended, **arguments)


def simulate_many(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    over: Mapping[str, Sequence[Any]] | None = None,
    overrides: Iterable[str] = (),
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    transform: Any = None,
    algorithm: type[Algorithm] | None = None,
    upload: Sequence[Any] | None = None,
    sampling: Any = None,
    aggregation: Any = None,
    attack: Any = None,
    callbacks: Sequence[Any] = (),
    most: int | None = None,
    verbose: bool = False,
    view: Watcher | None = None,
) -> ManyRuns:
    """Makes all runs of a product of settings, side by side in one start of Ray, as many as fit on the machine or the
    cluster. Each is the run that :func:`fedray.simulate` makes with the same settings, to the bit.

    The runs have folders of their own in the folder ``run.name`` of ``run.output``. If the call is repeated, runs that
    were stopped or killed go on, and those that have ended are not made again.

    Args:
        config: What the runs have in common, as in :func:`fedray.simulate`.
        seeds: How many seeds, which are ``run.seed`` and those that follow; or a list of them.
        over: Keys of the configuration, dotted, with the values of each. There is a run for each combination.
        overrides: Texts ``key=value`` that replace keys of ``config``.
        data, test, client_column, label_column: The data of all runs, as in :func:`fedray.simulate`.
        model, loss, metrics, transform: What all runs train, as in :func:`fedray.simulate`.
        algorithm, upload, sampling, aggregation, attack: The rules of all runs, as in :func:`fedray.simulate`.
        callbacks: Callbacks for every run. Each process that makes runs has its own copy of them.
        most: How many runs are made at the same time, at most.
        verbose: Whether to show the progress.
        view: The object that shows the progress, instead of the one that ``verbose`` selects.

    Raises:
        fedray.UserError: One of the runs is not possible as it was asked for. None has begun then.
    """
    callbacks = callbacks_of(callbacks)
    objects = {"model": model, "loss": loss, "metrics": metrics, "transform": transform, "algorithm": algorithm}
    objects |= {"upload": upload, "sampling": sampling, "aggregation": aggregation, "attack": attack}
    named, objects = handed_over(data, objects)
    place, planned, runs = product(config, seeds, over or {}, [*override_texts(overrides), *named])
    if data is None and test is not None:
        raise UserError("test=... needs data=... too")
    if most is not None:
        whole_number(most, "most")
    passed = custom_objects(load(planned[0].settings), None, None, None, label_column, **objects)
    _check(planned, names_of(data, objects), passed)

    def custom(settings: Mapping[str, Any]) -> CustomObjects:
        found = custom_objects(load(settings), data, test, client_column, label_column, **objects)
        if data is None:
            of_settings = named_data(settings)
            found = replace(found, source=of_settings.source, preloaded=True)
        return replace(found, callbacks=tuple(callbacks))

    view = view or (RunsView() if verbose else RunsView(tell=PythonWarnings()))
    seen = {run.settings["run.seed"] for run in planned}
    for line in passed.notes(len(seen)):
        view.say(line)
    made: Made = make_runs(planned, place, view, custom, most)
    return ManyRuns(place, runs, made.failures, made.interrupted)


def _check(planned: Sequence[Planned], there: Sequence[str], custom: CustomObjects) -> None:
    """Raises :class:`UserError` for what can be seen to be wrong with a run before any data are read."""
    from fedray.experiment.algorithm import choose_algorithm
    from fedray.experiment.named import chosen_selection, named_uploads
    from fedray.experiment.robust import rule_of

    for run in planned:
        with _within(run.folder):
            config = load(run.settings)
            check_first(config, there)
            named_uploads(config, choose_algorithm(config, custom), custom)
            chosen_selection(config, custom)
            rule_of(config.train.aggregation, custom.aggregation)
            if config.run.resume is False:
                raise UserError("run.resume=false: give another run.name, or remove the folder of the runs")


def product(
    config: Config | Mapping[str, Any] | str | Path | None,
    seeds: int | Sequence[int],
    over: Mapping[str, Sequence[Any]],
    overrides: Sequence[str],
) -> tuple[str, list[Planned], dict[str, dict[str, Any]]]:
    """Returns the folder of the runs that :func:`simulate_many` makes, or its URI, the planned runs, and the values of
    each that differ, by the names of the runs. Raises :class:`UserError` if the settings of a run are wrong."""
    if isinstance(config, Config):
        raise UserError("simulate_many needs the file or the mapping that the configuration is loaded from")
    base = load(config, overrides)
    axes = _axes(base, seeds, over, overrides)
    count = 1
    for column in axes.values():
        count *= len(column)
    if count > MOST_RUNS:
        raise UserError(f"over: these are {count:,} runs, and {MOST_RUNS:,} are the most")
    group = base.run.name or (Path(config).stem if isinstance(config, (str, Path)) else "runs")
    place = below(base.run.output, group) if is_uri(base.run.output) else str(Path(base.run.output) / group)
    shown = _short_keys(axes)
    planned, runs = [], dict[str, dict[str, Any]]()
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        name = _name({shown[key]: value for key, value in chosen.items()})
        if name in runs:
            raise UserError(f"over: {runs[name]} and {chosen} have the same name, {name}: give one of them only")
        with _within(name):
            texts = [f"{key}={as_text(value, f'over: {key}')}" for key, value in chosen.items()]
            settings = load(config, [*overrides, *texts])
        runs[name] = chosen
        asked = _asked(settings)
        if settings.run.working_copy is not None:
            asked["run.working_copy"] = str(Path(settings.run.working_copy) / group)
        planned.append(Planned(name, asked))
    return place, planned, runs


@contextlib.contextmanager
def _within(name: str) -> Iterator[None]:
    """A context in which a mistake in the settings of the run ``name`` says which run it is."""
    try:
        yield
    except UserError as error:
        hint = "; keys that only one algorithm has go below for_algorithm, as in {fedprox: {algorithm.mu: 0.1}}"
        is_of_another = "unknown key algorithm." in str(error) and "did you mean" not in str(error)
        raise UserError(f"{name}: {error}{hint if is_of_another else ''}") from None


def path_of(place: str, run: str) -> str:
    """Returns the folder of a run, or its URI."""
    return below(place, run) if is_uri(place) else str(Path(place) / run)


def _axes(
    base: Config, seeds: int | Sequence[int], over: Mapping[str, Sequence[Any]], overrides: Sequence[str]
) -> dict[str, list[Any]]:
    """Returns the values of each key that differs between the runs, the seeds last."""
    given = {text.partition("=")[0].strip() for text in overrides}
    found: dict[str, list[Any]] = {}
    if not isinstance(over, Mapping):
        raise UserError(f"over must be a mapping from keys to lists of values, not {over!r}")
    for key, values in over.items():
        if key in ("run.seed", "run.name", "run.output"):
            raise UserError(f"over: {key} differs by itself" + (": seeds says how many" if key == "run.seed" else ""))
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise UserError(f"over: {key} needs a list of values, not {values!r}")
        if key in given:
            raise UserError(f"over: {key} is set to one value as well: leave one of the two out")
        found[key] = list(values)
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found["run.seed"] = list(seeds)
    else:
        found["run.seed"] = list(range(base.run.seed, base.run.seed + whole_number(seeds, "seeds")))
    if not found["run.seed"]:
        raise UserError("seeds: give at least one")
    return found


def _short_keys(axes: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each key what names of runs have for it: its last word, if no other key has the same."""
    last = [key.rpartition(".")[2] for key in axes]
    return {
        key: key if last.count(word) > 1 and key != "algorithm.name" else word
        for key, word in zip(axes, last, strict=True)
    }


def _name(values: Mapping[str, Any]) -> str:
    """Returns the name of a run, such as ``fedavg-alpha_0.1-seed_0``."""
    parts = [
        short_name(value) if key == "name" and isinstance(value, str) else f"{key}_{value}"
        for key, value in values.items()
    ]
    name = plain("-".join(parts))
    if len(name) > LONGEST:
        raise UserError(
            f"over: a run would have the name {name[:40]}..., which is too long: make a file for each value"
        )
    return name


def _asked(config: Config) -> dict[str, Any]:
    """Returns what a configuration sets, by dotted key. What ``for_algorithm`` says has been applied."""
    found = config.model_dump(mode="json", exclude_unset=True)
    found.pop("for_algorithm", None)
    return flat(found)
