"""The training stage: how long a run is, who takes part in a round, and how a client trains.

It decides ``run.rounds``, ``train.*``, and the hyper-parameters ``algorithm.*`` whose defaults depend on these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.core.augmentation import Augmentation, crop_flip
from fedray.core.local_training import LocalTraining
from fedray.core.rounding import whole_units, whole_units_up
from fedray.core.transform import SeededTransform
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.algorithm import misspelt_methods
from fedray.experiment.custom import CustomObjects
from fedray.experiment.named import selection_name
from fedray.experiment.stage import Stage, defaults_for_nulls, under
from fedray.selection import ROOT_MEAN_SQUARE, SECONDS, Selection
from fedray.tracking.costs import mean_load
from fedray.usercode.importing import as_user_error, home_of, import_object

EXAMPLES = 16
"""The number of samples on which a transform is tried."""


@dataclass(frozen=True, kw_only=True)
class TrainingStage(Stage):
    """What the training stage has decided: the length of a run, who takes part in a round, and how a client trains.

    ``algorithm`` is the run's algorithm, with defaults in place of null hyper-parameters; ``defaults`` has the defaults
    by dotted key. ``local`` are the settings of the clients' local training. ``transform`` is the user's transform of
    mini-batches, or None. ``rounds`` and ``cohort_size`` are the numbers of rounds and of clients in a round, and
    ``weighting`` says how the clients are weighted: by ``samples`` or ``uniform``. ``batch_size`` is the number of
    samples in the largest mini-batch, and ``total_steps`` the number of local steps of all clients in all rounds.
    """

    algorithm: Algorithm
    local: LocalTraining
    transform: SeededTransform | None
    rounds: int
    cohort_size: int
    weighting: str
    batch_size: int
    total_steps: float
    defaults: Mapping[str, Any]


def training_stage(
    config: Config, custom: CustomObjects, algorithm: Algorithm, selection: Selection, data: FederatedData
) -> TrainingStage:
    """Decides how long a run is, how many take part in a round, and how a client trains, as ``config`` describes it.

    ``custom`` may have a transform of mini-batches that the user passed from Python. ``selection`` chooses the clients
    of each round. Null hyper-parameters of
    ``algorithm`` are replaced by defaults. Raises :class:`UserError` if there are fewer clients with samples than a
    cohort (the clients of a round) or ``selection`` needs, a transform can't be used, or a schedule ends before the
    run.
    """
    train, rounds = config.train, config.rounds
    cohort_size = _cohort_size(config, data)
    _check_selection(config, selection, cohort_size, data.active, algorithm)
    transform, notes = _transform(config, custom, data)
    local = _local_training(config, transform)
    defaults = algorithm.resolved_defaults(cohort_size, data.active, local.local_steps)
    if missing := defaults_for_nulls(algorithm.hyper, defaults):
        algorithm = type(algorithm)(algorithm.hyper.model_copy(update=missing))
    # who is drawn in proportion to its samples would count for them twice, and who counts more needs more noise
    equal = config.privacy.is_on or selection.by_samples
    usual: Literal["samples", "uniform"] = "uniform" if equal else algorithm.weighting
    weighting = usual if train.weighting == "auto" else train.weighting
    advice = [
        *misspelt_methods(type(algorithm)),
        *algorithm.advice(local.momentum, cohort_size, data.active, train.server_lr),
    ]
    advice += _on_weights(config, algorithm, selection)
    if algorithm.earlier_models >= rounds and getattr(algorithm.hyper, "warmup", None) == "zero":
        advice.append(
            f"algorithm.tau={algorithm.earlier_models} is not less than the {rounds} rounds, so that there is never a "
            f"momentum, and {config.algorithm.name} trains as without it"
        )
    return TrainingStage(
        algorithm=algorithm,
        local=local,
        transform=transform,
        rounds=rounds,
        cohort_size=cohort_size,
        weighting=weighting,
        batch_size=local.batch_size or int(data.sizes().max()),
        total_steps=rounds * cohort_size * mean_load(data.sizes(), local).steps,
        defaults=under("algorithm", defaults),
        settings={
            "run.rounds": rounds,
            "run.iterations": None,
            "train.local_steps": local.local_steps,
            "train.cohort_size": cohort_size,
            "train.participation": None,
            "train.weighting": weighting,
            "train.lr_schedule": train.lr_schedule.over(rounds),
            "train.server_lr_schedule": train.server_lr_schedule.over(rounds),
            **under("train", train.adam),
            **under("algorithm", algorithm.hyper.model_dump()),
        },
        notes=(*notes, *_note_on_iterations(config, local), *(f"warning: {line}" for line in advice)),
    )


def _on_weights(config: Config, algorithm: Algorithm, selection: Selection) -> Iterator[str]:
    """Yields warnings about ``train.weighting`` where it changes nothing, or is not meant."""
    asked, name = config.train.weighting, config.algorithm.name
    if algorithm.own_weights and asked not in ("auto", algorithm.weighting):
        yield f"train.weighting={asked} changes nothing: the rule of {name} says how much a client counts"
    if algorithm.only_weighting and asked not in ("auto", algorithm.weighting):
        usual = algorithm.weighting
        yield f"train.weighting={asked}: the paper's rule of {name} has {usual} weights, so this is another rule"
    if asked == "samples" and selection.by_samples:
        yield (
            f"train.weighting=samples: with train.sampling={selection_name(config.train.sampling)} clients are drawn "
            "by their samples already, which count twice now; auto and uniform let them count once"
        )


def _check_selection(config: Config, selection: Selection, cohort: int, active: int, algorithm: Algorithm) -> None:
    """Checks that ``selection`` can choose a ``cohort`` of the ``active`` clients that hold samples, with what is known
    in a run of ``algorithm``. Raises :class:`UserError` if not."""
    where, system = f"train.sampling={selection_name(config.train.sampling)}", config.system
    if SECONDS in selection.columns and not system.is_on:
        raise UserError(f"{where}: seconds are those of the virtual clock, and there is none (system.*)")
    if algorithm.several_models and (selection.asks or ROOT_MEAN_SQUARE in selection.columns):
        raise UserError(f"{where} goes by losses of one model, and {config.algorithm.name} has several")
    count = whole_units_up(cohort * system.over_select)
    with as_user_error(f"{where} can't choose {count} of {active} clients"):
        selection.check(count, active)
    if system.is_on and selection.asks:
        raise UserError(
            f"{where}: candidates that compute their losses first are not on the virtual clock (system.*). The losses "
            "of their last participation are known, by which {kind: power_of_choice, cached: true} chooses"
        )


def _cohort_size(config: Config, data: FederatedData) -> int:
    present, train, buffer = data.active, config.train, config.system.buffer
    if buffer is not None and (train.participation is not None or train.cohort_size not in (None, buffer)):
        key = "cohort_size" if train.participation is None else "participation"
        raise UserError(
            f"system.buffer={buffer} and train.{key}={getattr(train, key):g}: the cohort of a round are the answers "
            "that its update uses; give one of the two"
        )
    if train.participation is not None:
        return max(1, whole_units(train.participation * present))
    asked = {"system.buffer": buffer, "train.cohort_size": train.cohort_size}
    for key, size in asked.items():
        if size is not None and size > present:
            raise UserError(
                f"{key}={size} is more than the {present} clients that have samples (data.clients={data.clients})"
            )
    return buffer or train.cohort_size or present


def _transform(config: Config, custom: CustomObjects, data: FederatedData) -> tuple[SeededTransform | None, list[str]]:
    """Returns the user's transform of mini-batches, or None if there is none, and lines for the user about it."""
    asked, key = config.data.transform, "data.transform"
    if custom.transform is not None:
        transform = SeededTransform(custom.transform)
    elif asked is not None:
        transform = SeededTransform(import_object(asked, key), f"{key}={asked}", home_of(asked, key))
    else:
        return None, []
    if not callable(transform.function) or isinstance(transform.function, type):
        what = "a class" if isinstance(transform.function, type) else type(transform.function).__name__
        raise UserError(f"{transform.name} must be a function of a batch of inputs, not {what}")
    return transform, transform.check(data.stored_examples(min(len(data.y), EXAMPLES)).x)


def _local_training(config: Config, transform: SeededTransform | None) -> LocalTraining:
    train = config.train
    augment: list[Augmentation] = [crop_flip] if config.data.augment == "crop_flip" else []
    return LocalTraining(
        seed=config.run.seed,
        batch_size=None if train.batch_size == "full" else train.batch_size,
        local_steps=train.steps,
        local_epochs=train.local_epochs,
        momentum=train.momentum,
        nesterov=train.nesterov,
        momentum_reset=train.momentum_reset,
        weight_decay=train.weight_decay,
        decay_norms_and_biases=train.decay_norms_and_biases,
        grad_clip=train.grad_clip,
        optimizer=train.optimizer,
        **train.adam,
        augment=(*augment, *([] if transform is None else [transform])),
        poison=None,
    )


def _note_on_iterations(config: Config, local: LocalTraining) -> list[str]:
    asked, rounds, steps = config.run.iterations, config.rounds, local.local_steps or 0
    if asked is None or rounds * steps == asked:
        return []
    return [
        f"warning: run.iterations={asked} is not a multiple of train.local_steps={steps}: "
        f"{rounds} round{'s' if rounds > 1 else ''} of {steps} make {rounds * steps} iterations"
    ]
