"""The command ``fedray run``: runs an experiment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.cli import listing
from fedray.cli.settings import EXIT_DIVERGED, EXIT_INTERRUPTED, RESULTS, add_settings, load_settings, split
from fedray.errors import UserError
from fedray.util.uris import is_uri

if TYPE_CHECKING:
    from fedray.tracking.progress import Display
    from fedray.tuning.many import ManyRuns


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray run`` to the command line, with its arguments and help. The command runs an experiment,
    or repeats one. ``commands`` is what ``add_subparsers`` of argparse has returned."""
    lists = "fedray algorithms, fedray models and fedray datasets show what exists."
    parser = commands.add_parser(
        "run",
        help="run an experiment",
        description="Run an experiment, or resume it where it stopped.",
        epilog="\n".join(["Config keys:", *listing.keys(), "", lists, "", *listing.paragraph(RESULTS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings(parser)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--profile", action="store_true", help="say where the rounds' time went (engine.profile=true)")
    repeated = "repeat a trial of a sweep (sweeps/NAME/trials/0007) or a run, and say whether the results are the same"
    parser.add_argument("--from-trial", metavar="DIR", help=repeated)
    parser.add_argument("--seeds", metavar="N", type=int, help="make runs with N seeds: run.seed and those that follow")
    over = "make a run with each of these values; given several times, with each combination"
    parser.add_argument("--over", metavar="KEY=A,B", action="append", default=[], help=over)
    most = "with --seeds or --over: how many runs are made at the same time; unless given as many as fit"
    parser.add_argument("--most", metavar="N", type=int, help=most)
    parser.set_defaults(function=_run)


def _run(options: argparse.Namespace) -> int:
    from fedray.tracking.progress import Display

    if options.profile:
        options.settings.append("engine.profile=true")
    if options.seeds is not None or options.over:
        return _many(options)
    if options.most is not None:
        raise UserError("--most is for several runs (--seeds, --over): engine.actors says how many processes a run has")
    if options.from_trial is not None:
        return _rerun(options)
    config = load_settings(options.settings)
    if options.print_config:
        from fedray.experiment.resolve import dump, resolve

        print(dump(resolve(config)[0].config), end="")
        return 0
    display = Display()
    display.say("fedray: loading ...")
    from fedray.api import simulate

    result = simulate(config, verbose=True)
    summary = result.summary
    if options.profile:
        from fedray.tracking.profile import profile_table

        display.console.print(profile_table(result.profile))
    if summary["status"] == "interrupted":
        kept = config.run.checkpoint_every or not summary["rounds"]
        display.say(f"to {'go on' if kept else 'begin anew (run.checkpoint_every=0)'}, give the same command again")
        return EXIT_INTERRUPTED
    return EXIT_DIVERGED if summary["status"] == "diverged" else 0


def _many(options: argparse.Namespace) -> int:
    from fedray.config import load
    from fedray.tracking.progress import Display

    of_one = {"--print-config": options.print_config, "--profile": options.profile, "--from-trial": options.from_trial}
    if given := [name for name, value in of_one.items() if value]:
        raise UserError(f"{given[0]} is for one run: leave out --seeds and --over")
    files, overrides = split(options.settings)
    if len(files) > 1:
        raise UserError(f"one config file at most, not {' and '.join(files)}")
    over: dict[str, list[Any]] = {}
    for text in options.over:
        key, values = _values(text)
        if key in over:
            raise UserError(f"--over {key} is given twice: give all its values at once, as in {key}=A,B")
        over[key] = values
    load(files[0] if files else None, overrides)
    display = Display()
    display.say("fedray: loading ...")
    from fedray.tuning.many import simulate_many

    done = simulate_many(
        files[0] if files else None, seeds=1 if options.seeds is None else options.seeds, over=over,
        overrides=overrides, most=options.most, verbose=True,
    )  # fmt: skip
    if done.interrupted:
        display.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    for run, why in done.failures.items():
        print(f"fedray: {run} failed: {why}", file=sys.stderr)
    diverged = _compared(done, display) if len(done.failures) < len(done.runs) else False
    return 1 if done.failures else EXIT_DIVERGED if diverged else 0


def _compared(done: ManyRuns, display: Display) -> bool:
    """Writes the comparison of runs, and shows its table. Returns whether one of them diverged."""
    from fedray.results.comparison_files import lines, output_of, write

    try:
        found = done.compare()
    except UserError as error:
        # such as runs that were not evaluated; that they were made is what was asked for
        print(f"fedray: no comparison: {error}", file=sys.stderr)
        return False
    here = Path("comparison") if is_uri(done.place) else Path(done.place) / "comparison"
    folder = output_of(found).folder_for(here)
    for line in lines(found):
        print(line)
    write(found, folder)
    display.say(f"{len(done.runs)} runs in {done.place}; open {folder / 'report.html'}")
    return bool((found.table["diverged"] > 0).any())


def _values(text: str) -> tuple[str, list[Any]]:
    """Reads ``key=a,b`` of ``--over``, whose values are written as in YAML."""
    import yaml

    from fedray.config import parse_yaml

    key, equals, values = text.partition("=")
    try:
        found = parse_yaml(f"[{values}]") if equals and values.strip() else None
    except (ValueError, RecursionError, yaml.YAMLError):
        found = None
    if not isinstance(found, list):
        raise UserError(f"--over {text}: give a key and its values, as in algorithm.name=fedavg,fedprox")
    return key.strip(), found


def _rerun(options: argparse.Namespace) -> int:
    from fedray.cli.rerun import rerun
    from fedray.remote.fetching import as_path
    from fedray.tracking.progress import Display

    if options.print_config:
        raise UserError("--print-config goes without --from-trial: a run's folder has its config.yaml")
    display = Display()
    display.say("fedray: loading ...")
    files, overrides = split(options.settings)
    if files:
        raise UserError(f"--from-trial has the trial's own configuration: no file beside it, not {files[0]}")
    done = rerun(as_path(options.from_trial), overrides, verbose=True)
    for each in done:
        verdict = (
            f"{', '.join(each.differ)} differ" if each.differ else "identical" if each.rounds else "none to compare"
        )
        rounds = f"{each.rounds} round{'' if each.rounds == 1 else 's'}"
        display.say(f"{each.original} and {each.result.folder}: {rounds}, {verdict}")
    if any(each.result.summary["status"] == "interrupted" for each in done):
        display.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    return 1 if any(each.differ or not each.rounds for each in done) else 0
