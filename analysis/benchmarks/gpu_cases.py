"""The runs of gpu_bits.py: cases, whose results are to be the same in several ways, and one run in a process."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Settings = dict[str, Any]

WAYS: dict[str, Settings] = {
    "local": {"engine.kind": "local"},
    "1 lane": {"engine.kind": "local", "engine.lanes": 1},
    "8 lanes": {"engine.kind": "local", "engine.lanes": 8},
    "1 actor": {"engine.kind": "ray", "engine.actors": 1},
    "4 actors": {"engine.kind": "ray", "engine.actors": 4},
}
"""Ways to the same bits. The first of a case is what the others are compared to."""

ALL, LANES, STACKS = tuple(WAYS), ("1 lane", "8 lanes", "4 actors"), ("local", "1 actor", "4 actors")
EQUAL, UNEVEN = (16,) * 6, (9, 20, 33, 12, 41, 28)
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
ONE_BY_ONE = {"engine.vectorize": False}


@dataclass(frozen=True)
class Case:
    """A small run: the settings beside the common ones, the shape of a sample, and the sizes of the clients.

    Samples are images with one of ``classes`` each; with ``text`` they are whole numbers below ``classes``, and the
    targets are one number for each sample, or for each token ("tokens").
    """

    settings: Mapping[str, Any]
    shape: tuple[int, ...] = GREY
    ways: tuple[str, ...] = ALL
    sizes: tuple[int, ...] = EQUAL
    classes: int = 10
    text: str | None = None
    common: Mapping[str, Any] = field(default_factory=lambda: COMMON)

    def data(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns inputs, targets, and whose they are."""
        rng, count = np.random.default_rng(seed), sum(self.sizes)
        high = self.classes if self.text else 256
        x = rng.integers(0, high, (count, *self.shape)).astype(np.int64 if self.text else np.uint8)
        y = rng.integers(0, self.classes, (count, *self.shape) if self.text == "tokens" else count)
        # every class occurs, so that their number is known
        y.reshape(-1)[: self.classes] = np.arange(self.classes) if y.size >= self.classes else self.classes - 1
        return x, y, np.repeat(np.arange(len(self.sizes)), self.sizes)


COMMON: Settings = {
    "algorithm.name": "fedavg", "train.local_steps": 10, "train.batch_size": 8, "train.lr": 0.01, "run.rounds": 2,
    "run.eval_every": 0, "run.checkpoint_every": 0, "run.log_clients": False, "run.resume": False,
}  # fmt: skip
EPOCHS: Settings = {**COMMON, "train.local_steps": None, "train.local_epochs": 2, "run.rounds": 3}

SHAPES = {
    "ghbm_cnn": COLOUR, "resnet20": COLOUR, "alexnet": COLOUR, "vgg16": COLOUR, "resnet18": COLOUR, "resnet50": COLOUR,
    "mobilenet_v2": COLOUR, "vit_b_16": (3, 224, 224), "firenet": (3, 64, 64), "shakespeare_lstm": (80,),
    "stackoverflow_lstm": (20,),
}  # fmt: skip
TEXTS = {"shakespeare_lstm": ("one", 80), "stackoverflow_lstm": ("tokens", 10_004)}
SMALL = ("logistic", "mlp", "lenet5", "ghbm_cnn")
PERSONAL: Settings = {"run.personal_models_of": "all"}

ALGORITHMS: dict[str, Settings] = {
    **{
        name: {"algorithm.name": name}
        for name in ("fedavg", "scaffold", "fedtrip", "ghbm", "fedhbm", "pfedmo", "fedsam")
    },
    **{name: {"algorithm.name": name, **PERSONAL} for name in ("fedper", "fedrep", "fedproto")},
    "fedbn": {"algorithm.name": "fedbn", "model.name": "resnet20", **PERSONAL},
    **{name: {"algorithm.name": name, "train.lr": 0.001} for name in ("moon", "fedsiam_da")},
    "clipped": {"train.grad_clip": 0.5},
    "momentum": {"train.momentum": 0.9, "train.nesterov": True, "train.weight_decay": 0.01},
    "adam": {"train.optimizer": "adam", "train.lr": 0.001},
    "scaffold, clipped": {"algorithm.name": "scaffold", "train.grad_clip": 0.5},
    "tf32": {"train.precision": "tf32"},
    "bf16": {"train.precision": "bf16"},
}
"""With GHBM's CNN but for FedBN, which needs norms, epochs, and clients whose sizes differ."""


