"""What a run is, once its configuration is resolved; and what a user may give beside a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedray.algorithms import Algorithm
from fedray.config import Config, flat
from fedray.core.local_training import LocalTraining
from fedray.core.network import Loss
from fedray.data.source import Source
from fedray.making import Maker, load_weights
from fedray.models.inspection import ModelFacts

NOT_HYPER_PARAMETERS = {"run.name", "run.output", "run.resume", "run.given"}
"""Keys that a user sets and that say nothing of what is run."""


@dataclass(frozen=True)
class Own:
    """What a user hands to :func:`fedray.simulate` instead of naming it in the config.

    ``preloaded``: ``source`` is the one that the config names all the same, read beforehand for several runs.
    """

    source: Source | None = None
    model: Callable[..., nn.Module] | nn.Module | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    preloaded: bool = False

    @property
    def given(self) -> list[str]:
        """The arguments of :func:`fedray.simulate` without which the config alone means another run."""
        there = {
            "data": self.source is not None and not self.preloaded,
            "model": self.model is not None,
            "loss": self.loss is not None,
            "metrics": bool(self.metrics),
        }
        return [name for name, given in there.items() if given]

    def notes(self, seeds: int) -> list[str]:
        """Lines about what is the same in runs of so many seeds, and need not be expected to be."""
        if seeds == 1 or not isinstance(self.model, nn.Module):
            return []
        return [
            f"warning: model= is a module, so all {seeds} seeds start from the same initial weights; to draw them from "
            "each seed, give its class or a function that makes one"
        ]


@dataclass(frozen=True)
class Experiment:
    """All that a run does, but its data: small, and the same in every process.

    ``config`` is resolved: what a default or ``auto`` stood for has been filled in. ``notes`` are lines worth telling
    the user before it starts. ``inputs``: digests of what else the result is made from (:mod:`fedray.inputs`).
    ``asked``: what the user set, and ``implied``: what null stands for, by dotted key.
    """

    config: Config
    algorithm: Algorithm
    module: Maker
    loss: Loss
    metrics: Mapping[str, Loss]
    facts: ModelFacts
    training: LocalTraining
    rounds: int
    cohort_size: int
    weighting: str
    device: str
    vectorize: bool
    chunk: int | None
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        return self.config.train.precision

    @property
    def draws(self) -> bool:
        return self.facts.draws

    @property
    def server_device(self) -> str:
        """Where the server computes: on the CPU unless it has a share of a GPU."""
        return self.device if self.config.engine.server_gpus else "cpu"

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """What tells the run from others, by dotted key: what the user set, and all that its algorithm takes."""
        resolved = flat(self.config.model_dump(mode="json"))
        told = {key for key in resolved if key in self.asked or key.startswith("algorithm.")} - NOT_HYPER_PARAMETERS
        # what is resolved into another key, as run.iterations is into rounds, is null
        return {key: self.asked.get(key) if resolved[key] is None else resolved[key] for key in sorted(told)}

    def build_model(self, client: int | None = None) -> nn.Module:
        """The module with its initial weights, which depend on ``run.seed`` alone; or others, drawn for a client."""
        module = self.module(client)
        if self.config.model.init == "zeros":
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
        if self.config.model.weights and client is None:
            load_weights(module, Path(self.config.model.weights))
        return module
