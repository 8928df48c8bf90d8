"""The command ``fedray calibrate``: measures how fast this machine trains a model, as a profile for the virtual
clock."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedray.cli.settings import add_settings, load_settings
from fedray.config import AlgorithmConfig, Config, dump_yaml
from fedray.config.privacy import PrivacyConfig
from fedray.config.robust import AggregationConfig, AttackConfig
from fedray.config.sections import RunConfig
from fedray.config.system import SystemConfig
from fedray.errors import UserError

ROUNDS = 6
"""The rounds that are made. The first one does not count, because memory is allocated in it."""

DESCRIPTION = """\
Measure how many FLOPs per second this machine makes when one client trains the
model of a configuration, and print a profile of it for the virtual clock:

    fedray calibrate model.name=lenet5 --write laptop.yaml
    fedray run system.devices=laptop.yaml system.networks=wifi_2_4ghz

The client has the data, mini-batches and local steps of the configuration; six
rounds of it are made. All processors are used unless engine.threads is set.
Nothing else should run meanwhile."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray calibrate`` to the command line, with its arguments and help. ``commands`` is what
    ``add_subparsers`` of argparse has returned."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine's speed as a profile for the virtual clock",
        description=DESCRIPTION,
        epilog="Keys: see fedray keys.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings(parser)
    parser.add_argument(
        "--watts", type=float, metavar="W", help="the power that it takes meanwhile, as you measured it"
    )
    parser.add_argument("--write", metavar="FILE.yaml", help="write the profile into this file")
    parser.set_defaults(function=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    if options.watts is not None and not options.watts > 0:
        raise UserError(f"--watts must be above 0, not {options.watts:g}")
    if options.write and not options.write.endswith((".yaml", ".yml")):
        raise UserError(f"--write {options.write}: the file's name must end with .yaml")
    config = load_settings(options.settings)
    speeds, threads, model = measure(config)
    speed = statistics.median(speeds)
    print(
        f"{speed / 1e9:.4g} GFLOPs a second with {model} on {threads} thread{'s' if threads > 1 else ''} (median of "
        f"{len(speeds)} rounds of {config.train.batch_size} samples a step; {min(speeds) / 1e9:.4g} to "
        f"{max(speeds) / 1e9:.4g})"
    )
    profile: dict[str, Any] = {"flops_per_second": float(f"{speed:.4g}")}
    if options.watts is not None:
        profile["watts"] = options.watts
    profile["source"] = f"fedray calibrate on {platform.node()}, {model}, {time.strftime('%Y-%m-%d')}"
    text = dump_yaml(profile)
    if options.write:
        try:
            Path(options.write).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--write {options.write}: {error.strerror}") from None
        print(f"wrote {options.write}: system.devices={options.write} takes it")
    else:
        print(text, end="")
    return 0


def measure(config: Config) -> tuple[Sequence[float], int, str]:
    """Trains one client of ``config``, and returns the FLOPs per second of each round that counts, the number of
    threads, and the model's name."""
    from fedray.api import simulate

    threads = config.engine.threads if "threads" in config.engine.model_fields_set else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="fedray-calibrate") as folder:
        run: dict[str, Any] = {"output": folder, "name": "calibrate", "rounds": ROUNDS, "eval_every": 0}
        run |= {"checkpoint_every": 0, "seed": config.run.seed, "given": config.run.given}
        train: dict[str, Any] = {"cohort_size": 1, "participation": None, "sampling": "uniform", "weighting": "auto"}
        train |= {"aggregation": AggregationConfig(), "upload": []}
        engine = {"kind": "local", "threads": threads, "vectorize": False, "compile": False}
        one = config.model_copy(
            update={
                "algorithm": AlgorithmConfig(name="fedavg"),
                "system": SystemConfig(),
                "attack": AttackConfig(),
                "privacy": PrivacyConfig(),
                "run": RunConfig(**run),
                "train": config.train.model_copy(update=train),
                "engine": config.engine.model_copy(update=engine),
            }
        )
        found = simulate(one)
        rows = found.metrics
    flops = rows["flops"].diff().to_numpy()[1:]
    return [float(each) for each in flops / rows["round_seconds"].to_numpy()[1:]], threads, config.model.name
