"""Runs of fedray's command line in the process of the test, with the settings of a small and fast one."""

from __future__ import annotations

from fedray.cli.main import main

FAST = ["engine.kind=local", "model.name=logistic", "algorithm.name=fedavg", "run.rounds=2", "run.name=run"]


def refused(capsys, *arguments, command="run", base=FAST):
    """Runs a command that must exit with code 2, and returns the one line that it writes to stderr, beside warnings of
    settings that replace those of ``base``."""
    assert main([command, *base, *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("fedray: ")
    return lines[0].removeprefix("fedray: ")


def done(*arguments, code=0):
    """Runs `fedray run`, which must exit with the code."""
    assert main(["run", *FAST, *arguments]) == code
