"""What an algorithm declares of its costs: the models that clients receive and send, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedray.models.inspection import ModelFacts

Numbers = float | Callable[[ModelFacts], float]


@dataclass(frozen=True)
class Traffic:
    """How many models and vectors one client receives and sends in a round. An algorithm declares it in its attribute
    ``traffic``, and the columns ``bytes_down`` and ``bytes_up`` of metrics.csv are computed from it.

    ``models_down`` and ``vectors_down`` are what the client receives, and ``models_up`` and ``vectors_up`` what it
    sends. A model consists of parameters and buffers; a vector has one number for each parameter. ``numbers_down`` and
    ``numbers_up`` are how many numbers go beside these, such as a row for each class; they may be functions of what is
    known of the model (:class:`~fedray.models.inspection.ModelFacts`). The default is
    FedAvg's traffic, one model in each direction. SCAFFOLD, with an additional vector in each direction, has
    ``Traffic(vectors_down=1, vectors_up=1)``.
    """

    models_down: float = 1
    models_up: float = 1
    vectors_down: float = 0
    vectors_up: float = 0
    numbers_down: Numbers = 0
    numbers_up: Numbers = 0

    def numbers(self, facts: ModelFacts) -> tuple[float, float]:
        """Returns how many other numbers a client receives and sends."""
        down, up = (each(facts) if callable(each) else each for each in (self.numbers_down, self.numbers_up))
        return down, up


@dataclass(frozen=True)
class Work:
    """What one client computes in a round beyond FedAvg's forward and backward pass over each of its J mini-batches. An
    algorithm declares it in its attribute ``work``, and the column ``flops`` of metrics.csv includes it.

    Args:
        per_step: the number of operations for each parameter of the model in each local step.
        further: additional local steps, each with a forward and a backward pass over a mini-batch of its own.
        further_epochs: additional epochs, each with a forward and a backward pass over all samples of the client.
        once: the number of operations for each parameter that are made once in the round.
        forwards: additional forward passes over each mini-batch.
        backwards: additional backward passes over each mini-batch.
        predictions: additional forward and backward passes over each mini-batch that go only through the predictor, a
            second network that the model's head has for some algorithms.
        full_gradients: the number of times in a round that the gradient over all samples of the client is computed.
        full_losses: the number of times in a round that the loss over all samples of the client is computed.

    Example:
        work = Work(per_step=2)  # for FedProx, which adds mu (y - x)
    """

    per_step: float = 0
    once: float = 0
    forwards: float = 0
    backwards: float = 0
    predictions: float = 0
    further: float = 0
    further_epochs: float = 0
    full_gradients: float = 0
    full_losses: float = 0
