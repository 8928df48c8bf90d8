"""Makes a whole experiment from a configuration, in stages.

Each stage takes the configuration and the answers of earlier stages. Its own answer has values, settings for the
resolved configuration, and lines for the user. Each key is decided by one stage, which also determines the values that
``auto`` and null stand for.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from fedray.config import Config, dump_yaml, flat
from fedray.core.torch_state import neutral
from fedray.core.upload import UploadStep
from fedray.data.federated import FederatedData
from fedray.data.storage.access import MapAll
from fedray.data.storage.mapping import map_arrays
from fedray.experiment.algorithm import choose_algorithm, choose_head
from fedray.experiment.custom import CustomObjects
from fedray.experiment.data import DataStage, data_stage
from fedray.experiment.execution import ExecutionStage, execution_stage
from fedray.experiment.experiment import Experiment
from fedray.experiment.first_checks import check_custom
from fedray.experiment.inputs import inputs_of
from fedray.experiment.model import ModelStage, model_stage
from fedray.experiment.named import chosen_selection, named_uploads, with_named
from fedray.experiment.placement import Surroundings
from fedray.experiment.privacy import Privacy, privacy_of
from fedray.experiment.recorded import check_reached
from fedray.experiment.robust import Robust, robust_of
from fedray.experiment.stage import with_settings
from fedray.experiment.system import SystemStage, system_stage
from fedray.experiment.training import TrainingStage, training_stage
from fedray.experiment.unused import notes_on_unused
from fedray.models import find_model
from fedray.selection import Selection
from fedray.tracking.diagnostics import measured


@neutral()
def resolve(
    config: Config,
    custom: CustomObjects | None = None,
    around: Surroundings | None = None,
    map_all: MapAll = map_arrays,
) -> tuple[Experiment, FederatedData]:
    """Turns a configuration into an experiment, which is the complete description of a run, and reads its data.

    In the experiment, ``auto`` and null are replaced by values.

    Args:
        config: The user's configuration, in which keys may be null or ``auto``.
        custom: The objects that the user passed from Python.
        around: The machines of the run. The default is this machine.
        map_all: A function that writes samples into files of a folder and maps them into memory, if ``data.access``
            asks for that (:func:`fedray.data.storage.access.with_access`).

    Returns:
        The experiment, and the data, partitioned among the clients.

    Raises:
        UserError: Something that the configuration names does not exist, or keys contradict each other.
    """
    custom, around = custom or CustomObjects(), around or Surroundings()
    check_custom(config, custom.names)
    algorithm = choose_algorithm(config, custom)
    head = choose_head(config, algorithm)
    # checked before the data are read, which may take long
    if custom.model is None:
        find_model(config.model.name)
    named, upload = with_named(config, custom), named_uploads(config, algorithm, custom)
    selection = chosen_selection(config, custom)
    data = data_stage(config, custom, algorithm, map_all)
    training = training_stage(config, custom, algorithm, selection, data.data)
    model = model_stage(config, named, head, data.data, training)
    system = system_stage(config, data.data, training, model, selection, upload)
    execution = execution_stage(config, around, data, training, model)
    robust = robust_of(config, custom, algorithm, data.data, training.cohort_size, model.task.kind)
    privacy = privacy_of(
        config, algorithm, selection, model.statistics, training.cohort_size, data.data.active, training.rounds
    )
    stages = (data, training, model, system, execution)
    check_reached(config, model.task, data.data)
    return _experiment(config, named, selection, upload, stages, robust, privacy), data.data


@neutral()
def resolve_data(config: Config, map_all: MapAll = map_arrays) -> DataStage:
    """Reads only the data that ``config`` describes, and partitions them among the clients as in a run, for commands
    such as ``fedray data info``.

    ``map_all(arrays, folder)`` writes samples into files of a folder and maps them into memory, if ``data.access`` asks
    for that (:func:`fedray.data.storage.access.with_access`).
    """
    custom = CustomObjects()
    return data_stage(config, custom, choose_algorithm(config, custom), map_all)


def dump(config: Config) -> str:
    """Returns a resolved configuration as the text of a YAML file, which becomes config.yaml in the run's folder.
    ``run.working_copy``, a folder of this machine, is left out."""
    return dump_yaml(config.model_dump(mode="json", exclude={"run": {"working_copy"}}))


def _experiment(
    config: Config,
    custom: CustomObjects,
    selection: Selection,
    upload: tuple[UploadStep, ...],
    stages: tuple[DataStage, TrainingStage, ModelStage, SystemStage, ExecutionStage],
    robust: Robust | None,
    privacy: Privacy | None,
) -> Experiment:
    """Puts together the experiment from the answers of the stages."""
    data, training, model, system, execution = stages
    parts = [*stages, *(part for part in (robust, privacy) if part is not None)]
    algorithm, diagnostics = training.algorithm, config.run.diagnostics
    settings = ChainMap(*(dict(part.settings) for part in parts))
    return Experiment(
        config=with_settings(config, settings),
        algorithm=measured(algorithm, diagnostics if isinstance(diagnostics, str) else "")
        if diagnostics
        else algorithm,
        module=execution.make,
        task=model.task,
        facts=model.facts,
        training=replace(training.local, poison=robust.poison) if robust else training.local,
        rounds=training.rounds,
        cohort_size=training.cohort_size,
        clients_drawn=system.draws,
        weighting=training.weighting,
        device=execution.device,
        vectorize=execution.vectorize,
        chunk=execution.chunk,
        compile=execution.compile,
        replay=execution.replay,
        notes=(*(note for part in parts for note in part.notes), *notes_on_unused(config, settings)),
        inputs=inputs_of(custom, selection, upload, robust, data, training, model, execution.make()) | system.digests,
        asked=flat(config.model_dump(mode="json", exclude_unset=True)),
        defaults={**data.defaults, **training.defaults},
        selection=selection,
        upload=upload,
        robust=robust,
        privacy=privacy,
    )
