"""What runs compute, to the bit: ``golden.json`` holds the final model and the last row of metrics of each case here.

    python tests/golden.py                   # run all cases and print what differs from the file
    python tests/golden.py --write           # the same, and write the file again
    python tests/golden.py --write-values    # the same, and write golden_values.json

A change that should alter no result leaves the file as it is. Bits depend on the processor, its instruction set and the
version of torch, so the file has an entry for each such kind of machine, and a new kind gets one by ``--write``. On a
kind that has no entry, the metrics of any entry and the numbers of the final model in ``golden_values.json`` must be
met but for rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from variants import BESIDE_A_RULE
from variants import CASES as VARIANTS

from fedray import simulate
from fedray.algorithms import known_algorithms
from fedray.engine.process import describe
from fedray.testing.contracts import SETTINGS, TIMES, small_source

FILE = Path(__file__).with_name("golden.json")
VALUES = Path(__file__).with_name("golden_values.json")

TOLERANCE = 1e-3
"""How far numbers of another kind of machine may be, relative to them. Among the kinds in golden.json no loss differs
by more than 1e-4."""

ONE_SAMPLE = 0.02
"""How far accuracies may be: the contracts' test set has 60 samples, of which rounding may turn one."""

Outcome = dict[str, Any]
"""``model_sha256``, and the columns of the last row of metrics.csv by name: None where there is no number."""

Values = list[float]
"""The Euclidean norm of the final model, the sum of its parameters, and five of them."""


class Case(NamedTuple):
    """A run: settings on top of the contracts' own, and the class of a model that is given instead of a named one."""

    settings: Mapping[str, Any]
    model: type[nn.Module] | None = None


class BatchNormNet(nn.Sequential):
    """A model whose running statistics are part of the result."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


class DropoutNet(nn.Sequential):
    """A model that draws random numbers while it is trained."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(input_shape[0], 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, classes))


OF_SGD = {"train.momentum": 0.5, "train.weight_decay": 0.01, "train.grad_clip": 0.5, "train.lr_decay": 0.9}
STACKS = {"engine.vectorize": True, "engine.chunk": 2}
SCORES = {
    "run.eval_clients": "all", "run.finetune_steps": 3, "data.least_test_samples": 5, "run.eval_train_samples": 50,
    "data.validation_samples": 40,
}  # fmt: skip
IMAGES = {
    "data.source": "sample", "data.clients": 6, "data.public_samples": 200, "model.name": "lenet5",
    "train.local_epochs": None, "train.local_steps": 3, "train.batch_size": 16, "train.cohort_size": 3,
    "train.lr": 0.1, "run.rounds": 4,
}  # fmt: skip
"""LeNet-5 on the images that come with fedray, instead of the contracts' small problem."""

ALL_ALGORITHMS = {"BatchNorm": Case({}, BatchNormNet), "momentum, decay, clipping": Case(OF_SGD)}
"""Of every algorithm, as each decides for itself what becomes of running statistics and of the momentum buffer."""

WAYS = {
    "dropout": Case({}, DropoutNet),
    "equal steps": Case({"train.local_epochs": None, "train.local_steps": 4}),
    "full batches": Case({"train.batch_size": "full"}),
    "stacks": Case(STACKS),
    "stacks, momentum, decay, clipping": Case(STACKS | OF_SGD),
    "compiled": Case({"engine.compile": True}),
    "stacks, compiled": Case(STACKS | {"engine.compile": True}),
    "scores of clients": Case(SCORES),
    "images": Case(IMAGES),
    "images, cropped and mirrored": Case(IMAGES | {"data.augment": "crop_flip"}),
}
"""Runs that go other ways through the engine than the contracts' own, of ragged epochs, one client after another."""

EVERY_WAY = ("fedavg", "scaffold", "ghbm", "mime", "pfedmo")
"""Algorithms that go all these ways: without state, with it, with models of earlier rounds, with full-batch gradients,
and with a public set."""

ONLY_FEDAVG = {
    "uniform weights, cyclic cohorts": Case({"train.weighting": "uniform", "train.sampling": "cyclic"}),
    "bf16": Case({"train.precision": "bf16"}),
    "public samples dealt": Case({"data.public_to": "clients"}),
    "everybody": Case({"train.cohort_size": None}),
    "server learning rate": Case({"train.server_lr": 0.5}),
    **{label: Case(settings) for label, settings in BESIDE_A_RULE.items()},
}

ONLY_PFEDMO = {"printed form, momentum, decay, clipping": Case(OF_SGD | {"algorithm.form": "printed"})}


