"""Makes a whole experiment from a configuration, and checks every section against the layer that declares its keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedray.algorithms import Algorithm, find_algorithm
from fedray.config import Config, check, dump_yaml, flat, run_name, unknown_key
from fedray.core.batches import has_single
from fedray.core.local_training import LocalTraining
from fedray.core.rounding import whole
from fedray.core.structure import leaves
from fedray.core.task import Task
from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData, federate, with_public_dealt, with_train_subset
from fedray.data.partitions.partition import kind_of
from fedray.data.partitions.test_shares import draw_eval_clients, with_test_shares
from fedray.data.sources.columns import Columns
from fedray.data.sources.source import Source, source_of
from fedray.data.storage.access import MapAll, with_access
from fedray.data.storage.contents import content_key, data_digests
from fedray.data.storage.mapping import map_arrays
from fedray.errors import UserError
from fedray.experiment.backend import gradient_graph, in_stacks, is_compiled, is_replayed
from fedray.experiment.experiment import Experiment, Own
from fedray.experiment.first_checks import check_given
from fedray.experiment.implied import implied_values, notes_on, values_for_nulls
from fedray.experiment.inputs import inputs_of
from fedray.experiment.local_training import local_training, own_transform
from fedray.experiment.making import LayoutMaker, Maker, WeightsMaker, maker_of
from fedray.experiment.named import named_uploads, with_named
from fedray.experiment.placement import Surroundings, place
from fedray.gradients.known_code import unknown_layer
from fedray.models import find_model
from fedray.models.behaviour import AsMade, notes_on_single_samples, require_no_hidden_state
from fedray.models.channels_last import convert, in_channels_last, pays
from fedray.models.fitting import fit_task
from fedray.models.heads import DEFAULT, find_head, serves
from fedray.models.inspection import ModelFacts, inspect_model, prepare
from fedray.models.precision import check_precision, faster_precision
from fedray.tracking.costs import mean_load
from fedray.tracking.diagnostics import measured
from fedray.usercode.importing import as_user_error


class _Data(NamedTuple):
    """The data of an experiment, the source from which they come, and the digests of its parts. ``access`` is where the
    samples are, and ``notes`` are lines for the user."""

    source: Source
    data: FederatedData
    digests: dict[str, str]
    access: str
    notes: tuple[str, ...]


@neutral()
def resolve_data(config: Config, own: Own | None = None, map_all: MapAll = map_arrays) -> _Data:
    """Returns the data that ``config`` describes, spread over the clients, with samples where ``data.access`` says.

    Arguments and errors are those of :func:`resolve`.
    """
    own = own or Own()
    source = own.source or source_of(config.data, config.task)
    data, notes = _spread(config, _algorithm(config, own), source)
    digests = data_digests(source, data)
    data, access, lines = with_access(data, config.data.access, partial(content_key, digests, data), map_all)
    return _Data(source, data, digests, access, (*notes, *lines))


@neutral()
def resolve(
    config: Config, own: Own | None = None, around: Surroundings | None = None, map_all: MapAll = map_arrays
) -> tuple[Experiment, FederatedData]:
    """Returns the experiment that ``config`` describes, and its data, spread over the clients.

    ``own`` has what the user handed over from Python. ``around`` is what the run finds where it is made, which is this
    machine unless it is given. ``map_all`` maps samples from files (:func:`fedray.data.storage.access.with_access`).
    Raises :class:`UserError` for whatever in the sections doesn't exist or doesn't fit together.
    """
    own, around = own or Own(), around or Surroundings()
    _check_given(config, own)
    given, own = own.given, with_named(config, own)
    algorithm = _algorithm(config, own)
    upload = named_uploads(config, algorithm)
    head = _head(config, algorithm)
    # before the data are read, which may take long
    find_head(head)
    if own.model is None:
        find_model(config.model.name)
    source, data, digests, access, data_notes = resolve_data(config, own, map_all)
    cohort_size = _cohort_size(config, data)
    model = _model(config, own, algorithm, data, head)
    task = model.task
    transform, transform_notes = own_transform(config, own, data)
    training = local_training(config, transform)
    source_name = source.name if "data" in own.given else config.data.source
    name = run_name(config, source_name)
    folder = Path(config.run.output) / name
    device, engine, placed = place(config.engine, folder, around.device)
    size = training.batch_size or int(data.sizes().max())
    check_precision(config.train.precision, device, model.module, model.name, task, *data.examples(2))
    vectorize, chunk, stack_line = in_stacks(
        config.engine, device, model.module, task, model.facts, data, size, cohort_size
    )
    begun = around.begun(folder)
    channels_last, model = _laid_out(config, model, data, begun.get("channels_last"), vectorize, device)
    rounds = config.rounds
    steps = rounds * cohort_size * mean_load(data.sizes(), training).steps
    replayed, replay_line = is_replayed(config, algorithm, device, model.module, task, model.facts, size)
    precision_line = faster_precision(config.train, device, model.facts.flops * size)
    compiled, compile_line = is_compiled(
        config, begun.get("compile"), steps, device, vectorize, model.module,
        partial(
            gradient_graph, config, algorithm, model.facts, model.module, task, vectorize, data,
            training.batch_size, device,
        ),
        partial(around.missing_compiler, folder, device),
    )  # fmt: skip
    kind = kind_of(config.data, source.client_train is not None, data.task == "classification")
    implied = implied_values(kind, algorithm, cohort_size, data.active, training)
    if left_out := values_for_nulls(algorithm.hyper, implied, "algorithm."):
        algorithm = type(algorithm)(algorithm.hyper.model_copy(update=left_out))
    weighting = algorithm.weighting if config.train.weighting == "auto" else config.train.weighting
    options = values_for_nulls(config.data.partition, implied, "data.partition.") | {"kind": kind}
    resolved = _with_sections(
        config,
        run={"rounds": rounds, "iterations": None, "name": name, "given": given},
        algorithm=algorithm.hyper.model_dump(),
        data={
            "seed": _data_seed(config), "public_samples": _public_samples(config, algorithm, source),
            "clients": data.clients, "source": source_name, "access": access,
            "partition": config.data.partition.model_copy(update=options),
        },
        task={"kind": task.kind, "metric": task.main, "mode": task.mode},
        model={"name": model.name, "head": head, **_extra_keys(config.model)},
        train={
            "local_steps": training.local_steps, "cohort_size": cohort_size, "participation": None,
            "weighting": weighting, **config.train.adam, "lr_schedule": config.train.lr_schedule.over(rounds),
            "server_lr_schedule": config.train.server_lr_schedule.over(rounds),
        },
        engine={
            **engine, "channels_last": channels_last, "vectorize": vectorize, "compile": compiled,
            "chunk": chunk or config.engine.chunk,
        },
    )  # fmt: skip
    advice = algorithm.advice(training.momentum, cohort_size, data.active, config.train.server_lr)
    read = notes_on(config, rounds, training.local_steps or 0, source, data)
    notes = (
        *data_notes,
        *transform_notes,
        *read,
        *placed,
        *filter(None, (stack_line, compile_line, replay_line, precision_line)),
        *(f"warning: {line}" for line in advice),
        *model.notes,
        *model.facts.notes,
        *notes_on_single_samples(model.module, data.examples(1)[0], _with_single_samples(data, training)),
    )
    wanted = config.run.diagnostics
    run_by = measured(algorithm, wanted if isinstance(wanted, str) else "") if wanted else algorithm
    experiment = Experiment(
        resolved, run_by, model.make, task, model.facts, training, rounds, cohort_size, weighting, device, vectorize,
        chunk, compiled, replayed, notes,
        asked=flat(config.model_dump(mode="json", exclude_unset=True)), implied=implied, upload=upload,
    )  # fmt: skip
    maker = find_model(model.name) if own.model is None else own.model
    code: dict[str, Any] = {"code of the algorithm": type(algorithm)}
    code |= {f"metric {name}": task.metrics[name].values for name in own.metrics}
    code |= {} if own.loss is None else {"loss": own.loss}
    code |= {f"code of {each.name}": each.function for each in transform}
    code |= {f"step {number} of train.upload": step for number, step in enumerate(upload, 1)}
    code |= {} if head == "none" else {"code of the head": find_head(head)}
    inputs = inputs_of(digests, maker, experiment.build_model(), code)
    return replace(experiment, inputs=inputs), data


class _Model(NamedTuple):
    """A model and its task: the function that makes the model, one module that it made, facts about that, and lines
    for the user about the task."""

    name: str
    make: Maker
    module: nn.Module
    task: Task
    facts: ModelFacts
    notes: Sequence[str]


def _model(config: Config, own: Own, algorithm: Algorithm, data: FederatedData, head: str) -> _Model:
    x, y = data.examples(2)
    name, make = maker_of(config.model, own.model, x, data.classes, head, config.run.seed)
    module = make()
    as_made, of_types = AsMade.of(module), prepare(module, name)
    loss = own.loss if own.loss is not None else getattr(module, "task_loss", None)
    task, notes = fit_task(config.task, data.task, name, module, x, y, data.classes, loss, own.metrics, own.model)
    facts = inspect_model(module, x, name)
    facts = replace(facts, late_buffers=as_made.late_buffers(module, make, x, facts.behaviour, name))
    if unknown_layer(module) is not None:
        require_no_hidden_state(make, task, x, y, facts.behaviour, name)
    if algorithm.needs_classes and task.kind not in ("classification", "tokens"):
        raise UserError(
            f"algorithm.name={config.algorithm.name} compares what models say of classes, which task.kind={task.kind} "
            "does not have"
        )
    of_weights = make.notes() if isinstance(make, WeightsMaker) else ()
    return _Model(name, make, module, task, facts, (*of_types, *notes, *of_weights))


def _laid_out(
    config: Config, model: _Model, data: FederatedData, begun: bool | None, vectorize: bool, device: str
) -> tuple[bool, _Model]:
    """Returns ``engine.channels_last``, and the model with convolutions of that layout. ``begun`` is the key's value if
    the run has begun before, and None if not. On a CPU false leaves a model as it is made."""
    asked = config.engine.channels_last
    if asked == "auto" and begun is not None:
        asked = begun
    x, y = data.examples(2)
    faster = not vectorize and pays(model.module, device, config.train.precision)
    converted, notes = in_channels_last(asked, faster, model.module, model.name, model.task, x, y)
    make = model.make
    if converted or device == "cuda":
        make = LayoutMaker(make, converted)
        convert(model.module, converted)
    return converted, model._replace(make=make, notes=(*model.notes, *notes))


def _with_sections(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Returns ``config`` with new values for some keys of its sections."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _data_seed(config: Config) -> int:
    return config.run.seed if config.data.seed is None else config.data.seed


def _spread(config: Config, algorithm: Algorithm, source: Source) -> tuple[FederatedData, tuple[str, ...]]:
    """Returns the samples of ``source``, spread over the clients, and lines for the user about that.

    What the configuration asks for is set aside or chosen: the public set, the validation set, each client's share of
    the test set, and the training samples on which train_accuracy is evaluated.
    """
    seed = _data_seed(config)
    data = federate(source, config.data, seed, _public_samples(config, algorithm, source))
    if config.data.public_to == "clients":
        data = with_public_dealt(data, seed)
    data, notes = _with_test_shares(config, algorithm, data, seed)
    if config.run.eval_train_samples:
        data = with_train_subset(data, config.run.eval_train_samples, seed)
    if config.data.augment != "none" and [*map(type, leaves(data.input_shape))] != [int] * 3:
        raise UserError(
            f"data.augment={config.data.augment} is for images, not for samples of shape {data.input_shape}"
        )
    return data, (*data.notes, *notes)


def _check_given(config: Config, own: Own) -> None:
    check_given(config, own.given)
    if "data" in own.given and (named := Columns.of(config.data).keys_set):
        raise UserError(
            f"{named[0]} is for data.source; with data=... columns are named by label_column= and client_column=, and "
            "all others are inputs"
        )


def dump(config: Config) -> str:
    """Returns a resolved configuration as the text of a YAML file."""
    return dump_yaml(config.model_dump(mode="json"))


def _extra_keys(section: Any) -> dict[str, Any]:
    return dict(section.model_extra or {})


@contextlib.contextmanager
def _within(where: str) -> Iterator[None]:
    """A context in which messages for the user begin with ``where``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _hyper(cls: type[Algorithm], values: Mapping[str, Any], name: str) -> Any:
    """Returns the hyper-parameters of the algorithm ``name`` from the keys ``algorithm.*``."""
    unknown = [key for key in values if key not in cls.Hyper.model_fields]
    if unknown:
        raise UserError(f"{name}: " + unknown_key(unknown[0], cls.Hyper.model_fields, "algorithm."))
    return check(cls.Hyper, values, prefix="algorithm.")


