"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fedray.errors import ClientError, UserError

COMMANDS = ("run", "data", "algorithms", "models", "datasets")

EXIT_USER, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code: 0, 2 for a user's error, 3 when the loss diverged, 130 when interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_USER
    try:
        return options.function(options)
    except UserError as error:
        print(f"fedray: {error}", file=sys.stderr)
        return EXIT_USER
    except ClientError as error:
        print(f"fedray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedray: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fedray", description="Federated learning simulated at scale on Ray.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="run an experiment", description="Run an experiment.", epilog=_KEYS_HELP)
    _experiment_arguments(run)
    run.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    run.set_defaults(function=_run)
    data = commands.add_parser("data", help="show how the data are spread over the clients")
    _experiment_arguments(data)
    data.add_argument("--plot", metavar="FILE", help="draw who holds which labels, as a picture")
    data.set_defaults(function=_data)
    for name, text, function in (
        ("algorithms", "list the algorithms with their hyper-parameters", _algorithms),
        ("models", "list the models with their options", _models),
        ("datasets", "list the data sources and partitioners", _datasets),
    ):
        commands.add_parser(name, help=text, description=text).set_defaults(function=function)
    return parser


_KEYS_HELP = "Every key with its default and range: fedray run --print-config; see README.md."


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help="a config file, then overrides")


def _load(options: argparse.Namespace) -> Any:
    from fedray.config import load

    files = [text for text in options.settings if "=" not in text]
    if len(files) > 1:
        raise UserError(f"one config file at most, not {' and '.join(files)}")
    return load(files[0] if files else None, [text for text in options.settings if "=" in text])


def _run(options: argparse.Namespace) -> int:
    from fedray.tracking.progress import Display

    config = _load(options)
    if options.print_config:
        from fedray.resolve import dump, resolve

        print(dump(resolve(config)[0].config), end="")
        return 0
    display = Display()
    display.say("fedray: loading ...")
    from fedray.simulation import simulate

    result = simulate(config, display=display)
    summary = result.summary
    accuracy = summary["final_accuracy"]
    display.say(
        f"{summary['status']} after {summary['rounds']} rounds"
        + (f", accuracy {accuracy:.4f} (best {summary['best_accuracy']:.4f})" if accuracy is not None else "")
        + f", model sha256 {summary['model_sha256'][:16]} -> {result.folder}"
    )
    if summary["status"] == "interrupted":
        display.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    return EXIT_DIVERGED if summary["status"] == "diverged" else 0


def _data(options: argparse.Namespace) -> int:
    from pathlib import Path

    import numpy as np

    from fedray.data.plot import plot_labels
    from fedray.resolve import resolve

    _, data = resolve(_load(options))
    sizes = data.sizes()
    print(
        f"{data.clients} clients, {len(data.indices):,} samples, {sizes.min()} to {sizes.max()} each "
        f"(median {int(np.median(sizes))}), public {len(data.public)}, validation {len(data.validation)}, "
        f"partition {data.partition_hash[:16]}"
    )
    for line in data.notes:
        print(line)
    if options.plot:
        plot_labels(data, Path(options.plot))
        print(f"wrote {options.plot}")
    return 0


def _algorithms(options: argparse.Namespace) -> int:
    from fedray.algorithms import known_algorithms

    for name, cls in known_algorithms().items():
        print(f"{name}  ({cls.paper})")
        print(f"    {_first_line(cls)}")
        _print_fields(cls.Hyper.model_fields, "algorithm.")
    return 0


def _models(options: argparse.Namespace) -> int:
    from fedray.models import MODELS, options_of

    for name, cls in MODELS.items():
        print(f"{name}\n    {_first_line(cls)}")
        for option, parameter in options_of(cls).items():
            print(f"    model.{option} = {parameter.default}  ({parameter.annotation})")
    return 0


def _datasets(options: argparse.Namespace) -> int:
    from fedray.data.partition import PARTITIONERS
    from fedray.data.source import SOURCES

    print("sources (data.source)")
    for name, source in SOURCES.items():
        print(f"    {name}: {source.about}")
    print("partitioners (data.partition.kind)")
    for name, partitioner in PARTITIONERS.items():
        print(f"    {name}: {partitioner.about}")
    return 0


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _print_fields(fields: Any, prefix: str) -> None:
    for name, field in fields.items():
        bounds = ", ".join(
            f"{symbol} {getattr(limit, word):g}"
            for limit in field.metadata
            for word, symbol in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            if getattr(limit, word, None) is not None
        )
        print(f"    {prefix}{name} = {field.default}  {field.description}" + (f"  [{bounds}]" if bounds else ""))