def cases() -> dict[str, Case]:
    """All cases by name."""
    found = {name: Case({"algorithm.name": name}) for name in known_algorithms()}
    for algorithm, hyper, _, settings in VARIANTS:
        changed = {f"algorithm.{key}": value for key, value in hyper.items()} | settings
        label = ", ".join([algorithm, *(f"{key}={value}" for key, value in changed.items())])
        found[label] = Case({"algorithm.name": algorithm, **changed})
    of_algorithms = [(name, ALL_ALGORITHMS) for name in known_algorithms()] + [(name, WAYS) for name in EVERY_WAY]
    for algorithm, ways in [*of_algorithms, ("fedavg", ONLY_FEDAVG), ("pfedmo", ONLY_PFEDMO)]:
        for label, way in ways.items():
            found[f"{algorithm}: {label}"] = Case({"algorithm.name": algorithm, **way.settings}, way.model)
    return found


def machine() -> str:
    """The kind of this machine: machines of one kind compute the same bits."""
    here = describe("cpu")
    return f"{here['device']}, {here['instructions']}, torch {here['torch']}"


def outcome(case: Case) -> tuple[Outcome, Values]:
    """Runs a case."""
    settings = {**SETTINGS, "engine.device": "cpu", **case.settings}
    images = case.settings.get("data.source") == "sample"
    if images or case.model is not None:
        settings = {key: value for key, value in settings.items() if key != "model.hidden"}
    if case.model is not None:
        del settings["model.name"]
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(settings | {"run.output": folder}, data=None if images else small_source(), model=case.model)
        # epsilon is computed by a library, whose versions may round otherwise
        row = run.metrics.drop(columns=[*TIMES, "epsilon"], errors="ignore").iloc[-1].to_dict()
        sha = run.summary["model_sha256"]
        model = torch.cat([p.detach().double().flatten() for p in run.model().parameters()])
    places = torch.linspace(0, len(model) - 1, 5).long()
    values = [float(f"{value:.7g}") for value in (model.norm(), model.sum(), *model[places])]
    return {"model_sha256": sha} | {name: None if math.isnan(value) else value for name, value in row.items()}, values


def known() -> dict[str, dict[str, Outcome]]:
    """golden.json: by kind of machine and case."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def known_values() -> dict[str, Values]:
    """golden_values.json: by case."""
    return json.loads(VALUES.read_text()) if VALUES.exists() else {}


def differences(name: str, before: Outcome | None, now: Outcome) -> Iterator[str]:
    """A line for each value of a case that is another than before. Columns that were not there yet are none."""
    for key in before or now:
        old, new = (before or {}).get(key), now.get(key)
        if old != new:
            yield f"{name}: {key} {old} -> {new}"


def far_off(name: str, outcome: Outcome, values: Values) -> Iterator[str] | None:
    """A line for each number of a case that is far from what other kinds of machines compute, or None if none of them
    has the case."""
    others = [entry[name] for entry in known().values() if name in entry]
    if not others or name not in known_values():
        return None
    return _far_off(name, others[-1], outcome, known_values()[name], values)


def _far_off(name: str, known: Outcome, outcome: Outcome, known_values: Values, values: Values) -> Iterator[str]:
    for key in known.keys() - {"model_sha256"}:
        old, new, slack = known[key], outcome.get(key), ONE_SAMPLE if "accuracy" in key else 0.0
        if (old is None) != (new is None) or (
            old is not None and not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=slack)
        ):
            yield f"{name}: {key} {old} -> {new}"
    # a single parameter, or their sum, may be next to nothing
    slack = TOLERANCE * known_values[0]
    for old, new in zip(known_values, values, strict=True):
        if not math.isclose(old, new, abs_tol=slack):
            yield f"{name}: a number of the model {old} -> {new}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write golden.json again")
    parser.add_argument("--write-values", action="store_true", help="write golden_values.json again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_known, kind = known(), machine()
    before = all_known.get(kind, {})
    computed = {name: outcome(case) for name, case in cases().items()}
    now = {name: found for name, (found, _) in computed.items()}
    changed = [line for name in now for line in differences(name, before.get(name), now[name])]
    changed += [f"{name}: gone" for name in before.keys() - now.keys()]
    print("\n".join(changed) or f"{len(now)} cases, as in {FILE.name}")
    if options.write:
        FILE.write_text(json.dumps({**all_known, kind: now}, indent=1) + "\n")
    if options.write_values:
        lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, (_, values) in computed.items()]
        VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
