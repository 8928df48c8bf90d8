"""The model stage: makes the model once, inspects its behaviour, and determines its task.

It decides ``task.*``, ``model.name`` and ``model.head``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from fedray.config import Config
from fedray.core.batches import has_single
from fedray.core.local_training import LocalTraining
from fedray.core.private import check_head, private_names
from fedray.core.task import Task
from fedray.core.vectors import Layout
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.making import ModelMaker, model_maker
from fedray.experiment.stage import Stage
from fedray.experiment.training import TrainingStage
from fedray.gradients.known_code import unknown_layer
from fedray.models.behaviour import (
    AsMade,
    drawn_by_loss,
    notes_on_single_samples,
    require_no_hidden_state,
    require_repeatable,
)
from fedray.models.fitting import fit_task
from fedray.models.inspection import ModelFacts, inspect_model, prepare, with_private
from fedray.usercode.importing import is_user_defined
from fedray.warning import WARNING


@dataclass(frozen=True, kw_only=True)
class ModelStage(Stage):
    """What the model stage has decided: the model of a run, and its ``task``, which has the loss and the metrics.

    ``make`` is the function that makes the model, ``module`` is a model that it has made, and ``name`` is the model's
    name. ``facts`` says what the engine must know about the model: its numbers of parameters, its FLOPs, and what its
    forward pass does besides computing outputs, such as changing buffers or drawing random numbers.
    ``statistics`` has the names of the buffers that change in training and are sent by clients.
    """

    name: str
    make: ModelMaker
    module: nn.Module
    task: Task
    facts: ModelFacts
    statistics: frozenset[str]


def model_stage(
    config: Config, custom: CustomObjects, head: str, data: FederatedData, training: TrainingStage
) -> ModelStage:
    """Makes the model that ``config`` describes, finds out what its forward pass does besides computing outputs (such
    as changing buffers or drawing random numbers), and determines its task, which is the loss and the metrics.

    ``custom`` may have a model, a loss and metrics of the user's. ``head`` is the value of ``model.head``: the name of
    the layers that replace the model's last one, such as "moon", or "none". ``training`` has the settings of local
    training. Raises :class:`UserError` if the model can't be trained on the data, or its outputs do not fit the
    targets.
    """
    x, y = data.examples(2)
    make = model_maker(config.model, custom.model, x, data.classes, head, config.run.seed)
    name, module = make.name, make()
    is_function = custom.model is not None and not isinstance(custom.model, nn.Module)
    if is_function or (custom.model is None and is_user_defined(str(config.model.name))):
        require_repeatable(make, module)
    as_made, notes_on_types = AsMade.of(module), prepare(module, name)
    loss = custom.loss if custom.loss is not None else getattr(module, "task_loss", None)
    try:
        task, notes_on_task = fit_task(
            config.task, data.task, name, module, x, y, data.classes, loss, custom.metrics, custom.model
        )
    except UserError as error:
        # a forward pass may rely on the types that the parameters had
        raise UserError("; ".join([str(error), *(each.removeprefix(WARNING) for each in notes_on_types)])) from None
    facts = inspect_model(module, x, name)
    facts = replace(facts, late_buffers=as_made.late_buffers(module, make, x, facts.behaviour, name))
    patterns = config.model.private or training.algorithm.private
    check_head(module, facts.last_called, _named_layers(config, training))
    facts, notes_on_private = with_private(facts, module, patterns) if patterns else (facts, [])
    layout = Layout(module, facts.behaviour.changing)
    private = private_names(module, layout, patterns or [])
    finetuned = config.run.finetune_layers
    if finetuned and not private_names(module, layout, finetuned, "run.finetune_layers"):
        raise UserError(f"run.finetune_layers: the model has none that {', '.join(finetuned)} names")
    if loss is not None:
        draws = facts.behaviour.draws | drawn_by_loss(module, task, x, y)
        facts = replace(facts, behaviour=replace(facts.behaviour, draws=frozenset(draws)))
    suspects = [f"model {name}"] * (unknown_layer(module) is not None) + ["the loss"] * (loss is not None)
    if suspects:
        require_no_hidden_state(make, task, x, y, facts.behaviour, name, " or ".join(suspects))
    if training.algorithm.needs_classes and task.kind not in ("classification", "tokens"):
        raise UserError(
            f"algorithm.name={config.algorithm.name} needs samples of classes, which task.kind={task.kind} does not "
            "have"
        )
    single = notes_on_single_samples(module, data.examples(1)[0], _with_single_samples(data, training.local))
    return ModelStage(
        name=name,
        make=make,
        module=module,
        task=task,
        facts=facts,
        statistics=facts.behaviour.changing - (private if training.algorithm.private_from == 1 else set()),
        settings={
            "task.kind": task.kind,
            "task.metric": task.main,
            "task.mode": task.mode,
            "model.name": name,
            "model.head": head,
        },
        notes=(*notes_on_types, *notes_on_task, *make.notes(), *facts.notes, *single, *notes_on_private),
    )


def _named_layers(config: Config, training: TrainingStage) -> dict[str, Sequence[str]]:
    """Returns the patterns of each key that names layers of the model, by key."""
    model, name = config.model, config.algorithm.name
    trainable = ["head"] if model.trainable is None and model.peft.kind != "none" else model.trainable
    said: dict[str, Sequence[str] | None] = {
        "model.private": model.private,
        "model.trainable": trainable,
        "run.finetune_layers": config.run.finetune_layers,
    }
    own = {f"algorithm.{key}": value for key, value in training.algorithm.hyper if isinstance(value, tuple)}
    fixed = [each for each in training.algorithm.private if not any(each in value for value in own.values())]
    said |= {**own, f"algorithm.name={name}": fixed}
    return {key: patterns for key, patterns in said.items() if patterns}


def _with_single_samples(data: FederatedData, local: LocalTraining) -> list[int]:
    """Returns the numbers of the clients that have mini-batches of one sample, which some layers can't normalise."""
    return [
        client
        for client, size in enumerate(data.sizes().tolist())
        if size and has_single(size, local.batch_size, local.local_epochs)
    ]
