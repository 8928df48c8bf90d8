"""The command ``fedray run``: runs an experiment."""

from __future__ import annotations

import argparse
from typing import Any

from fedray.cli import listing
from fedray.cli.settings import EXIT_DIVERGED, EXIT_INTERRUPTED, RESULTS, add_settings, load_settings, split
from fedray.errors import UserError


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
    parser.set_defaults(function=_run)


def _run(options: argparse.Namespace) -> int:
    from fedray.tracking.progress import Display

    if options.profile:
        options.settings.append("engine.profile=true")
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
        display.say("to go on, give the same command again" if kept else "run.checkpoint_every=0: it can't be resumed")
        return EXIT_INTERRUPTED
    return EXIT_DIVERGED if summary["status"] == "diverged" else 0


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
