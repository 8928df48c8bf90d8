"""Whether each model gives the same bits again on this machine, for the table of `fedray models`.

    python analysis/benchmarks/bits.py [--device cuda] [--models resnet18 torchvision:swin_t] [--write]

Of each model and precision one gradient and one evaluation are rehearsed as before the first round of a run, which
finds operations that have no deterministic version; then gradients of one mini-batch are computed again and compared.
--write puts the result into fedray/models/bits.yaml, in place of what is there for this kind of device.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fedray.config import load
from fedray.core.batches import Batch
from fedray.core.seeds import Purpose
from fedray.data.sources.source import Source
from fedray.engine import rehearsal
from fedray.engine.clients import Clients
from fedray.engine.determinism import strictly
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.engine.process import computing_process, describe
from fedray.engine.state.states import StateFolder
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.models import MODELS
from fedray.models.bits import TABLE

PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}
SIDE, OF_ATTENTION = 32, {"cpu": 64, "cuda": 224}
"""The sides of images. Attention's kernels of GPUs add in parts from about 100 places on, which are 160 pixels."""

SAMPLES, AGAIN = 16, 4
"""The samples of a mini-batch, and how often its gradient is computed again."""

WORDS, LENGTH = 100, 20


def source_for(name: str, side: int) -> Source:
    """Returns samples of random numbers for the model ``name``: texts of words, or colour images."""
    rng = np.random.default_rng(0)
    count = 2 * SAMPLES
    if name.endswith("_lstm"):
        x = rng.integers(0, WORDS, (count, LENGTH))
        y = rng.integers(0, WORDS, (count, LENGTH) if name == "stackoverflow_lstm" else count)
        return Source("texts", x, y, x, y, WORDS, task="tokens" if y.ndim == 2 else "auto")
    x = rng.standard_normal((count, 3, side, side), dtype=np.float32)
    y = np.arange(count) % 10
    return Source("images", x, y, x, y, 10)


def causes(experiment: Experiment, data: Any, precision: str) -> list[str]:
    """Returns why the model of ``experiment`` may have other bits another time, in ``precision``."""
    config = experiment.config
    train = config.train.model_copy(update={"precision": precision})
    experiment = replace(experiment, config=config.model_copy(update={"train": train}))
    with computing_process(1, False, precision):
        clients = Clients(experiment, data, StateFolder(Path()), experiment.device)
        found = rehearsal.rehearsed(clients, Evaluator(clients))
        network = clients.network
        x, y = clients.train.gather(np.arange(SAMPLES)[None])
        model = network.loaded()

        def gradient() -> torch.Tensor:
            at = model.clone().rows(1)
            return network.gradients(at, Batch(x, y, 0), rng=lambda row: network.rng(0, Purpose.DROPOUT)).value

        def is_equal() -> bool:
            first = gradient().clone()
            return all(torch.equal(gradient(), first) for _ in range(AGAIN))

        if found.strict:
            with strictly():
                equal = is_equal()
        else:
            equal = is_equal()
    return [*found.operations, *([] if equal else [f"gradients differed in {AGAIN + 1} passes"])]


def measure(name: str, device: str, precisions: tuple[str, ...]) -> dict[str, list[str]]:
    """Returns the :func:`causes` of the model ``name`` by precision."""
    keys = {
        "algorithm.name": "fedavg", "model.name": name, "data.clients": 2, "data.partition.kind": "iid",
        "data.public_samples": 0, "train.batch_size": SAMPLES, "engine.kind": "local", "engine.device": device,
        "engine.vectorize": False, "engine.compile": False, "run.rounds": 1,
    }  # fmt: skip
    side = OF_ATTENTION[device] if "vit" in name else SIDE
    experiment, data = resolve(load(keys), CustomObjects(source_for(name, side)))
    found = {}
    for precision in precisions:
        start = time.perf_counter()
        found[precision] = causes(experiment, data, precision)
        seconds = time.perf_counter() - start
        print(f"{name}, {precision}: {'; '.join(found[precision]) or 'the same bits'} ({seconds:.1f} s)", flush=True)
    return found


def with_device(device: str, models: dict[str, Any]) -> str:
    """Returns the text of the table with what was found of ``models`` on ``device``."""
    facts = describe(device)
    version = str(facts["torch"])
    table = dict(yaml.safe_load(TABLE.read_text("utf-8")) or {}) if TABLE.exists() else {}
    former = table.get(device, {})
    # of another torch or card nothing is known
    same = (former.get("device"), former.get("torch")) == (facts["device"], version)
    table[device] = {
        "device": facts["device"], "torch": version, "measured": str(date.today()),
        "precisions": list(PRECISIONS[device]), "models": {**(former["models"] if same else {}), **models},
    }  # fmt: skip
    text = yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120)
    return f"# written by analysis/benchmarks/bits.py\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[*PRECISIONS], default="cpu")
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rehearsal.REHEARSING.add(options.device)
    models: dict[str, Any] = {}
    for name in options.models:
        models[name] = measure(name, options.device, PRECISIONS[options.device])
        if options.write:
            # after each, so that an end before the last keeps those that were measured
            TABLE.write_text(with_device(options.device, models), "utf-8")
    print(with_device(options.device, models))


if __name__ == "__main__":
    main()