def _algorithm(config: Config, own: Own) -> Algorithm:
    cls = own.algorithm or find_algorithm(config.algorithm.name)
    hyper = _hyper(cls, _extra_keys(config.algorithm), config.algorithm.name)
    for name, said in config.for_algorithm.items():
        with _within(f"for_algorithm: {name}: "):
            other = cls if name == config.algorithm.name else find_algorithm(name)
            _hyper(other, said.get("algorithm") or {}, name)
    with as_user_error(f"algorithm.name={config.algorithm.name} can't be made"):
        algorithm = cls(hyper)
    train = config.train
    scheduled = train.server_lr_schedule.kind != "constant" or train.server_lr_schedule.warmup
    if (train.server_lr != 1 or scheduled) and not algorithm.uses_server_lr:
        key = f"train.server_lr={train.server_lr}" if train.server_lr != 1 else "train.server_lr_schedule"
        raise UserError(f"{key}: {config.algorithm.name} has no server learning rate")
    if train.optimizer != "sgd" and not algorithm.any_optimizer:
        raise UserError(
            f"train.optimizer={train.optimizer}: the rules of algorithm.name={config.algorithm.name} count on the step "
            "of sgd"
        )
    return algorithm


def _public_samples(config: Config, algorithm: Algorithm, source: Source) -> int:
    asked = config.data.public_samples
    if config.data.public_to == "clients":
        if algorithm.needs_public:
            raise UserError(
                f"data.public_to=clients: {config.algorithm.name} trains a model on the public set; use server"
            )
        if asked in ("auto", 0):
            raise UserError("data.public_to=clients: there is no public set to deal out; give data.public_samples")
    if asked == "auto":
        count = source.public_by_default if algorithm.needs_public else 0
        if algorithm.needs_public and not count:
            raise UserError(
                f"{config.algorithm.name} trains a model on a public set, and a tenth of {len(source.y_train)} "
                "training samples is none: give data.public_samples"
            )
        return count
    if algorithm.needs_public and asked == 0:
        raise UserError(f"data.public_samples=0: {config.algorithm.name} trains a model on a public set; use auto")
    return asked


