"""What the clients of an algorithm and its server send each other in a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedray.core.vectors import Vector

Weights = Literal["weighted_mean", "uniform_mean", "sum", "mean_by", "gather"]

MEANS = ("weighted_mean", "uniform_mean")
"""The kinds of uploads that a robust rule (``train.aggregation``) puts together in another way."""


@dataclass(frozen=True)
class Upload:
    """What the clients of a stack (clients that are trained together) send to the server under one name: a model or a
    vector v_i from each client.

    The server gets only a weighted sum over the cohort, ``sums[name]``, unless it asks for all (:meth:`gather`).
    Vectors may have any shape. Do not call the class itself, but one of its
    methods, which differ in the weights::

        Result(uploads={"y": Upload.weighted_mean(carry["y"])})     # server_update gets it as sums["y"]

    A model's buffers of whole numbers, such as BatchNorm's number of batches, are not summed: the server gets those of
    the cohort's first client.

    Args:
        value: the models or vectors ``[C, ...]``, float32, with a row for each of the stack's C clients.
        weights: the name of the method that made the upload.
        scale: for :meth:`mean_by` the clients' weights s_i, ``[C, 1]``, in the mean sum_i s_i v_i / sum_i s_i;
            otherwise None.
    """

    value: Vector
    weights: Weights
    scale: Tensor | None = None

    @classmethod
    def weighted_mean(cls, value: Vector) -> Upload:
        """Makes an upload of the clients' models or vectors v_i, ``value [C, ...]``, of which the server gets the mean
        sum_i p_i v_i over the cohort. The aggregation weights p_i sum to 1 (``train.weighting``)."""
        return cls(value, "weighted_mean")

    @classmethod
    def uniform_mean(cls, value: Vector) -> Upload:
        """Makes an upload of the clients' models or vectors v_i, ``value [C, ...]``, of which the server gets the mean
        (1/m) sum_i v_i over the cohort, where m is the size of the cohort."""
        return cls(value, "uniform_mean")

    @classmethod
    def sum(cls, value: Vector) -> Upload:
        """Makes an upload of the clients' models or vectors v_i, ``value [C, ...]``, of which the server gets the sum
        sum_i v_i over the cohort."""
        return cls(value, "sum")

    @classmethod
    def gather(cls, value: Vector) -> Upload:
        """Makes an upload of the clients' models or vectors v_i, ``value [C, ...]``, of which the server gets all, in
        the order of ``server.cohort.ids``: models or vectors with m rows, ``[m, ...]``, where m is the size of the
        cohort. The server needs memory for all of them."""
        return cls(value, "gather")

    @classmethod
    def mean_by(cls, scale: Tensor, value: Vector) -> Upload:
        """Makes an upload of the clients' models or vectors v_i, ``value [C, ...]``, of which the server gets the
        weighted mean sum_i s_i v_i / sum_i s_i over the cohort. ``scale [C, 1]`` has a number s_i >= 0 for each
        client."""
        return cls(value, "mean_by", scale)


@dataclass
class Result:
    """What a phase returns for a stack of C clients that are computed together: what the clients send, and what they
    keep.

    For example ``Result({"y": Upload.weighted_mean(y)}, state={"c": c})``. A phase must return the same names in every
    round for every client.

    Args:
        uploads: models and vectors by name, of which the server gets weighted sums.
        state: the models, vectors and numbers ``[C, ...]`` that the clients keep until they take part again, by name.
            Their names are those that the algorithm lists in its attributes ``client_state``, ``client_models`` and
            ``client_numbers``. They replace the old state at the end of the round. If the dict is empty, the old state
            stays; otherwise it must contain all of these names.
        scalars: numbers ``[C, 1]`` by name, which the server gets one by one for each client.
        kept: models and vectors ``[C, ...]`` by name, which the next phase of this round finds in ``client.kept``.
    """

    uploads: Mapping[str, Upload] = field(default_factory=dict)
    state: Mapping[str, Vector] = field(default_factory=dict)
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Vector] = field(default_factory=dict)


@dataclass
class Broadcast:
    """What the server sends to the clients at the start of a phase, a part of a round.

    Args:
        shared: models and tensors by name, the same for all clients. Clients find them in ``client.shared``.
        scalars: lists of numbers by name, with a number for each client in the order of the cohort. A client finds its
            number as ``client.scalars[name]``.

    Example:
        Broadcast({"x": server["x"], "m": server["m"]})
    """

    shared: dict[str, Vector]
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
