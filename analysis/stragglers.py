"""Measures what a synchronous round loses to slow clients, and what helps against it.

    python analysis/stragglers.py OUTPUT

One tenth of 100 clients are 10 times as slow as the others, which are cheap phones with 4G (`system/profiles.yaml`):
their processors and their networks both. LeNet-5 on MNIST, 10 clients train at a time, for 10 local steps of 32
samples. Four ways to go on:

- plain: a round waits for all of its clients.
- deadline: a round waits for twice as long as most clients need. Slow clients never count.
- over-selection: 1.3 times as many clients are drawn, and the first 10 count.
- buffered: asynchronous rounds (FedBuff). As many clients train at the same time, and every 5 answers make an update.

All have the same virtual time. Once the slow clients' samples are like those of the others, and once they are all that
there is of the digits 8 and 9: whoever does not wait for them does not learn these.

Writes runs.csv, stragglers.md and stragglers.png; the runs are kept below runs/, and one that is complete is not made
again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedray import simulate
from fedray.config import load
from fedray.data.sources.source import Source, source_of
from fedray.results.curves import mean_curve
from fedray.results.panel import Curve, Panel, bands_caption, draw_panels
from fedray.results.runs import RecordedRun, read_run
from fedray.results.statistics import with_interval
from fedray.results.style import lines_for, save_png
from fedray.results.tables import markdown
from fedray.system.devices import profile_of

CLIENTS, SLOW, FACTOR, SEEDS = 100, 10, 10, (1, 2, 3)
VIRTUAL_SECONDS, TARGET = 60, 0.9

# with as many rounds as VIRTUAL_SECONDS take
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"run.rounds": 40, "run.eval_every": 1},
    "deadline": {"run.rounds": 120, "run.eval_every": 2, "system.deadline_seconds": 1.0},
    "over-selection": {"run.rounds": 200, "system.over_select": 1.3},
    "buffered": {"run.rounds": 240, "system.mode": "buffered", "system.buffer": 5, "system.concurrency": 10},
}
WORLDS = {"alike": "slow clients' samples are like the others'", "apart": "digits 8 and 9 are at slow clients alone"}

SETTINGS: Mapping[str, Any] = {
    "algorithm.name": "fedavg", "data.clients": CLIENTS, "data.partition.kind": "natural", "model.name": "lenet5",
    "train.local_steps": 10, "train.batch_size": 32, "train.lr": 0.05, "train.momentum": 0.0,
    "run.eval_every": 5, "run.eval_train_samples": 200, "engine.kind": "local",
}  # fmt: skip


def devices(folder: Path) -> Path:
    """Writes the clients' devices as a file for ``system.devices``. The first :data:`SLOW` clients are slow."""
    speeds = {**profile_of("devices", "phone_low"), **profile_of("networks", "mobile_4g")}
    table = pd.DataFrame({"client": range(CLIENTS)})
    slow = np.where(np.arange(CLIENTS) < SLOW, FACTOR, 1)
    for name in ("flops_per_second", "down_mbps", "up_mbps"):
        table[name] = float(speeds[name]) / slow
    table["latency_ms"] = float(speeds["latency_ms"]) * slow
    table["watts"] = speeds["watts"]
    table.to_csv(folder / "devices.csv", index=False)
    return folder / "devices.csv"


def owned(source: Source, world: str) -> Source:
    """Returns ``source`` with a client for each sample, drawn at random: any of them, or in the world ``apart`` one of
    the slow clients for the classes 8 and 9, and one of the others for the rest."""
    rng = np.random.default_rng(0)
    owner = rng.integers(0, CLIENTS, len(source.y_train))
    if world == "apart":
        last = np.isin(source.y_train, (8, 9))
        owner = np.where(last, rng.integers(0, SLOW, len(last)), rng.integers(SLOW, CLIENTS, len(last)))
    return replace(source, name=f"{source.name}_{world}", client_train=owner)


def made(world: str, way: str, seed: int, source: Source, file: Path, folder: Path) -> RecordedRun:
    """Makes a run, unless it is complete, and returns its first :data:`VIRTUAL_SECONDS`."""
    settings = {**SETTINGS, "train.cohort_size": None if way == "buffered" else 10, **WAYS[way]}
    settings |= {"system.devices": str(file), "run.seed": seed}
    settings |= {"run.output": str(folder), "run.name": f"{world}-{way}-{seed}"}
    found = read_run(simulate(settings, data=owned(source, world)).folder)
    assert isinstance(found, RecordedRun), found
    assert found.rows["virtual_seconds"].max() >= VIRTUAL_SECONDS, f"{way} takes more rounds"
    return replace(found, rows=found.rows[found.rows["virtual_seconds"] <= VIRTUAL_SECONDS])


def row_of(run: RecordedRun) -> dict[str, Any]:
    """Returns what is said of a run: how far it comes, and how much slow clients count in it."""
    clients, rows = pd.read_parquet(run.folder / "clients.parquet"), run.rows
    used = clients[(clients["outcome"] == "used") & (clients["round"] <= rows["round"].max())]
    reached = rows.loc[rows["test_accuracy"] >= TARGET, "virtual_seconds"]
    return {
        "updates": int(rows["round"].max()),
        "seconds to 90 %": reached.min() if len(reached) else np.nan,
        "test accuracy": 100 * float(rows["test_accuracy"].dropna().iloc[-1]),
        "answers used": len(used),
        "of slow clients, %": 100 * float((used["client"] < SLOW).mean()),
        "joules": float(rows["joules"].iloc[-1]),
    }


def rows(runs: Mapping[tuple[str, str, int], RecordedRun]) -> Iterator[dict[str, Any]]:
    for (world, way, seed), run in runs.items():
        yield {"world": world, "way": way, "seed": seed, **row_of(run)}


def _cell(values: pd.Series) -> str:
    return with_interval(values.tolist(), 1) if values.notna().all() else "not in all runs"


def picture(runs: Mapping[tuple[str, str, int], RecordedRun]) -> Figure:
    """Returns the test accuracy over virtual seconds: a panel for each world, a line for each way."""
    lines = lines_for(list(WAYS))
    panels = []
    for world, title in WORLDS.items():
        curves = []
        for way in WAYS:
            of_way = [run for (where, how, _), run in runs.items() if (where, how) == (world, way)]
            curves.append(Curve(way, lines[way], mean_curve(of_way, "test_accuracy", "virtual_seconds")))
        caption = f"{title}\n{bands_caption(len(SEEDS))}"
        panels.append(Panel(caption, "test accuracy, %", "virtual_seconds", curves, 100, 100))
    return draw_panels(panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    config, file = load({"data.source": "mnist"}), devices(output)
    source = source_of(config.data, config.task)
    runs = {
        (world, way, seed): made(world, way, seed, source, file, output / "runs")
        for world in WORLDS for way in WAYS for seed in SEEDS
    }  # fmt: skip
    found = pd.DataFrame(rows(runs))
    found.to_csv(output / "runs.csv", index=False, float_format="%.6g")
    table = found.drop(columns="seed").groupby(["world", "way"], sort=False).agg(_cell)
    (output / "stragglers.md").write_text(markdown(table.reset_index()) + "\n")
    save_png(picture(runs), output / "stragglers.png")
    print(table)


if __name__ == "__main__":
    main()
