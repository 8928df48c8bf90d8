"""The system stage: the virtual clock, from ``system.*``.

It decides whether there is one, and says before the first round what it will show, and what nobody can meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.config.system import SystemConfig
from fedray.core.rounding import whole_units_up
from fedray.core.upload import UploadStep
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.experiment.model import ModelStage
from fedray.experiment.named import selection_name
from fedray.experiment.permissions import allows, require
from fedray.experiment.stage import Stage, under
from fedray.experiment.training import TrainingStage
from fedray.selection import Selection
from fedray.system.availability import availability_of
from fedray.system.buffered import Schedule
from fedray.system.clock import Clock, PhaseCost, legs
from fedray.system.devices import MAY_NAME_FILES, counts_of, devices_of, is_file, with_absolute_paths
from fedray.tracking.costs import costs_by_phase
from fedray.util.files import sha256_of_file
from fedray.warning import WARNING


@dataclass(frozen=True, kw_only=True)
class SystemStage(Stage):
    """What the system stage has decided. ``draws`` is how many clients are drawn for a round: the cohort, or more with
    ``system.over_select``. ``digests`` has those of the files that ``system`` names, by key."""

    draws: int
    digests: dict[str, str]


def system_stage(
    config: Config,
    data: FederatedData,
    training: TrainingStage,
    model: ModelStage,
    selection: Selection,
    upload: Sequence[UploadStep],
) -> SystemStage:
    """Reads what ``config`` says about the clients' devices, and checks it. ``data``, ``training``, ``model``,
    ``selection`` (who takes part) and ``upload`` (the steps that uploads pass) are what was decided about these.

    Raises :class:`UserError` if a file is wrong, there are too few clients to draw more than a cohort, or no client can
    meet the deadline.
    """
    system, cohort = config.system, training.cohort_size
    if not system.is_on:
        return SystemStage(settings={}, draws=cohort, digests={})
    if system.mode == "buffered":
        _check_buffered(config, training.algorithm, selection, data.active)
    draws = whole_units_up(cohort * system.over_select)
    if draws > data.active:
        raise UserError(
            f"system.over_select={system.over_select:g} draws {draws} clients for a cohort of {cohort}, and only "
            f"{data.active} have samples"
        )
    phases = costs_by_phase(training.algorithm, model.facts, training.local, data.sizes(), upload)
    clock = _clock(system, phases, data, cohort, config.run.seed)
    named = {f"system.{key}": with_absolute_paths(getattr(system, key)) for key in MAY_NAME_FILES}
    buffered = {"buffer": cohort, "concurrency": system.concurrency or min(2 * cohort, data.active)}
    present = np.flatnonzero(data.sizes())
    return SystemStage(
        settings=named | (under("system", buffered) if system.mode == "buffered" else {}),
        draws=draws,
        digests={
            f"{key}={path}": sha256_of_file(Path(path))
            for key, value in named.items()
            for path in ([value] if isinstance(value, str) else value or ())
            if is_file(path)
        },
        notes=(
            *_notes_of_devices(system, data.clients, buffered),
            *_notes_of_time(clock, present, draws),
            *_notes_of_windows(clock, present),
        ),
    )


def _check_buffered(config: Config, algorithm: Algorithm, selection: Selection, clients: int) -> None:
    """Checks that rounds can be asynchronous, and raises :class:`UserError` if not."""
    concurrency = config.system.concurrency
    if not allows(type(selection), "uniform"):
        kind = selection_name(config.train.sampling)
        raise UserError(f"system.mode=buffered draws clients one by one: train.sampling={kind} can't")
    what = "its server's rule is right for answers that began with different models"
    require(algorithm, config.algorithm.name, "asynchronous", "system.mode=buffered", what)
    if config.run.diagnostics:
        raise UserError("run.diagnostics compares clients that began together, and system.mode=buffered has none")
    if config.run.eval_local_models:
        raise UserError("run.eval_local_models is for clients of the same round, and system.mode=buffered has none")
    if concurrency is not None and concurrency > clients:
        raise UserError(f"system.concurrency={concurrency} is more than the {clients} clients that have samples")


def clock_of(experiment: Experiment, data: FederatedData) -> Clock | None:
    """Returns the virtual clock of a run of ``experiment`` on ``data``, or None if ``system`` says nothing."""
    system = experiment.config.system
    if not system.is_on:
        return None
    phases = costs_by_phase(
        experiment.algorithm, experiment.facts, experiment.training, data.sizes(), experiment.upload
    )
    # whoever takes part independently of the others must not be in the place of another, however fast that is
    independent = experiment.privacy is not None and experiment.privacy.participation is not None
    awaited = data.active if independent else experiment.cohort_size
    return _clock(system, phases, data, awaited, experiment.config.run.seed)


def schedule_of(clock: Clock, present: NDArray[np.int64]) -> Schedule:
    """Returns who trains when in asynchronous rounds on the devices of ``clock``. ``present`` are the clients that have
    samples, ``[N]``."""
    system, (phase,) = clock.system, clock.phases
    assert system.buffer, "system.mode=buffered"
    assert system.concurrency, "system.mode=buffered"
    return Schedule(
        lambda client: legs(clock.devices, phase, client),
        1e6 * (system.server_mbps or math.inf),
        clock.availability,
        present,
        buffer=system.buffer,
        concurrency=system.concurrency,
        dropout=system.dropout,
        seed=clock.seed,
    )


def _clock(system: SystemConfig, phases: list[PhaseCost], data: FederatedData, cohort: int, seed: int) -> Clock:
    names = data.client_names
    devices = devices_of(system, data.clients, seed, names)
    return Clock(system, devices, availability_of(system.availability, data.clients, seed, names), phases, cohort, seed)


def _notes_of_devices(system: SystemConfig, clients: int, buffered: Mapping[str, int]) -> Iterator[str]:
    """Yields lines about what ``system`` says that few would expect. ``buffered`` has the settings of asynchronous
    rounds."""
    for kind in ("devices", "networks"):
        asked = getattr(system, kind)
        for name, count in counts_of(asked, clients).items() if isinstance(asked, Mapping) else ():
            if asked[name] and not count:
                share = f"a share of {asked[name]:g}, which is none of {clients} clients"
                yield f"{WARNING}system.{kind}: {name} has {share}"
    if system.mode == "buffered" and buffered["buffer"] > buffered["concurrency"]:
        yield (
            f"system.buffer={buffered['buffer']} is more than system.concurrency={buffered['concurrency']}: an update "
            "waits for clients that begin after others have answered"
        )


def _notes_of_time(clock: Clock, present: NDArray[np.int64], draws: int) -> Iterator[str]:
    """Yields lines about what the clients with samples, ``present``, will take, of which ``draws`` begin a round.
    Raises :class:`UserError` if none of them can meet the deadline of a phase."""
    system = clock.system
    if not any(clock.alone(place)[present].any() for place in range(len(clock.phases))):
        yield from _note_of_no_time(system)
    for place, phase in enumerate(clock.phases):
        alone = clock.alone(place)[present]
        of_phase = f" in phase {phase.name}" if len(clock.phases) > 1 else ""
        if alone.any():
            yield (
                f"virtual clock: a client takes {np.median(alone):.3g} s{of_phase} in the median ({alone.min():.3g} to "
                f"{alone.max():.3g})"
            )
        if system.deadline_seconds is None or system.on_late == "keep":
            continue
        fastest = int(present[alone.argmin()])
        if alone.min() > system.deadline_seconds:
            raise UserError(
                f"system.deadline_seconds={system.deadline_seconds:g} is less than even client {fastest}, the fastest "
                f"one, needs{of_phase}: {clock.arithmetic(place, fastest)}"
            )
        first = clock.together(place, np.sort(present[alone.argsort(kind="stable")[:draws]])).min()
        if first > system.deadline_seconds:
            yield (
                f"{WARNING}if the {draws} fastest clients begin{of_phase} together and share "
                f"system.server_mbps={system.server_mbps:g}, the first answers after {first:.4g} s, and "
                f"system.deadline_seconds={system.deadline_seconds:g}: rounds will have nobody"
            )
        late = int((alone > system.deadline_seconds).sum())
        if late:
            yield (
                f"{WARNING}{late} of the {len(present)} clients can never meet "
                f"system.deadline_seconds={system.deadline_seconds:g}{of_phase}, and never count"
            )


def _note_of_no_time(system: SystemConfig) -> Iterator[str]:
    """Yields a line if ``system`` asks for the first answers, and all come at the same moment."""
    asked = ["system.mode=buffered"] if system.mode == "buffered" else []
    if system.over_select > 1:
        asked.append(f"system.over_select={system.over_select:g}")
    if system.deadline_seconds is not None:
        asked.append(f"system.deadline_seconds={system.deadline_seconds:g}")
    if asked and not system.dropout and system.availability is None:
        yield (
            f"{WARNING}{' and '.join(asked)}: what clients do takes no time, so that all answer at once and nobody is "
            "late; set system.devices and system.networks, or speeds"
        )


def _notes_of_windows(clock: Clock, present: NDArray[np.int64]) -> Iterator[str]:
    """Yields a line if some of the clients ``present`` can never be reached for as long as their work takes. Raises
    :class:`UserError` if none can."""
    longest = clock.availability.longest(present)
    needed = np.sum([clock.alone(place)[present] for place in range(len(clock.phases))], axis=0)
    short = int((needed > longest).sum())
    if short == len(present):
        place = int((needed - longest).argmin())
        client = int(present[place])
        of_clients = [number for number, phase in enumerate(clock.phases) if not phase.is_at_server]
        sums = ", then ".join(clock.arithmetic(number, client) for number in of_clients)
        raise UserError(
            f"system.availability: nobody can ever answer: client {client}, which comes closest, can be reached for "
            f"{longest[place]:.4g} s at a time, and needs {needed[place]:.4g} s: {sums}"
        )
    if short:
        yield (
            f"{WARNING}{short} of the {len(present)} clients can never be reached for as long as they need "
            "(system.availability), and never count"
        )
