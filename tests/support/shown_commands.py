"""What command lines on the pages must be: known words that can be read, and settings that a run could have."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from documents import ROOT, TEXTS, Command, commands, split_line

from fedray.cli import main as cli
from fedray.cli.run import _values as values_of
from fedray.cli.settings import split
from fedray.config import Config, load
from fedray.data.sources.source import Source
from fedray.experiment.algorithm import choose_algorithm
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.tuning.spec import read_sweeps
from fedray.tuning.suite import read_suite
from fedray.usercode.importing import import_object

HELP = {
    "pip": 1,
    "pytest": 0,
    "tensorboard": 0,
    "optuna-dashboard": 0,
    "mlflow": 1,
    "ruff": 1,
    "sbatch": 0,
    "mkdocs": 1,
}
"""Programs whose `--help` names their options, with the number of words before it that name a command of theirs."""

LISTED = {
    ".": "the shell's", "source": "the shell's", "cd": "the shell's", "export": "the shell's", "kill": "the shell's",
    "run": "the script .ci/run", "nightly": "the script .ci/nightly",
    "git": "the system's", "tail": "the system's", "rsync": "the system's", "module": "there on some clusters",
    "ssh-keygen": "the system's", "ssh-copy-id": "the system's", "aws": "named once, without options",
    "flwr": "Flower's, in a comparison", "main.py": "PFLlib's, in a comparison", "generate_Cifar10.py": "PFLlib's",
    "generate_FashionMNIST.py": "PFLlib's", "train.py": "the program of docs/hydra.md; test_readme.py runs these lines",
}  # fmt: skip
"""Programs whose words are not checked, and why."""

MADE = re.compile(r"s3://.*|(runs|sweeps)\b.*|(my|my_space|my_suite)\.yaml|mine\.pt|photos")
"""What a page's reader has by then and the page does not show: what earlier commands made, and files of the reader."""


def shown() -> list[Command]:
    """The command lines of all documents, those within `ray exec` too."""
    found = [command for command in commands() if _is_noticed(command)]
    for command in found:
        if command.words[:2] == ("ray", "exec"):
            found += [command._replace(words=words) for words in split_line(command.words[-1])]
    return found


def _is_noticed(command: Command) -> bool:
    """In a sentence a command begins with the name of a program that is known here, or has an option."""
    if not command.in_text:
        return True
    with_option = re.fullmatch(r"[a-z.][\w.-]*", command.program) and any(
        re.match(r"--?[a-z]", word) for word in command.words[1:]
    )
    return bool(with_option) or command.program in {"fedray", "python", "python3", "ray", *HELP, *LISTED}


def fedray_words(command: Command) -> list[str] | None:
    """The words after `fedray`, if the command runs it: here, on a cluster or in a job."""
    words = [word for word in command.words if word != "..."]
    if words[:1] == ["fedray"]:
        return words[1:]
    starts = [place for place, word in enumerate(words) if word.endswith(("run.py", "slurm.sbatch"))]
    if not starts:
        return None
    words = [word for word in words[starts[0] + 1 :] if word != "--"]
    return words if words[:1] and words[0] in cli.COMMANDS else ["run", *words]


def program_of(command: Command) -> tuple[Path, list[str]] | None:
    """The program of this repository that a command starts, and its words; in a table `...` stands for the row's."""
    words = [re.sub(r"^\[|\]$", "", word) for word in command.words]
    if words[0] == "...":
        words[0] = re.findall(r"\b\w+\.py\b", TEXTS[command.page].splitlines()[command.line - 1])[0]
    if words[0] in ("python", "python3"):
        del words[0]
    if not words or not words[0].endswith(".py") or words[0].endswith("run.py") or words[0] in LISTED:
        return None
    places = ROOT / words[0], (ROOT / command.page).parent / words[0]
    return next((place for place in places if place.is_file()), places[0]), [w for w in words[1:] if w != "..."]


def kind_of(command: Command) -> str:
    """Says what is checked of a command, or nothing if nothing is."""
    if fedray_words(command) is not None:
        return "fedray"
    if command.program in LISTED or Path(command.words[-1 if len(command.words) == 1 else 1]).name in LISTED:
        return "listed"
    if command.words[1:2] == ("-m",) or command.program in ("ray", *HELP):
        return "options"
    is_program = command.program.endswith(".py") or command.program in ("python", "python3", "...")
    return "program" if is_program and program_of(command) else ""