def _with_test_shares(
    config: Config, algorithm: Algorithm, data: FederatedData, seed: int
) -> tuple[FederatedData, list[str]]:
    """Returns ``data`` with the clients' test shares if anything is scored on them, and lines for the user about
    that."""
    run, least, notes = config.run, config.data.least_test_samples, []
    if not (algorithm.has_personal_model() or run.finetune_steps or run.eval_clients):
        if least:
            notes.append(
                f"warning: data.least_test_samples={least} changes nothing, as no client is scored on its own test "
                "share: run.eval_clients and run.finetune_steps ask for that"
            )
        return data, notes
    draw_eval_clients(data, seed, run.eval_clients)
    asked = [f"run.{key}={getattr(run, key)}" for key in ("eval_clients", "finetune_steps") if getattr(run, key)]
    if asked and not run.eval_test:
        notes.append(f"warning: {' and '.join(asked)}: not evaluated, as run.eval_test=false leaves the test set alone")
    return with_test_shares(data, seed, least), notes


def _cohort_size(config: Config, data: FederatedData) -> int:
    present = data.active
    if config.train.participation is not None:
        return max(1, whole(config.train.participation * present))
    if config.train.cohort_size is None:
        return present
    if config.train.cohort_size > present:
        raise UserError(
            f"train.cohort_size={config.train.cohort_size} is more than the {present} clients that have samples "
            f"(data.clients={data.clients})"
        )
    return config.train.cohort_size


def _head(config: Config, algorithm: Algorithm) -> str:
    asked, need = config.model.head, algorithm.needs_head
    if asked == "auto":
        return DEFAULT[need]
    if not serves(asked, need):
        raise UserError(
            f"model.head={asked}: {config.algorithm.name} needs a head with a {need}, such as {DEFAULT[need]}; use auto"
        )
    return asked


def _with_single_samples(data: FederatedData, training: LocalTraining) -> list[int]:
    """Returns the clients that have mini-batches of one sample."""
    batch_size, epochs = training.batch_size, training.local_epochs
    return [
        client for client, size in enumerate(data.sizes().tolist()) if size and has_single(size, batch_size, epochs)
    ]
