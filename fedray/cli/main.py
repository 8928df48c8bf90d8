"""The command line: reads the arguments of a command, calls what does the work, and prints the result."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fedray import __version__
from fedray.cli import compare as compare_command
from fedray.cli import data as data_command
from fedray.cli import evaluate as evaluate_command
from fedray.cli import listing
from fedray.cli import report as report_command
from fedray.config.reading import check_words
from fedray.errors import ClientError, UserError, near_miss
from fedray.usercode.importing import FORMS

COMMANDS = (
    "run",
    "tune",
    "evaluate",
    "compare",
    "report",
    "data",
    "costs",
    "keys",
    "algorithms",
    "models",
    "datasets",
)
TAKING_SETTINGS = ("run", "tune", "evaluate", "data", "costs")

RESULTS = (
    "Exit codes: 0 completed, 1 a failure inside, 2 a mistake in what was asked for, 3 the loss of a run diverged, "
    "130 interrupted (the same command goes on)."
)

EXIT_USER, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns the exit code."""
    return exit_code(lambda: _command(arguments))


def exit_code(command: Callable[[], int]) -> int:
    """Returns the exit code of ``command()``, which is what it returns unless it raises: 1 for a failure inside, 2 for
    a user's error, and 130 if it was interrupted. What is wrong is said on standard error, in one line."""
    try:
        code = command()
        # here, where the error is caught if whoever reads the output has gone
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"fedray: {error}", file=sys.stderr)
        return EXIT_USER
    except ClientError as error:
        print(f"fedray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedray: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has seen enough (| head); Python would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _command(arguments: Sequence[str]) -> int:
    parser = _parser()
    _check_words(arguments)
    options, left = parser.parse_known_args(arguments)
    unknown = [text for text in left if text.startswith("-") or not hasattr(options, "settings")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if left:
        # argparse takes no settings behind the first option that follows a setting
        options.settings += left
    if options.command is None:
        parser.print_help()
        return EXIT_USER
    code: int = options.function(options)
    return code


class Parser(argparse.ArgumentParser):
    """A parser that reports its errors in the form in which fedray reports all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _check_words(arguments: Sequence[str]) -> None:
    """Raises :class:`UserError` for an unknown command, and for keys without their ``=``.

    argparse's own messages would neither name the command that was meant nor know of keys.
    """
    if not arguments or arguments[0].startswith("-"):
        return
    name = arguments[0]
    if name not in COMMANDS:
        run = f" (did you mean 'fedray run {name}'?)" if "=" in name or name.endswith((".yaml", ".yml")) else ""
        raise UserError(f"there is no command {name!r}{run or near_miss(name, COMMANDS)}")
    if name in TAKING_SETTINGS:
        from fedray.config import documented_keys
        from fedray.tuning.settings import TuneConfig

        further = documented_keys(TuneConfig, "tune.") if name == "tune" else ()
        check_words(list(arguments[1:]), [key for key, *_ in (*documented_keys(), *further)])


def _parser() -> argparse.ArgumentParser:
    parser = Parser("fedray", description="Federated learning simulated at scale on Ray.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run an experiment",
        description="Run an experiment, or go on with it where it stopped.",
        epilog=_run_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _experiment_arguments(run)
    run.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    run.add_argument("--profile", action="store_true", help="say where the rounds' time went (engine.profile=true)")
    repeated = "repeat a trial of a sweep (sweeps/NAME/trials/0007) or a run, and say whether the results are the same"
    run.add_argument("--from-trial", metavar="DIR", help=repeated)
    run.set_defaults(function=_run)
    _add_tune(commands)
    evaluate_command.add_parser(commands)
    compare_command.add_parser(commands)
    report_command.add_parser(commands)
    data_command.add_parser(commands, _load)
    text = "compare what the algorithms cost: bytes and FLOPs"
    costs = commands.add_parser(
        "costs",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, on the data, model and local training of a configuration. "
        "All algorithms have their default hyper-parameters, but the one that the configuration names has its own.",
        epilog="Keys: see fedray keys.",
    )
    _experiment_arguments(costs)
    costs.add_argument("--csv", metavar="FILE", help="write the table as CSV too, with all digits")
    costs.set_defaults(function=_costs)
    _add_lists(commands)
    for each in (parser, *commands.choices.values()):
        each.add_argument("--version", action="version", version=f"fedray {__version__}", help="print it and exit")
    return parser


def _add_tune(commands: Any) -> None:
    search = "search hyper-parameters on Ray, or go on with a search"
    again = "The same command again goes on where it was stopped or killed."
    tune = commands.add_parser(
        "tune",
        help=search,
        description="\n".join(listing.paragraph(f"{search[0].upper()}{search[1:]}. {again}")),
        epilog=_tune_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument(
        "settings",
        nargs="*",
        metavar="SPACE | key=value",
        help="a space file, or the name of one that comes with fedray; and overrides, of the base config or of tune.*",
    )
    tune.add_argument("--retry-failed", action="store_true", help="try trials that failed once more")
    tune.add_argument(
        "--suite",
        metavar="NAME",
        help="instead of a space: tune a list of algorithms with the same budget each, run the winners on fresh seeds, "
        "and compare them in one table; a suite file, or the name of one that comes with fedray",
    )
    tune.add_argument(
        "--report",
        action="store_true",
        help="run nothing, and write tables and pictures of the trials so far into report/",
    )
    tune.set_defaults(function=_tune)


def _add_lists(commands: Any) -> None:
    for name, text, listed in (
        ("algorithms", "list the algorithms with their hyper-parameters", listing.algorithms),
        ("models", "list the models with their options", listing.models),
        ("datasets", "list the data sources and partitioners", listing.datasets),
    ):
        command = commands.add_parser(name, help=text, description=f"{text}, or only those named")
        command.add_argument("names", nargs="*", metavar="NAME", help=f"one of them, or your own: {FORMS}")
        command.set_defaults(function=lambda options, listed=listed: _print(listed(options.names)))
    text = "list the config keys with their defaults and ranges"
    commands.add_parser("keys", help=text, description=text).set_defaults(
        function=lambda options: _print(listing.keys())
    )


def _print(lines: Iterable[str]) -> int:
    print("\n".join(lines))
    return 0


def _tune_epilog() -> str:
    from fedray.tuning.settings import TuneConfig
    from fedray.tuning.spec import known_spaces

    known = f"Spaces: {', '.join(known_spaces())}"
    lines = ["Keys:", *listing.keys(TuneConfig, "tune."), "", *listing.paragraph(known)]
    return "\n".join([*lines, "", *listing.paragraph(RESULTS)])


def _run_epilog() -> str:
    commands = "fedray algorithms, fedray models and fedray datasets show what exists."
    return "\n".join(["Config keys:", *listing.keys(), "", commands, "", *listing.paragraph(RESULTS)])


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    settings = "a config file, and overrides; of a key that is given twice the last value counts"
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help=settings)


def _split(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits settings into files and ``key=value`` overrides."""
    return [text for text in settings if "=" not in text], [text for text in settings if "=" in text]


def _load(options: argparse.Namespace) -> Any:
    from fedray.config import load

    files, overrides = _split(options.settings)
    if len(files) > 1:
        raise UserError(f"one config file at most, not {' and '.join(files)}")
    return load(files[0] if files else None, overrides)


def _run(options: argparse.Namespace) -> int:
    from fedray.tracking.progress import Display

    if options.profile:
        options.settings.append("engine.profile=true")
    if options.from_trial is not None:
        return _rerun(options)
    config = _load(options)
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
    from pathlib import Path

    from fedray.cli.rerun import rerun
    from fedray.tracking.progress import Display

    if options.print_config:
        raise UserError("--print-config goes without --from-trial: a run's folder has its config.yaml")
    display = Display()
    display.say("fedray: loading ...")
    files, overrides = _split(options.settings)
    if files:
        raise UserError(f"--from-trial has the trial's own configuration: no file beside it, not {files[0]}")
    done = rerun(Path(options.from_trial), overrides, verbose=True)
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


def _tune(options: argparse.Namespace) -> int:
    from fedray.tuning.spec import known_spaces, read_sweeps

    files, overrides = _split(options.settings)
    if options.suite:
        if files:
            raise UserError(f"--suite has its own space files: none beside it, not {files[0]}")
        return _suite(options, overrides)
    if len(files) != 1:
        given = f"; not {', '.join(files)}: a key=value with blanks needs quotes in a shell" if files else ""
        raise UserError(f"give one space file, or one of: {', '.join(known_spaces())}{given}")
    if options.report:
        from fedray.tuning.recorded import check_record
        from fedray.tuning.report import write_report

        specs = read_sweeps(files[0], overrides)
        for spec in specs:
            check_record(spec)
        for spec in specs:
            print("\n".join(f"wrote {path}" for path in write_report(spec)))
        return 0
    from fedray.tuning import tune
    from fedray.tuning.view import View

    view = View()
    view.say("fedray: loading ...")
    results = tune(files[0], overrides, retry_failed=options.retry_failed, verbose=True)
    for result in results:
        for path in result.best:
            view.say(f"best: {path}")
    view.say(f"tables and pictures: fedray tune {shlex.join(options.settings)} --report")
    if any(result.interrupted for result in results):
        view.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    lost = [str(result.folder) for result in results if not result.best]
    if lost:
        print(f"fedray: no trial has completed with a finite value in {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


def _suite(options: argparse.Namespace, overrides: list[str]) -> int:
    from fedray.tuning.report import write_report
    from fedray.tuning.suite import read_suite, run_suite
    from fedray.tuning.suite_table import write_suite
    from fedray.tuning.view import View

    suite = read_suite(options.suite, overrides)
    if options.report:
        from fedray.tuning.recorded import check_record

        for spec in suite.specs:
            check_record(spec)
        for spec in suite.specs:
            print("\n".join(f"wrote {path}" for path in write_report(spec)))
        print("\n".join(f"wrote {path}" for path in write_suite(suite)))
        return 0
    view = View()
    view.say("fedray: loading ...")
    status = run_suite(suite, view, options.retry_failed)
    if status == "interrupted":
        view.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    written = write_suite(suite)
    view.say(written[1].read_text(encoding="utf-8").rstrip())
    view.say(f"wrote {', '.join(map(str, written))}")
    if status == "incomplete":
        print("fedray: the table lacks runs: an algorithm has no winner, or a winner's run failed", file=sys.stderr)
    return 1 if status == "incomplete" else 0


def _costs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from fedray.experiment.costs import compare_algorithms
    from fedray.tracking.cost_tables import cost_table

    candidates, scenario, left_out = compare_algorithms(_load(options))
    table = cost_table(candidates, scenario)
    table.show()
    for name, reason in left_out.items():
        print(f"without {name}: {reason}")
    if options.csv:
        try:
            table.write(Path(options.csv))
        except OSError as error:
            raise UserError(f"--csv {options.csv}: {error.strerror}") from None
        print(f"wrote {options.csv}")
    return 0
