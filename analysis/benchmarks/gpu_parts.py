"""The parts of gpu.py. Each runs in a process of its own, and gives one row after another."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from gpu_loops import Loop, loops, numerics
from gpu_work import (
    COLOUR,
    PHOTOGRAPH,
    PRECISIONS,
    SMALL,
    WORKS,
    TutorialCNN,
    Work,
    engine,
    given,
    peak_flops,
    quick,
    settings,
    step_flops,
    synchronize,
)

Row = dict[str, Any]
PROGRAM = str(Path(__file__).parents[2] / "fedray" / "run.py")
DECIDED = ("vectorize", "chunk", "lanes", "channels_last")
"""The keys of the section ``engine`` that say how clients were trained."""


@dataclass(frozen=True)
class Options:
    """What the user of gpu.py asked for. ``seconds`` is the time that the part has."""

    device: str
    precisions: Sequence[str]
    actors: int
    actor_precisions: Sequence[str]
    quick: bool
    seconds: float

    def sized(self, work: Work) -> Work:
        return quick(work) if self.quick else work


class Rounds:
    """A callback that times fedray's rounds, from the end of one call to the start of the next, and takes a sample of
    each way by hand between them. It ends the run after ``wanted`` rounds that count, or when the time is over."""

    def __init__(self, device: str, warmup: int, wanted: int, until: float, beside: Sequence[Loop] = ()) -> None:
        self.device, self.warmup, self.wanted, self.until, self.beside = device, warmup, wanted, until, beside
        self.all: list[float] = []
        self.rates: dict[str, list[float]] = {loop.name: [] for loop in beside}
        self.resumed = time.perf_counter()

    @property
    def seconds(self) -> list[float]:
        """The seconds of the rounds that count; of the last one if the time was over before."""
        return self.all[self.warmup :] or self.all[-1:]

    def __call__(self, report: Any) -> bool:
        synchronize(self.device)
        self.all.append(time.perf_counter() - self.resumed)
        for loop in self.beside if report.round > self.warmup else ():
            self.rates[loop.name].append(loop.sample())
        over = len(self.all) >= self.warmup + self.wanted or time.perf_counter() > self.until
        self.resumed = time.perf_counter()
        return over


def run(keys: Mapping[str, Any], rounds: Rounds, **given: Any) -> Any:
    """Runs fedray. The first round is timed from the end of its start."""
    from fedray import simulate

    with tempfile.TemporaryDirectory() as folder:
        result = simulate({**keys, "run.output": folder}, callbacks=[rounds], **given)
        decided = yaml.safe_load((result.folder / "config.yaml").read_text())["engine"]
        summary = result.summary
        first = float(result.metrics["round_seconds"].iloc[0])
    # what comes before the first round is the start of everything
    rounds.all[0] = first
    how = {key: decided.get(key) for key in DECIDED}
    return {"sha256": summary["model_sha256"][:12], "bits_promised": summary["machine"]["bits_promised"], **how}


def tried(row: Row, call: Callable[[], Mapping[str, Any]]) -> Row:
    """Returns the row with what the call returns, or with the line of its error, so that the others go on."""
    began = time.perf_counter()
    try:
        found = dict(call())
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
    return {**row, **found, "whole_seconds": time.perf_counter() - began}


def spread(values: Sequence[float]) -> Row:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "count": len(values)}


def table(name: str, options: Options) -> Iterator[Row]:
    """Client-steps per second of one workload: fedray beside the ways by hand, and their shares of the card's peak."""
    work = options.sized(WORKS[name])
    flops = step_flops(work)
    share = options.seconds / len(options.precisions)
    for precision in options.precisions:
        until = time.perf_counter() + share
        with numerics(precision):
            peak = peak_flops(precision, options.device, 256 if options.quick else 8192)
        base = {"workload": name, "precision": precision, "step_gflop": flops / 1e9, "peak_tflops": peak / 1e12}
        beside: list[Loop] = []
        row = tried(base | {"way": "by hand"}, partial(by_hand, beside, work, precision, options.device))
        if "error" in row:
            yield row
        rates: dict[str, list[float]] = {}
        actors = (0, options.actors) if precision in options.actor_precisions else (0,)
        for count in actors:
            end = until - (share / 3 if count == 0 and len(actors) > 1 else 0)
            wanted, warmup = (2, 1) if options.quick else (3, 2) if name == "vit" else (9, 4)
            rounds = Rounds(options.device, warmup, wanted, end, beside)
            keys = {**settings(work, precision, options.device, ""), **engine(count, options.device)}
            keys["run.rounds"] = 10_000
            way = f"fedray, {count} actors" if count else "fedray"
            row = tried(base | {"way": way}, partial(run, keys, rounds, **given(work)))
            if "error" not in row:
                row |= of_peak(spread([work.steps_of_round / each for each in rounds.seconds]), base)
            yield row
            for way, found in rounds.rates.items():
                rates.setdefault(way, []).extend(found)
        for way, found in rates.items():
            if found:
                yield base | {"way": way} | of_peak(spread(found), base)


