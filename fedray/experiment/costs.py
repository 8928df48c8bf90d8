"""Gathers the data for a table that compares the costs of all algorithms under one configuration."""

from __future__ import annotations

from fedray.algorithms import Algorithm, ServerState, known_algorithms
from fedray.config import Config, ScheduleConfig
from fedray.data.sources.source import source_of
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.models.heads import DEFAULT, serves
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

    def with_server(experiment: Experiment, public: int) -> tuple[Experiment, ServerState]:
        tests = len(data.y_test)
        return experiment, costs.server_of_mean_clients(chosen.training, sizes, chosen.cohort_size, public, tests)

    shared: dict[tuple[str, bool], tuple[Experiment, ServerState]] = {}

    def resolved_with(name: str, cls: type[Algorithm]) -> tuple[Experiment, ServerState]:
        """Returns the experiment (the description of a run) and the server's state for the algorithm ``name``, whose
        class is ``cls``.

        Algorithms share both if they need the same head (the model's last layers), and if they agree on whether they
        need a public set.
        """
        asked, need = config.model.head, cls.needs_head
        head = asked if asked != "auto" and serves(asked, need) else DEFAULT[need]
        if (head, cls.needs_public) not in shared:
            experiment, others = resolve(_with_algorithm(config, name, head), custom)
            shared[head, cls.needs_public] = with_server(experiment, len(others.public))
        return shared[head, cls.needs_public]

    # the base class asks for no head and no public set
    plain, _ = resolved_with(f"{Algorithm.__module__}:{Algorithm.__name__}", Algorithm)
    candidates, left_out = [], {}
    for name, cls in {**known_algorithms(), name_of_chosen: type(chosen.algorithm)}.items():
        try:
            if name == name_of_chosen:
                algorithm, (experiment, server) = chosen.algorithm, with_server(chosen, len(data.public))
            else:
                algorithm, (experiment, server) = cls(), resolved_with(name, cls)
        except UserError as error:
            left_out[name] = str(error)
            continue
        with as_user_error(f"{name} can't say its server_flops without a run"):
            flops = algorithm.server_flops(server, experiment.facts.flops)
        candidates.append(Candidate(name, algorithm, experiment.config.model.head, experiment.facts, flops))
    scenario = Scenario(
        load=costs.mean_load(sizes, chosen.training),
        cohort=chosen.cohort_size,
        rounds=chosen.rounds,
        plain=plain.facts,
        build_plain=plain.build_model,
        example=data.examples(2)[0],
    )
    return candidates, scenario, left_out


def _with_algorithm(config: Config, name: str, head: str) -> Config:
    """Returns ``config`` with the algorithm ``name`` at its defaults, and with the model's head ``head``.

    Keys that not every algorithm accepts are set to their defaults.
    """
    return config.model_copy(
        update={
            "algorithm": type(config.algorithm)(name=name),
            "model": config.model.model_copy(update={"head": head, "weights": None}),
            "train": config.train.model_copy(
                update={
                    "server_lr": 1.0,
                    "server_lr_schedule": ScheduleConfig(),
                    "optimizer": "sgd",
                    "momentum_reset": "round",
                }
            ),
        }
    )
