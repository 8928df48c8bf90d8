"""The execution stage: resolves ``engine.*``, that is, on which device and in which way clients are trained.

The decisions are made by functions in :mod:`fedray.experiment.placement` (devices) and
:mod:`fedray.experiment.backend` (stacks, compiled and replayed gradients).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from fedray.config import Config
from fedray.experiment.backend import gradient_graph, in_stacks, is_compiled, is_replayed
from fedray.experiment.data import DataStage
from fedray.experiment.making import ModelMaker
from fedray.experiment.model import ModelStage
from fedray.experiment.placement import Surroundings, place
from fedray.experiment.stage import Stage, under
from fedray.experiment.training import TrainingStage
from fedray.models.channels_last import convert, in_channels_last, pays
from fedray.models.precision import check_precision, faster_precision


@dataclass(frozen=True, kw_only=True)
class ExecutionStage(Stage):
    """What the execution stage has decided: how and where the clients of a run are trained, that is, the values of
    ``engine.*``.

    ``device`` is cpu or cuda. ``make`` makes the model with the chosen layout of convolutions. ``vectorize`` says
    whether clients are trained in stacks, that is, several clients as rows of one tensor. ``chunk`` is then the largest
    number of clients in a stack, and otherwise the size of the groups of clients that are never divided between
    workers, or None. ``compile`` and ``replay`` say whether gradients are compiled by torch's compiler, and whether
    their operations are recorded once and then replayed.
    """

    device: str
    make: ModelMaker
    vectorize: bool
    chunk: int | None
    compile: bool
    replay: bool


def execution_stage(
    config: Config, around: Surroundings, stage: DataStage, training: TrainingStage, model: ModelStage
) -> ExecutionStage:
    """Decides how and where the clients of a run are trained: the device, stacks (several clients as rows of one
    tensor), and how gradients are computed.

    A run that is resumed keeps what it began with. ``around`` answers questions about the machines of the run.
    ``stage``, ``training`` and ``model`` are what the stages for data, training and model have decided. Raises
    :class:`UserError` if the user asks for something that is not possible on these machines or with this model.
    """
    data, folder = stage.data, config.run.place / stage.run_name
    device, placed, notes = place(config.engine, folder, around.device)
    check_precision(config.train.precision, device, model.module, model.name, model.task, *data.examples(2))
    vectorize, chunk, line_on_stacks = in_stacks(config.engine, device, data, training, model)
    begun = around.begun(folder)
    channels_last, make, notes_on_layout = _layout(config, begun.get("channels_last"), device, vectorize, model, stage)
    replay, line_on_replay = is_replayed(config, device, training, model)
    compiled, line_on_compiling = is_compiled(
        config, begun.get("compile"), training.total_steps, device, vectorize, model.module,
        partial(gradient_graph, config, device, data, training, model, vectorize),
        partial(around.missing_compiler, folder, device),
    )  # fmt: skip
    line_on_precision = faster_precision(config.train, device, model.facts.flops * training.batch_size)
    lines = (line_on_stacks, line_on_compiling, line_on_replay, line_on_precision)
    return ExecutionStage(
        device=device,
        make=make,
        vectorize=vectorize,
        chunk=chunk,
        compile=compiled,
        replay=replay,
        settings=under(
            "engine",
            {
                **placed,
                "channels_last": channels_last,
                "vectorize": vectorize,
                "compile": compiled,
                "chunk": chunk or config.engine.chunk,
            },
        ),
        notes=(*notes, *filter(None, lines), *notes_on_layout),
    )


def _layout(
    config: Config, begun: bool | None, device: str, vectorize: bool, model: ModelStage, stage: DataStage
) -> tuple[bool, ModelMaker, list[str]]:
    """Decides whether 2-d convolutions are laid out with channels last (``engine.channels_last``).

    Returns the decision, the maker of models with that layout, and lines for the user. ``begun`` is the decision in a
    run that is resumed, and None for a new run. On a CPU, false leaves the model as it was made.
    """
    asked = config.engine.channels_last
    if asked == "auto" and begun is not None:
        asked = begun
    faster = not vectorize and pays(model.module, device, config.train.precision)
    x, y = stage.data.examples(2)
    converted, notes = in_channels_last(asked, faster, model.module, model.name, model.task, x, y)
    if not converted and device != "cuda":
        return False, model.make, notes
    convert(model.module, converted)
    return converted, replace(model.make, channels_last=converted), notes
