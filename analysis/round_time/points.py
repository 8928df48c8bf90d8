"""The points that are measured: which work, and what does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Work:
    """A model, and what a client trains it on: ``steps`` local steps with mini-batches of ``batch`` samples.

    ``guess`` are the seconds that a local step takes on one processor, about, from which the number of rounds follows
    that a point is given. ``stacked`` says whether fedray trains these clients in stacks on a CPU.
    """

    name: str
    shape: tuple[int, ...]
    batch: int
    steps: int
    guess: float
    stacked: bool = False
    settings: dict[str, Any] = field(default_factory=dict, compare=False)


WORKS = {
    "logistic": Work("logistic regression", (1, 28, 28), batch=10, steps=2, guess=0.0004, stacked=True),
    "lenet5": Work("LeNet-5", (1, 28, 28), batch=20, steps=3, guess=0.004),
    "ghbm_cnn": Work("GHBM's CNN", (3, 32, 32), batch=5, steps=1, guess=0.02),
    "resnet18": Work(
        "ResNet-18", (3, 32, 32), batch=4, steps=1, guess=0.15,
        settings={"model.stem": "imagenet", "model.norm": "group"},
    ),
}  # fmt: skip
"""The models by ``model.name``, from the smallest to the largest. The steps are few and small, so that what is not
training can be seen beside it, and a cohort of 1,000 is measured in a minute."""


@dataclass(frozen=True)
class Point:
    """What is measured in one process: rounds of FedAvg in which ``cohort`` of ``clients`` registered clients train
    ``model`` for ``steps`` local steps, on ``actors`` client actors that are spread over ``hosts`` hosts.

    One host is this machine; more are the first ones of ``--hosts``. With the ``device`` "cuda" clients are trained on
    the GPUs. ``turn`` counts repetitions, from 0.
    """

    model: str
    cohort: int = 100
    clients: int = 10_000
    actors: int = 2
    steps: int = 0
    hosts: int = 1
    device: str = "cpu"
    turn: int = 0

    def __post_init__(self) -> None:
        # 0 stands for the model's own number, so that a point is written down in one way only
        object.__setattr__(self, "steps", self.steps or self.work.steps)

    @property
    def work(self) -> Work:
        return WORKS[self.model]

    def rounds(self, seconds: float) -> int:
        """Returns how many rounds to make, so that those that count take about ``seconds`` on two processors."""
        guess = 0.01 + self.work.guess * self.steps * self.cohort / min(2, self.actors)
        return WARM_UP + max(LEAST_ROUNDS, min(300, round(seconds / guess)))

    def __str__(self) -> str:
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        device = ", GPU" if self.device != "cpu" else ""
        steps = f"{self.steps} local step{'s' if self.steps > 1 else ''}"
        actors = f"{self.actors} actor{'s' if self.actors > 1 else ''}"
        cohort = f"{self.cohort:,} of {self.clients:,} clients"
        return f"{self.work.name}, {cohort}, {steps}, {actors}{hosts}{device}"


WARM_UP = 2
"""The first rounds, which do not count: the first one holds the start, and in the second tasks are still sized for
unknown speeds."""

LEAST_ROUNDS = 3
"""The fewest rounds of a point that count."""

COHORTS = (10, 32, 100, 316, 1000)
CLIENTS = (10, 100, 1000, 10_000, 100_000)


def grid(quick: bool, hosts: int, gpu: bool, turns: int = 1) -> list[Point]:
    """Returns the points to measure, without repetition.

    Args:
        quick: a few points that show in minutes whether everything works.
        hosts: how many hosts there are. Points for two hosts and more are left out where there are fewer.
        gpu: whether there is a GPU, which then gets points of its own.
        turns: how often each point is measured.
    """
    points = [*(_quick() if quick else _full()), *_on_hosts(quick, hosts)]
    if gpu:
        points += [Point(model, cohort, actors=1, device="cuda") for model in WORKS for cohort in (10, 100, 1000)]
    different = list(dict.fromkeys(points))
    return [Point(**{**vars(point), "turn": turn}) for turn in range(turns) for point in different]


def _quick() -> Iterator[Point]:
    yield Point("logistic", clients=100)
    yield Point("logistic", clients=100_000)
    yield Point("logistic", 1000)
    yield Point("logistic", actors=1)
    yield Point("logistic", steps=16)
    yield Point("lenet5", 10)
    yield Point("lenet5")
    yield Point("lenet5", actors=4)
    yield Point("resnet18", 4)
    yield Point("resnet18", 16)


def _full() -> Iterator[Point]:
    """Yields points of which each differs from the model's usual one (100 of 10,000 clients, two actors) in one
    respect, and some that differ in two."""
    for clients in CLIENTS:
        for model in ("logistic", "lenet5"):
            yield Point(model, min(100, clients), clients)
    yield Point("logistic", 1000, 100_000)
    for model in WORKS:
        for cohort in COHORTS:
            if cohort <= 316 or model != "resnet18":
                yield Point(model, cohort)
        for actors in (1, 4, 8):
            yield Point(model, actors=actors)
    yield Point("logistic", 1000, actors=8)
    yield Point("lenet5", 1000, actors=8)
    for model, steps in (("logistic", 8), ("logistic", 32), ("lenet5", 1), ("lenet5", 10), ("ghbm_cnn", 4)):
        yield Point(model, steps=steps)


def _on_hosts(quick: bool, hosts: int) -> Iterator[Point]:
    for count in range(2, hosts + 1):
        if quick:
            yield Point("lenet5", hosts=count, actors=count)
            yield Point("resnet18", 16, hosts=count, actors=count)
            continue
        for model in WORKS:
            yield Point(model, hosts=count, actors=count)
            if model != "resnet18":
                yield Point(model, 1000, hosts=count, actors=count)
        for model in ("lenet5", "resnet18"):
            yield Point(model, hosts=count, actors=2 * count)
    if hosts >= 3 and not quick:
        # minutes a round, for the bytes of the largest
        yield Point("resnet18", 1000, hosts=3, actors=3)


def expected_minutes(points: Sequence[Point], seconds: float) -> float:
    """Returns about how long ``points`` take if the rounds of each that count take ``seconds``: on two processors, with
    12 seconds for the start of each."""
    total = 0.0
    for point in points:
        total += 12 + point.rounds(seconds) * (0.01 + point.work.guess * point.steps * point.cohort / 2)
    return total / 60