@functools.cache
def help_of(*words: str) -> str:
    """What a program says of its options; nothing if it is not installed."""
    program = [sys.executable, *words[1:]] if words[0].startswith("python") else [*words]
    if shutil.which(program[0]) is None:
        return ""
    done = subprocess.run([*program, "--help"], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr if done.returncode == 0 else ""


def unknown_options(command: Command) -> list[str] | None:
    """The options of a command of another program that its help does not name; None if there is no help here."""
    words = list(command.words)
    if words[0] == "sbatch":
        # what follows the script is the script's
        words = words[: next(k for k, word in enumerate(words) if word.endswith(".sbatch"))]
    if "--" in words:
        words = words[: words.index("--")]
    program = 2 if words[1:2] == ["-m"] else 0
    count = program + 1 + HELP.get(words[program], 0)
    if words[0] == "ray":
        return _unknown_to_ray(words[1:])
    text = help_of(*words[:count])
    options = [word.partition("=")[0] for word in words[count:] if re.match(r"--?[a-zA-Z]", word)]
    options = [option if option.startswith("--") else option[:2] for option in options]
    return [each for each in options if not re.search(rf"(?<![\w-]){each}(?![\w-])", text)] if text else None


def _unknown_to_ray(words: Sequence[str]) -> list[str]:
    from ray.scripts.scripts import cli as ray

    command, left = ray, list(words)
    while left and hasattr(command, "commands"):
        command = command.commands[left.pop(0)]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    # what follows a program is the program's
    left = list(itertools.takewhile(lambda word: not word.endswith(".py"), left))
    return [word for word in left if word.startswith("-") and word.partition("=")[0] not in known]


def check_words(words: Sequence[str]) -> tuple[list[str], Any] | None:
    """Reads the words of a command of fedray's, and returns its settings and options; None if it prints help."""
    if not words or {"--help", "--version"} & {*words}:
        assert not words or words[0].startswith("-") or words[0] in cli.COMMANDS
        return None
    cli._check_words(words)
    options, left = cli._parser().parse_known_args(words)
    assert not [word for word in left if word.startswith("-")], left
    return [*getattr(options, "settings", []), *(left if hasattr(options, "settings") else [])], options


def check_fedray(words: Sequence[str]) -> None:
    """Makes what a command of fedray's would run or search, up to its first round, in a folder with its files."""
    found = check_words(words)
    if found is None or not hasattr(found[1], "settings"):
        return
    settings, options = found
    files, overrides = split(settings)
    files = [file for file in files if Path(file).exists() or not MADE.fullmatch(file)]
    if words[0] == "tune":
        _check_search(options.suite, files, overrides)
    elif words[0] in ("run", "costs", "calibrate"):
        for chosen in _products(getattr(options, "over", [])):
            resolve_here(load(*files or [None], [*overrides, *chosen]))
    else:
        load(None, [word for word in overrides if not word.startswith("tune.")])


def _products(over: Sequence[str]) -> Iterator[list[str]]:
    read = [values_of(text) for text in over]
    for each in itertools.product(*(values for _, values in read)):
        yield [f"{key}={value}" for (key, _), value in zip(read, each, strict=True)]


def _check_search(suite: str | None, files: Sequence[str], overrides: Sequence[str]) -> None:
    """Reads the spaces, makes the algorithm of each, and the whole of one; a file or folder that the page does not show
    is replaced by a space of fedray's."""
    if suite and (Path(suite).exists() or not MADE.fullmatch(suite)):
        specs = read_suite(suite, overrides).specs
    else:
        specs = read_sweeps(files[0] if files else "pfedmo", overrides)
    bases = [load({**spec.base, **next(iter(spec.space.extremes(spec.base)))}) for spec in specs]
    for base in bases:
        choose_algorithm(base, CustomObjects())
    resolve_here(bases[0])


def resolve_here(config: Config) -> None:
    """Resolves a configuration as `--print-config` does, without weights and a precision that are not here. Of a model
    on a hub only what is known before the model is read."""
    model, train = config.model, config.train
    if model.name.startswith("transformers:"):
        choose_algorithm(config, CustomObjects())
        return
    if model.weights and not Path(model.weights).exists():
        model = model.model_copy(update={"weights": None})
    if train.precision == "tf32" and not torch.cuda.is_available():
        train = train.model_copy(update={"precision": "fp32"})
    resolve(config.model_copy(update={"model": model, "train": train}))


def black_images_for_data_that_are_elsewhere(name: str, key: str) -> Any:
    """Takes the place of what imports a source's function: fedray's give black images if they need files and the
    command names none that is here. All that is asked of the function is checked as before."""
    load_it = import_object(name, key)

    @functools.wraps(load_it)
    def load_here(**asked: Any) -> Any:
        is_ours = load_it.__module__.startswith("fedray.data") and load_it.__name__ != "sample"
        is_elsewhere = is_ours and not Path(asked.get("root") or "nowhere").exists()
        return _black_images(load_it.__name__, asked.get("image_size")) if is_elsewhere else load_it(**asked)

    return load_here


def _black_images(name: str, size: int | None) -> Source:
    """As many as in MNIST, or fewer in colour."""
    is_grey = "mnist" in name
    x = np.zeros((60_000, 1, size or 28, size or 28) if is_grey else (12_000, 3, size or 32, size or 32), np.uint8)
    channels = np.ones(x.shape[1], np.float32)
    y = np.arange(len(x)) % 10
    return Source(name, x, y, x[:1000], y[:1000], 10, channels / 255, 0 * channels)