def by_hand(beside: list[Loop], work: Work, precision: str, device: str) -> Row:
    """Makes the ways by hand, in the list ``beside``."""
    beside.extend(loops(work, precision, device))
    return {}


def of_peak(found: Row, base: Row) -> Row:
    return found | {"of_peak": found["median"] * base["step_gflop"] / base["peak_tflops"] / 1000}


def blazefl(options: Options) -> Iterator[Row]:
    """BlazeFL's published workload: CIFAR-10's sizes, 100 of 100 clients, 5 epochs of batches of 50, 5 rounds.

    Its CNN is PyTorch's tutorial's and its ResNet-18 torchvision's, with BatchNorm; GHBM's CNN and GroupNorm are what
    the first figures of fedray were measured with."""
    sizes: dict[str, Any] = {"batch": 50, "clients": 100, "cohort": 100, "samples": 500, "steps": 50}
    resnet = Work("resnet18", COLOUR, options={"stem": "imagenet"}, **sizes)
    models = {
        "BlazeFL's CNN": Work("lenet5", COLOUR, **sizes), "GHBM's CNN": Work("ghbm_cnn", COLOUR, **sizes),
        "ResNet-18": resnet,
        "ResNet-18, GroupNorm": dataclasses.replace(resnet, options={"stem": "imagenet", "norm": "group"}),
    }  # fmt: skip
    # the fastest first, so that what the time does not suffice for is what takes longest
    cases = [(name, precision) for precision in reversed(options.precisions) for name in models]
    rounds_each, end = 5, time.perf_counter() + options.seconds
    for left, (name, precision) in zip(range(len(cases), 0, -1), cases, strict=True):
        work = options.sized(models[name])
        share = (end - time.perf_counter()) / min(left, 3)
        rounds = Rounds(options.device, 1, rounds_each - 1, time.perf_counter() + share)
        keys = {**settings(work, precision, options.device, ""), **engine(0, options.device), "run.rounds": rounds_each}
        own = {"model": TutorialCNN} if name == "BlazeFL's CNN" else {}
        for key in [key for key in keys if own and key.startswith("model.")]:
            del keys[key]
        if share < 5 and not options.quick:
            yield {"workload": name, "precision": precision, "error": "no time was left"}
            continue
        row = tried({"workload": name, "precision": precision}, partial(run, keys, rounds, **given(work), **own))
        if "error" not in row:
            missing = rounds_each - len(rounds.all)
            row["seconds"] = sum(rounds.all) + missing * statistics.median(rounds.seconds)
            row["rounds_run"] = len(rounds.all)
            row["client_steps"] = rounds_each * work.steps_of_round
        yield row


def algorithms(options: Options) -> Iterator[Row]:
    """The rounds of SCAFFOLD and FedHBM with ViT-B/16 over those of FedAvg. Every client took part before, mostly."""
    work = options.sized(WORKS["vit"])
    share = options.seconds / (3 * len(options.precisions))
    for precision in options.precisions:
        fedavg = float("nan")
        for name in ("fedavg", "scaffold", "fedhbm"):
            rounds = Rounds(options.device, 3 if not options.quick else 1, 5, time.perf_counter() + share)
            keys = {**settings(work, precision, options.device, ""), **engine(0, options.device)}
            keys |= {"algorithm.name": name, "run.rounds": 8}
            row = tried({"workload": name, "precision": precision}, partial(run, keys, rounds, **given(work)))
            if "error" not in row:
                row |= spread(rounds.seconds)
                fedavg = row["median"] if name == "fedavg" else fedavg
                row["over_fedavg"] = row["median"] / fedavg
            yield row


PAPERS = {("gldv2", "mobilenet_v2"): 5000, ("gldv2", "vit_b_16"): 1500, ("inaturalist", "mobilenet_v2"): 5000,
          ("inaturalist", "vit_b_16"): 1500}  # fmt: skip
"""The rounds of table 3 of GHBM's paper (analysis/experiments/ghbm)."""


