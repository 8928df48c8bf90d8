"""What is computed: the workloads, the same for every system that is measured. Imports nothing large."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """A round: ``cohort`` of ``clients`` with ``samples`` each make ``steps`` of SGD on batches of ``batch``."""

    model: str  # fedray's name for it
    clients: int
    samples: int
    cohort: int
    steps: int
    batch: int
    lr: float = 0.01
    source: str = "mnist"

    @property
    def overlap(self) -> bool:
        """Whether clients draw their samples, as there are too few to deal out."""
        return self.clients * self.samples > SAMPLES[self.source]


SAMPLES = {"mnist": 60_000, "cifar10": 50_000}

WORKLOADS = {
    "A": Workload("lenet5", clients=100, samples=600, cohort=100, steps=10, batch=64),
    "B": Workload("lenet5", clients=1000, samples=60, cohort=100, steps=3, batch=20),
    "C": Workload("logistic", clients=100, samples=60, cohort=100, steps=2, batch=10),
    # pfl-research's own benchmark (benchmarks/image_classification/configs/baseline.yaml), without dropout
    "D": Workload(
        "problems:SimpleCNN", clients=1000, samples=50, cohort=50, steps=5, batch=10, lr=0.1, source="cifar10"
    ),
    "E": Workload("mobilenet_v2", clients=100, samples=100, cohort=20, steps=3, batch=32, source="cifar10"),
}

# rounds per sample: CPU accounting has a resolution of 10 ms, so that a sample must last about half a second
BLOCK = {"A": 1, "B": 3, "C": 60, "D": 1, "E": 1}
