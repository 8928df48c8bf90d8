"""The base class of attacks by Byzantine clients, and what an attack gets to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.samples import Indices
from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.errors import UserError


@dataclass(frozen=True)
class AttackedRun:
    """What an attack gets to know of a run before its first round (:meth:`Attack.prepare`).

    Attributes:
        data: All samples, and which client holds which.
        task: The kind of task, such as ``classification``.
        augment: ``data.augment``, how inputs are changed at random in training.
        seed: ``run.seed``.
        kind: ``attack.kind``, for messages.
    """

    data: FederatedData
    task: str
    augment: str
    seed: int
    kind: str

    @property
    def classes(self) -> int:
        """How many classes there are. Raises :class:`UserError` if targets are no class numbers."""
        if self.task != "classification":
            raise UserError(f"attack.kind={self.kind} changes class numbers, which this task does not have")
        return self.data.classes

    def images(self) -> NDArray[Any]:
        """Returns the test images in their stored form, ``[n, channels, height, width]``, for an attack that changes
        some pixels. Raises :class:`UserError` if there are none, if inputs are no images in one array, or if
        ``data.augment`` would move the pixels."""
        images, shape = self.data.x_test, self.data.input_shape
        if not isinstance(images, np.ndarray) or not isinstance(shape, tuple) or len(shape) != 3:
            raise UserError(
                f"attack.kind={self.kind} marks images in an array [n, channels, height, width]; these inputs are no "
                "images, or are read one by one (data.access)"
            )
        if self.augment != "none":
            raise UserError(f"data.augment={self.augment} would move or cut off the mark of attack.kind={self.kind}")
        if not len(images):
            raise UserError(f"attack.kind={self.kind} needs a test set, on which its success is measured")
        return images

    def generator(self) -> np.random.Generator:
        """Returns a NumPy generator of random numbers that depend on ``run.seed`` alone."""
        return stream(self.seed, Purpose.ATTACK, 0, 1)


@dataclass(frozen=True)
class AttackedRows:
    """Tells an attack about the uploads that it changes (:meth:`Attack.upload`): a row for each of the k Byzantine
    clients of a cohort.

    Attributes:
        name: The name under which the algorithm returns the upload, such as ``y``.
        round: The round, from 1.
        clients: The numbers of the k clients; ``clients[i]`` is the client of row i.
        members: How many clients the cohort has, m.
        cohort: The rows of all m clients, float32 ``[m, d]``, which must not be changed. Use :attr:`honest`.
        byzantine: Which of them are those of Byzantine clients, bool ``[m]``.
        seed: ``run.seed``; only :meth:`generator` uses it.
        place: The number of the upload among those of the phase; only :meth:`generator` uses it.
    """

    name: str
    round: int
    clients: Sequence[int]
    members: int
    cohort: Tensor
    byzantine: Tensor
    seed: int
    place: int

    @property
    def honest(self) -> Tensor:
        """A copy of the rows of the m - k other clients, float32 ``[m - k, d]``. There may be none."""
        return self.cohort[~self.byzantine]

    def generator(self, row: int) -> np.random.Generator:
        """Returns a new NumPy generator for the client in ``row``. Its numbers depend only on ``run.seed``, the round,
        the client and the upload."""
        return stream(self.seed, Purpose.ATTACK, self.round, self.clients[row], self.place)


class Attack:
    """The base class of attacks by Byzantine clients (``attack``). Its options are the keys of ``attack`` besides
    ``kind`` and ``fraction``, or ``attack.options`` of a user-defined one, and the arguments of the class.

    An attack defines one or more of the methods below. They are given what belongs to Byzantine clients alone, and what
    they return takes its place. Each result may depend only on the arguments and on what :meth:`prepare` has stored,
    because workers compute it again if a process dies. :class:`fedray.testing.AttackContract` tests this.

    Example:
        class Opposite(Attack):
            def upload(self, rows, sent):
                return -rows
    """

    def prepare(self, run: AttackedRun) -> None:
        """Is called once, before the run. Store what the attack needs of ``run`` in attributes, but not ``run`` itself,
        because the attack is sent to all workers.

        Raises:
            UserError: The attack does not go with the data or the task.
        """

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        """Returns what Byzantine clients send in place of ``rows``. It is called at the server, for each upload.

        Args:
            rows: A copy of the uploads of the k Byzantine clients of a cohort, float32 ``[k, d]``: updates y_i - x of a
                model, or vectors, after the steps of ``train.upload``.
            sent: The clients' numbers, the uploads of the others, and random numbers.

        Returns:
            Rows of the same shape and type.
        """
        return rows

    def poison(self, stored: Any, labels: Tensor, indices: Indices) -> tuple[Any, Tensor]:
        """Returns the inputs and labels on which Byzantine clients train in place of ``stored`` and ``labels``, in the
        same forms. It is called where clients are trained, for mini-batches of any of them.

        Args:
            stored: Copies of the inputs of J mini-batches of k clients, before they are scaled, ``[J, k, b, ...]``.
            labels: Their targets, ``[J, k, b, ...]``.
            indices: The numbers of these samples among all training samples, int64 ``[J, k, b]``.
        """
        return stored, labels

    def victims(self) -> NDArray[np.int64]:
        """Returns the numbers of the test samples on which the attack's success is measured. An attack that defines
        this and :meth:`disguise` has the column ``backdoor_accuracy``: how many of them the model takes for what the
        attacker wants."""
        return np.empty(0, np.int64)

    def disguise(self, stored: Any, labels: Tensor) -> tuple[Any, Tensor]:
        """Returns the inputs of n victims as the attacker shows them to the model, and the labels for which it wants
        them to be taken. ``stored [n, ...]`` are their inputs before they are scaled, and ``labels [n]`` their own
        labels."""
        return stored, labels

    def poisons(self) -> bool:
        """Returns whether Byzantine clients train on other samples than their own: the class defines
        :meth:`poison`."""
        return type(self).poison is not Attack.poison

    def has_victims(self) -> bool:
        """Returns whether the attack's success is measured: the class defines :meth:`victims`."""
        return type(self).victims is not Attack.victims