def photographs(options: Options) -> Iterator[Row]:
    """Rounds of FedAvg on stand-ins for GLDv2 and iNaturalist, of fewer users, whose sizes are as published."""
    precisions = [each for each in ("fp32", "bf16") if each in options.precisions]
    share = 0.8 * options.seconds / (len(PAPERS) * len(precisions))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        for source in ("gldv2", "inaturalist"):
            make = [sys.executable, str(Path(__file__).with_name("photographs.py")), "make", source]
            scale, distinct = ("0.002", "20") if options.quick else ("0.01", "200")
            folder = f"{scratch}/{source}"
            subprocess.run([*make, folder, "--scale", scale, "--distinct", distinct], check=True, stdout=sys.stderr)
            for (of, model), paper in PAPERS.items():
                for precision in precisions if of == source else ():
                    rounds = Rounds(options.device, 1, 12, time.perf_counter() + share)
                    keys = photograph_keys(folder, model, precision, options)
                    row = {"workload": f"{source}, {model}", "precision": precision, "paper_rounds": paper}
                    row = tried(row, partial(run, keys, rounds))
                    if "error" not in row:
                        mean = statistics.fmean(rounds.seconds)
                        row |= spread(rounds.seconds) | {"mean": mean, "paper_hours": mean * paper / 3600}
                    yield row


def photograph_keys(folder: str, model: str, precision: str, options: Options) -> Row:
    """Returns the settings of analysis/experiments/ghbm/bases/large.yaml, for a folder of photographs."""
    name, cohort = (SMALL, 2) if options.quick else (model, 10)
    work = Work(name, PHOTOGRAPH, batch=10, clients=0, cohort=cohort, samples=0, steps=0)
    keys = {**settings(work, precision, options.device, ""), **engine(0, options.device)}
    del keys["train.local_steps"]
    return keys | {
        "data.source": "federated_csv", "data.root": folder, "data.image_size": 32 if options.quick else 224,
        "data.normalization": "imagenet", "data.partition.kind": "natural", "train.local_epochs": 1,
        "train.weight_decay": 1e-5, "data.public_samples": 0, "run.rounds": 13,
    }  # fmt: skip


def trials(options: Options) -> Iterator[Row]:
    """Trials of LeNet-5 side by side on one device: 1, and then 8 of which the first has the same values."""
    alone: Row = {}
    for count in (1, 2 if options.quick else 8):
        row = tried({"workload": f"{count} trials"}, partial(sweep, count, options))
        if count == 1:
            alone = row
        elif "error" not in row and "error" not in alone:
            row["over_one"] = row["seconds"] / alone["seconds"]
            row["trial_over_one"] = row["longest_trial"] / alone["longest_trial"]
            row["same_result"] = row["sha256"] == alone["sha256"]
        yield row


def sweep(count: int, options: Options) -> Row:
    """Runs a sweep, and returns its seconds, those of its longest trial, and the first trial's result."""
    from fedray.tracking.tables import read_metrics

    device = [] if options.device == "cuda" else ["engine.device=cpu"]
    rounds, steps = (2, 2) if options.quick else (60, 20)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, PROGRAM, "tune", "fedavg", f"tune.trials={count}", "tune.sampler=random",
            "data.source=sample", "data.clients=20", "train.cohort_size=20", "model.name=lenet5",
            f"train.local_steps={steps}", f"run.rounds={rounds}", f"run.eval_every={rounds}", f"tune.output={folder}",
            "engine.address=local", *device,
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        runs = sorted(path.parent for path in Path(folder).glob("*/trials/*/*/summary.json"))
        walls = [float(read_metrics(run)["wall_seconds"].iloc[-1]) for run in runs]
        first = json.loads((runs[0] / "summary.json").read_text())
    return {"seconds": seconds, "longest_trial": max(walls), "ended": len(walls), "sha256": first["model_sha256"][:12]}


PARTS: dict[str, tuple[Callable[[Options], Iterator[Row]], float]] = {
    "lenet5": (partial(table, "lenet5"), 45),
    "cnn": (partial(table, "cnn"), 45),
    "resnet18": (partial(table, "resnet18"), 60),
    "vit": (partial(table, "vit"), 75),
    "logistic": (partial(table, "logistic"), 35),
    "blazefl": (blazefl, 75),
    "algorithms": (algorithms, 60),
    "photographs": (photographs, 60),
    "trials": (trials, 90),
}
"""Each part, and the seconds that it may take. A part that has not ended 30 seconds later is ended."""

assert set(WORKS) <= set(PARTS)
assert set(PRECISIONS) == {"fp32", "tf32", "bf16"}