def model_cases(names: list[str]) -> dict[str, Case]:
    """Returns a case for each model as it is run by itself, and one for small models without stacks."""
    found = {}
    for name in names:
        text, classes = TEXTS.get(name, (None, 10))
        task = {"task.kind": "tokens"} if text == "tokens" else {}
        shape = SHAPES.get(name, GREY)
        found[name] = Case({"model.name": name, **task}, shape, classes=classes, text=text)
        if name in SMALL:
            found[f"{name}, one by one"] = Case({"model.name": name, **ONE_BY_ONE}, shape, LANES)
    if "resnet18" in names:
        found["resnet18, GroupNorm"] = Case({"model.name": "resnet18", "model.norm": "group"}, COLOUR)
    return found


def algorithm_cases() -> dict[str, Case]:
    """Returns a case for each algorithm and kind of step, one client after another, and some in stacks."""
    found = {
        name: Case({"model.name": "ghbm_cnn", **ONE_BY_ONE, **changed}, COLOUR, LANES, UNEVEN, common=EPOCHS)
        for name, changed in ALGORITHMS.items()
    }
    for name in ("fedavg", "scaffold", "ghbm"):
        settings = {"algorithm.name": name, "model.name": "lenet5", "engine.vectorize": True, "engine.chunk": 3}
        found[f"{name}, stacks"] = Case(settings, GREY, STACKS, UNEVEN, common=EPOCHS)
    return found


def outcome(case: Case, way: str, device: str) -> dict[str, Any]:
    """Makes one run, and returns the sha256 of its model and of the personal models that it saves, whether its bits are
    promised, and its seconds; or its error."""
    began = time.perf_counter()
    try:
        found = _outcome(case, way, device)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0][:160]}"}
    return {**found, "seconds": time.perf_counter() - began}


def _outcome(case: Case, way: str, device: str) -> dict[str, Any]:
    from fedray import simulate

    settings = {**case.common, "engine.device": device, **case.settings, **WAYS[way]}
    if WAYS[way]["engine.kind"] == "ray":
        _own_cluster(device)
        if device == "cuda":
            settings["engine.gpus_per_actor"] = 1 / WAYS[way]["engine.actors"]
    settings = {key: value for key, value in settings.items() if value is not None}
    x, y, owner = case.data()
    few = slice(0, 8)
    with tempfile.TemporaryDirectory() as folder:
        result = simulate({**settings, "run.output": folder}, data=(x, y, owner), test=(x[few], y[few]))
        summary = result.summary
        sha256 = summary["model_sha256"]
        if personal := sorted((result.folder / "personal").glob("*.safetensors")):
            sha256 = hashlib.sha256(sha256.encode() + b"".join(path.read_bytes() for path in personal)).hexdigest()
    return {
        "sha256": sha256, "promised": summary["machine"]["bits_promised"],
        "status": summary["status"],
    }  # fmt: skip


def _own_cluster(device: str) -> None:
    """Starts a Ray cluster of this process's own, unless it has one."""
    import ray

    if not ray.is_initialized():
        os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="fedray-")
        gpus = {"num_gpus": 1} if device == "cuda" else {}
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **gpus
        )


def verdict(same: bool) -> str:
    return "same" if same else "NOT THE SAME"


def rows(name: str, case: Case, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the line of a case in the table, and one for each way that failed or gave other bits."""
    shas = {way: found[way]["sha256"] for way in case.ways if "sha256" in found[way]}
    first = next(iter(shas.values()), "-")
    same = len(set(shas.values())) == 1 and len(shas) == len(case.ways)
    promised = all(found[way].get("promised", False) for way in shas)
    seconds = " ".join(f"{found[way]['seconds']:.0f}" for way in case.ways)
    yield f"| {name} | {first[:12]} | {verdict(same)} | {'yes' if promised else 'no'} | {seconds} |"
    for way in case.ways:
        if "error" in found[way]:
            yield f"|   {way} | {found[way]['error']} | | | |"
        elif found[way]["sha256"] != first or found[way]["status"] != "completed":
            yield f"|   {way} | {found[way]['sha256'][:12]} | {found[way]['status']} | | |"
