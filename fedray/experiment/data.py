"""The data stage: reads the source, partitions it among the clients, and sets samples aside for evaluations.

It decides ``data.*`` and, because it depends on the source, ``run.name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedray.algorithms import Algorithm
from fedray.config import Config, run_name
from fedray.core.structure import leaves
from fedray.data.federated import FederatedData, federate, with_public_at_clients, with_train_subset
from fedray.data.normalization import of_numbers
from fedray.data.partitions.partition import kind_of, resolved_defaults
from fedray.data.partitions.test_shares import draw_eval_clients, with_test_shares
from fedray.data.sources.doubts import doubts
from fedray.data.sources.source import Source, source_of
from fedray.data.storage.access import MapAll, with_access
from fedray.data.storage.contents import content_key, data_digests
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.stage import Stage, defaults_for_nulls, under


@dataclass(frozen=True, kw_only=True)
class DataStage(Stage):
    """What the data stage has decided: the samples of a run, partitioned among the clients (``data``), and the settings
    that depend on the data.

    ``digests`` has a sha256 for each part of the data, by name, such as ``test data``. ``access`` says where samples
    are read from: ``memory``, ``mapped`` (files that are mapped into memory) or ``lazy`` (one by one, when they are
    used). ``run_name`` is the name of the run's folder. ``defaults`` has the values that null stands for in the options
    of the partition, by dotted key.
    """

    data: FederatedData
    digests: dict[str, str]
    access: str
    run_name: str
    defaults: Mapping[str, Any]


def data_stage(config: Config, custom: CustomObjects, algorithm: Algorithm, map_all: MapAll) -> DataStage:
    """Reads the data that ``config`` describes, partitions them among the clients, and keeps them in memory or in
    files, as ``data.access`` says.

    ``custom`` may have data that the user passed from Python, which are used instead. ``algorithm`` says whether a
    public set is needed, that is, samples for the server that no client has. ``map_all(arrays, folder)`` writes samples
    into files of a folder and maps them into memory, if ``data.access`` asks for that
    (:func:`fedray.data.storage.access.with_access`). Raises :class:`UserError` if the data can't be read, or can't be
    partitioned as the configuration asks.
    """
    source = custom.source or source_of(config.data, config.task)
    if config.data.mean is not None and config.data.std is not None:
        source = replace(source, **of_numbers(config.data.mean, config.data.std, source.name, source.x_train))
    seed = config.run.seed if config.data.seed is None else config.data.seed
    public = _public_samples(config, algorithm, source)
    data, notes = _spread(config, algorithm, source, seed, public)
    _check_models_to_save(config, algorithm, data)
    digests = data_digests(source, data)
    data, access, lines = with_access(data, config.data.access, partial(content_key, digests, data), map_all)
    kind = kind_of(config.data, source.client_train is not None, data.task == "classification")
    defaults = resolved_defaults(kind)
    source_name = source.name if "data" in custom.names else config.data.source
    name = run_name(config, source_name)
    return DataStage(
        data=data,
        digests=digests,
        access=access,
        run_name=name,
        defaults=under("data.partition", defaults),
        settings={
            "run.name": name,
            "run.given": custom.names,
            "data.source": source_name,
            "data.seed": seed,
            "data.clients": data.clients,
            "data.public_samples": public,
            "data.access": access,
            "data.partition.kind": kind,
            **under("data.partition", defaults_for_nulls(config.data.partition, defaults)),
        },
        notes=(
            *data.notes,
            *doubts(source),
            *notes,
            *lines,
            *_note_on_public_set(config, source, data),
        ),
    )


def _check_models_to_save(config: Config, algorithm: Algorithm, data: FederatedData) -> None:
    """Checks that there are the clients and rounds whose models a run is to save. Raises :class:`UserError` if not."""
    late = [number for number in config.run.local_models_in if number > config.rounds]
    if late:
        raise UserError(f"run.local_models_in: round {late[0]} is beyond the last one, {config.rounds}")
    named = {key: getattr(config.run, key) for key in ("local_models_of", "personal_models_of")}
    named = {key: [] if asked == "all" else asked for key, asked in named.items()}
    for key, asked in named.items():
        absent = [client for client in asked if client >= data.clients]
        if absent:
            raise UserError(f"run.{key}: there is no client {absent[0]}, but 0 to {data.clients - 1}")
    empty = [client for client in named["personal_models_of"] if not data.sizes()[client]]
    if empty:
        raise UserError(f"run.personal_models_of: client {empty[0]} has no samples")
    if config.run.personal_models_of and not (algorithm.has_personal_model() or config.model.private):
        raise UserError(f"run.personal_models_of: algorithm.name={config.algorithm.name} has no personal models")


def _public_samples(config: Config, algorithm: Algorithm, source: Source) -> int:
    """Returns the number of samples in the public set (samples that are held out of the clients' data) that ``config``
    asks for. ``auto`` stands for the source's default if the algorithm needs a public set, else for 0."""
    asked, name = config.data.public_samples, config.algorithm.name
    if config.data.public_to == "clients":
        if algorithm.needs_public:
            raise UserError(f"data.public_to=clients: {name} trains a model on the public set; use server")
        if asked in ("auto", 0):
            raise UserError("data.public_to=clients: there is no public set to distribute; give data.public_samples")
    if asked == "auto":
        count = source.public_by_default if algorithm.needs_public else 0
        if algorithm.needs_public and not count:
            raise UserError(
                f"{name} trains a model on a public set, and a tenth of {len(source.y_train)} training samples is "
                "none: give data.public_samples"
            )
        return count
    if algorithm.needs_public and asked == 0:
        raise UserError(f"data.public_samples=0: {name} trains a model on a public set; use auto")
    return asked


def _spread(
    config: Config, algorithm: Algorithm, source: Source, seed: int, public: int
) -> tuple[FederatedData, list[str]]:
    """Returns the samples of ``source``, partitioned among the clients, and lines for the user about the partition."""
    data = federate(source, config.data, seed, public)
    if config.data.public_to == "clients":
        data = with_public_at_clients(data, seed)
    data, notes = _with_test_shares(config, algorithm, data, seed)
    if config.run.eval_train_samples:
        data = with_train_subset(data, config.run.eval_train_samples, seed)
    if config.data.augment != "none" and [*map(type, leaves(data.input_shape))] != [int] * 3:
        raise UserError(
            f"data.augment={config.data.augment} is for images, not for samples of shape {data.input_shape}"
        )
    return data, notes


def _with_test_shares(
    config: Config, algorithm: Algorithm, data: FederatedData, seed: int
) -> tuple[FederatedData, list[str]]:
    """Returns ``data``, with the clients' test shares if models are scored on these, and lines for the user about
    the shares."""
    run, least = config.run, config.data.least_test_samples
    notes: list[str] = []
    asked = [
        f"run.{key}={str(getattr(run, key)).lower()}"
        for key in ("eval_clients", "eval_local_models", "finetune_steps")
        if getattr(run, key)
    ]
    if asked and not run.eval_test:
        notes.append(f"warning: {' and '.join(asked)}: not evaluated, as run.eval_test=false leaves the test set alone")
    personal = algorithm.has_personal_model() or config.model.private
    if not (personal or run.finetune_steps or run.eval_clients):
        if least:
            notes.append(
                f"warning: data.least_test_samples={least} changes nothing, as no client is scored on its own test "
                "share: run.eval_clients and run.finetune_steps ask for that"
            )
        return data, notes
    draw_eval_clients(data, seed, run.eval_clients)
    return with_test_shares(data, seed, least), notes


def _note_on_public_set(config: Config, source: Source, data: FederatedData) -> list[str]:
    public = len(data.public)
    if config.data.public_samples != "auto" or not public or source.x_public is not None or config.data.public_overlap:
        return []
    return [
        f"warning: data.public_samples=auto: {public:,} of the {len(source.y_train):,} training samples are the "
        f"server's public set, and no client's; to compare with an algorithm that has none, give "
        f"data.public_samples={public} in both runs"
    ]
