"""Gathers the data for a table that compares the costs of all algorithms under one configuration."""

from __future__ import annotations

import math
from dataclasses import replace

from fedray.algorithms import Algorithm, known_algorithms
from fedray.config import Config, ScheduleConfig
from fedray.data.federated import FederatedData
from fedray.data.sources.source import source_of
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.named import named_uploads
from fedray.experiment.permissions import allows
from fedray.experiment.resolve import resolve
from fedray.experiment.usual_round import usual_round
from fedray.models.heads import DEFAULT, serves
from fedray.models.inspection import with_private
from fedray.tracking import costs
from fedray.tracking.cost_tables import Candidate, Scenario
from fedray.usercode.importing import as_user_error


def compare_algorithms(config: Config) -> tuple[list[Candidate], Scenario, dict[str, str]]:
    """Gathers what ``fedray costs`` compares: the costs of every algorithm under the settings of ``config``.

    Returns three values: a list of the algorithms, each with the model that it needs; the setting that all of them
    share, such as the number of clients in a round; and a dict with the algorithms that can't be compared, each with
    the reason. All algorithms get the same data as the algorithm of ``config``; those that train on a public set also
    get the public set that they would have in a run.
    """
    custom = CustomObjects(source_of(config.data, config.task), preloaded=True)
    chosen, data = resolve(config, custom)
    sizes, name_of_chosen = data.sizes(), config.algorithm.name

    shared: dict[tuple[str, bool], tuple[Experiment, FederatedData]] = {}

    def resolved_with(name: str, cls: type[Algorithm]) -> tuple[Experiment, FederatedData]:
        """Returns the experiment (the description of a run) and the data for the algorithm ``name``, whose class is
        ``cls``.

        Algorithms share both if they need the same head (the model's last layers), and if they agree on whether they
        need a public set.
        """
        asked, need = config.model.head, cls.needs_head
        head = asked if asked != "auto" and serves(asked, need) else DEFAULT[need]
        if (head, cls.needs_public) not in shared:
            shared[head, cls.needs_public] = resolve(_with_algorithm(config, name, head), custom)
        return shared[head, cls.needs_public]

    # the base class asks for no head and no public set
    plain, _ = resolved_with(f"{Algorithm.__module__}:{Algorithm.__name__}", Algorithm)
    candidates, left_out = [], {}
    for name, cls in {**known_algorithms(), name_of_chosen: type(chosen.algorithm)}.items():
        try:
            if name == name_of_chosen:
                algorithm, experiment, others = chosen.algorithm, chosen, data
            else:
                algorithm, (experiment, others) = cls(), resolved_with(name, cls)
                with_name = config.model_copy(update={"algorithm": type(config.algorithm)(name=name)})
                named_uploads(with_name, algorithm, custom)
        except UserError as error:
            left_out[name] = str(error)
            continue
        server = costs.server_of_mean_clients(
            chosen.training, sizes, chosen.cohort_size, len(others.public), len(data.y_test)
        )
        facts = experiment.facts
        if name != name_of_chosen and algorithm.private:
            facts, _ = with_private(facts, experiment.build_model(), algorithm.private)
        with as_user_error(f"{name} can't say its server_flops without a run"):
            flops = algorithm.server_flops(server, experiment.facts.flops)
        usual = _usual_round(chosen, replace(experiment, facts=facts), algorithm, others)
        candidates.append(Candidate(name, algorithm, experiment.config.model.head, facts, flops, usual))
    scenario = Scenario(
        load=costs.mean_load(sizes, chosen.training),
        cohort=chosen.cohort_size,
        rounds=chosen.rounds,
        plain=plain.facts,
        build_plain=plain.build_model,
        example=data.examples(2)[0],
        upload=chosen.upload,
        choosing=costs.of_choosing(chosen.selection.asks, chosen.facts, sizes),
    )
    return candidates, scenario, left_out


def _usual_round(
    chosen: Experiment, experiment: Experiment, algorithm: Algorithm, data: FederatedData
) -> dict[str, float]:
    """Returns the virtual seconds and joules of a round of ``algorithm`` with the model of ``experiment``, on the
    devices of ``chosen``, or nothing without them."""
    system = chosen.config.system
    if not system.is_on:
        return {}
    if system.mode == "buffered" and not allows(type(algorithm), "asynchronous"):
        return {"virtual_seconds": math.nan, "joules": math.nan}
    config = experiment.config.model_copy(update={"system": system})
    return usual_round(replace(chosen, config=config, algorithm=algorithm, facts=experiment.facts), data)


def _with_algorithm(config: Config, name: str, head: str) -> Config:
    """Returns ``config`` with the algorithm ``name`` at its defaults, and with the model's head ``head``.

    Keys that not every algorithm accepts are set to their defaults.
    """
    return config.model_copy(
        update={
            "algorithm": type(config.algorithm)(name=name),
            "system": type(config.system)(),
            "attack": type(config.attack)(),
            "privacy": type(config.privacy)(),
            "model": config.model.model_copy(update={"head": head, "weights": None, "private": None}),
            "train": config.train.model_copy(
                update={
                    "server_lr": 1.0,
                    "server_lr_schedule": ScheduleConfig(),
                    "optimizer": "sgd",
                    "momentum_reset": "round",
                    "aggregation": type(config.train.aggregation)(),
                    "sampling": "uniform",
                    "weighting": "auto",
                }
            ),
        }
    )
