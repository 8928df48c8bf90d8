"""Defines an experiment: everything that a run does, once its configuration is resolved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedray.algorithms import Algorithm
from fedray.config import Config, flat
from fedray.core.local_training import LocalTraining
from fedray.core.schedule import Schedule
from fedray.core.task import Task
from fedray.core.upload import UploadStep
from fedray.experiment.making import ModelMaker
from fedray.experiment.privacy import Privacy
from fedray.experiment.robust import Robust
from fedray.models.inspection import ModelFacts
from fedray.selection import Selection
from fedray.selection.uniform import Uniform

NOT_HYPER_PARAMETERS = {
    "run.name", "run.output", "run.working_copy", "run.output_timeout", "run.resume", "run.given", "run.callbacks",
    "run.loggers", "run.group",
}  # fmt: skip
"""Keys that do not count as hyper-parameters even if the user sets them, because they do not change the result."""


LANES = (3e9, 16), (3e10, 8), (3e11, 4), (math.inf, 2)
"""Pairs of the largest number of forward FLOPs in a mini-batch, and the number of clients that are then trained side by
side on a GPU under ``engine.lanes: auto``. On an H200 GHBM's CNN (1.5e9) made 3,203 local steps a second with 16
clients and 3,069 with 8 in fp32, and 7,022 and 5,468 in bf16, because Python has fewer graphs to launch. Two clients of
ViT-B/16 (1.1e12) took 24 GB."""


@dataclass(frozen=True)
class Experiment:
    """Everything that a run does, without its data. The object is small, and every process gets a copy.

    ``config`` is resolved: ``auto`` and null are replaced by values. ``module()`` makes the model, and ``facts`` says
    what is known about the model, such as its number of parameters and its FLOPs. ``task`` has the loss and the
    metrics. ``training`` has the settings of clients' local training, and ``weighting`` says how clients are weighted:
    by ``samples`` or ``uniform``. ``rounds`` and ``cohort_size`` are the numbers of rounds and of clients in a round.
    ``clients_drawn`` is how many are drawn for it, which are more with ``system.over_select``.
    ``device`` is cpu or cuda. ``vectorize`` says whether clients are trained in stacks (as rows of one tensor), of at
    most ``chunk`` clients. ``compile`` and ``replay`` say whether gradients are compiled, and whether their operations
    are recorded once and then replayed.

    ``notes`` are lines that the user should read before the run starts. ``inputs`` has digests (sha256), by name, of
    everything besides the configuration on which the result depends, such as the data and the user's code
    (:mod:`fedray.experiment.inputs`). ``asked`` maps dotted keys to the values that the user set, and ``defaults`` maps
    keys that the user left null to the values that null stands for. ``selection`` chooses the clients of each round
    (``train.sampling``). ``upload`` has the steps that are applied to clients' uploads (``train.upload``), such as
    clipping. ``robust`` is what takes the place of the mean of uploads, if anything does, and ``privacy`` how that mean
    is made private, if it is. ``stepped`` says whether the user steps through the run, and may change rounds by hand.
    """

    config: Config
    algorithm: Algorithm
    module: ModelMaker
    task: Task
    facts: ModelFacts
    training: LocalTraining
    rounds: int
    cohort_size: int
    clients_drawn: int
    weighting: str
    device: str
    vectorize: bool
    chunk: int | None
    compile: bool = False
    replay: bool = False
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection = field(default_factory=Uniform)
    upload: tuple[UploadStep, ...] = ()
    robust: Robust | None = None
    stepped: bool = False
    privacy: Privacy | None = None

    @property
    def private(self) -> tuple[str, ...]:
        """The layers that stay at each client, as names and patterns: ``model.private``, or those of the algorithm."""
        return tuple(self.config.model.private or self.algorithm.private)

    def facts_in(self, round: int) -> ModelFacts:
        """Returns :attr:`facts` as they are in ``round``: in the first rounds of some algorithms no layers are private
        yet."""
        if round >= self.algorithm.private_from:
            return self.facts
        return replace(self.facts, private_parameters=0, private_buffers=0)

    def is_evaluated(self, round: int) -> bool:
        """Returns whether the model is evaluated at the end of ``round``."""
        every = self.config.run.eval_every
        return round == self.rounds or bool(every and round % every == 0)

    def evaluates_local_models(self, round: int) -> bool:
        """Returns whether the models of the cohort's clients are evaluated at the end of ``round``, as they are before
        they are averaged."""
        run = self.config.run
        return run.eval_local_models and run.eval_test and self.is_evaluated(round)

    @property
    def keeps_states(self) -> bool:
        """Whether clients keep anything from one round in which they take part to the next: a state of the algorithm, a
        state of a step of ``train.upload``, their momentum, or private layers."""
        keeps = self.algorithm.stateful or self.training.momentum_reset == "never" or bool(self.private)
        return keeps or any(getattr(step, "keeps", False) for step in self.upload)

    @property
    def lanes(self) -> int:
        """How many clients a process trains side by side on a GPU, if memory allows (``engine.lanes``). It is 1 without
        a GPU, if clients are trained in stacks (as rows of one tensor), and if gradients are not replayed
        (``engine.replay``).

        The number changes no bit of the results.
        """
        if self.vectorize or not self.replay or self.device != "cuda":
            return 1
        asked = self.config.engine.lanes
        if asked != "auto":
            return asked
        work = self.facts.flops * (self.training.batch_size or 1)
        return next(count for most, count in LANES if work <= most)

    def with_run_settings(self, **values: Any) -> Experiment:
        """Returns a copy of this experiment in which ``values`` replace keys of the configuration's section ``run``, as
        in ``with_run_settings(resume="auto")``."""
        run = self.config.run.model_copy(update=values)
        return replace(self, config=self.config.model_copy(update={"run": run}))

    def with_fixed_place(self) -> Experiment:
        """Returns a copy of this experiment with an absolute path of the run folder. Actors have the working directory
        that this process had when it joined Ray, and the user may change it during the run."""
        return replace(self, config=self.config.model_copy(update={"run": self.config.run.with_fixed_place()}))

    @property
    def precision(self) -> str:
        return self.config.train.precision

    def rates(self, number: int) -> tuple[float, float]:
        """Returns the learning rates in round ``number``, counted from 1: eta_l of the clients, and eta_g of
        the server."""
        train = self.config.train
        of_clients, of_server = (
            Schedule(**each.model_dump(exclude_none=True)) for each in (train.lr_schedule, train.server_lr_schedule)
        )
        lr = train.lr * train.lr_decay ** (number - 1)
        return lr * of_clients.factor(number), train.server_lr * of_server.factor(number)

    @property
    def server_device(self) -> str:
        """The device on which the server computes: ``cpu``, or the clients' device if the server has a share of a GPU
        (``engine.server_gpus``)."""
        return self.device if self.config.engine.server_gpus else "cpu"

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The settings that distinguish this run from others, as values by dotted key, such as ``{"train.lr": 0.05}``.

        They are the keys that the user set, and the algorithm's hyper-parameters.
        """
        resolved = flat(self.config.model_dump(mode="json"))
        keys = {key for key in resolved if key in self.asked or key.startswith("algorithm.")} - NOT_HYPER_PARAMETERS
        # a key that is resolved into another key, as run.iterations into run.rounds, is null in the config
        return {key: self.asked.get(key) if resolved[key] is None else resolved[key] for key in sorted(keys)}

    def build_model(self, client: int | None = None) -> nn.Module:
        """Makes the model, a ``torch.nn.Module``, with its initial weights, which depend on ``run.seed`` alone.

        With the number of a client, ``client``, other weights are drawn, which depend on ``run.seed`` and the client.
        """
        return self.module(client)
