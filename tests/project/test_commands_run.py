"""The commands of each page are run in their order in one folder, made small, and on the images that come with fedray.

Those of pages with `$ ` before each command are run as they are, in test_readme.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import ROOT, TEXTS, Command, files_of
from processes import PROGRAM, python
from shown_commands import fedray_words, shown

from fedray.config import flat
from fedray.config.reading import read

NOT_RUN = {
    r"\bs3://": "a bucket: remote/test_runs_at_uris.py",
    r"doctor|clean": "is about a machine: engine/test_machines.py, engine/test_leftovers.py",
    r"--suite": "takes hours: tuning/test_suites.py",
    r"transformers:|source=hf": "a hub: data/test_hf.py, models/test_adapters.py",
    r"root=(photos|visits)": "files of the reader's: data/test_image_folders.py, data/test_tables.py",
    r"tf32": "a GPU: client/test_precision.py",
    r"gldv2": "a model of photographs: models/test_larger_models.py",
    r"multirun": "what Hydra has made: test_readme.py",
    r"mine\.(py|npz)|near\.py": "a file that the page shows: test_readme.py",
}
"""Which commands are not run, and what runs the like."""

PLAIN = {page for page, text in TEXTS.items() if re.search(r"^    \$ fedray ", text, re.MULTILINE)}


SMALL = {
    "run": ["run.resume=false", "engine.kind=local"],
    "tune": ["tune.trials=1", "tune.seeds=1", "tune.resume=false", "model.name=logistic", "run.iterations=80"],
    "evaluate": [],
}


def _commands() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for command in shown():
        words = fedray_words(command) if command.program == "fedray" and not command.in_text else None
        if words and command.page not in PLAIN - {"tune_spaces/README.md"} and not _reason(command):
            found.setdefault(command.page, []).append(words)
    return found


def _reason(command: Command) -> str:
    return next((reason for text, reason in NOT_RUN.items() if re.search(text, str(command))), "")


COMMANDS = _commands()


def small(words: list[str], folder: Path = ROOT) -> list[str]:
    """The command with few rounds and trials, and on data that are here."""
    words = [re.sub(r"trials/\d+", "trials/0000", word) for word in words if not word.startswith("model.weights=")]
    if words[0] in ("run", "tune", "evaluate") and not {"--report", "--from-trial"} & {*words}:
        if any(word.startswith("data.source=") for word in words):
            words = [word for word in words if not re.match(r"data\.(source|image|norm|root)", word)]
        words += ["data.source=sample", "data.variant=null"]
        words += SMALL[words[0]] if "--seeds" not in words else []
        words += _short(folder, words) if words[0] == "run" else []
    return words


def _short(folder: Path, words: list[str]) -> list[str]:
    """The settings that make a run short; a warm-up must have an end."""
    files = [folder / word for word in words if word.endswith(".yaml")]
    if any("run.iterations" in flat(read(str(file))[0]) for file in files):
        return ["run.iterations=80"]
    rounds = "run.rounds=6" if "warmup" in str(words) else "run.rounds=2"
    # a file may have train.local_epochs
    return [rounds, *([] if files else ["train.local_steps=2"])]


def fedray(folder: Path, *words: str) -> str:
    done = python(PROGRAM, *words, folder=folder)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def make_what_is_named(folder: Path, words: list[str]) -> None:
    """Makes the runs and the sweep that a command reads and no command before it has made."""
    few = ["model.name=lenet5", "engine.kind=local", "data.clients=4", "run.save_best=true"]
    few += ["run.local_models_of=[3]", "run.local_models_in=[10]", "run.rounds=10"]
    names = {match[1] for word in words if (match := re.match(r"runs/(\w+-[\w*]+)", word))}
    # they differ in what `--by` tells apart
    for alpha, name in enumerate(sorted(names), 1):
        if not list(folder.glob(f"runs/{name}")):
            algorithm = name.partition("-")[0]
            fedray(
                folder,
                "run",
                f"algorithm.name={algorithm}",
                f"run.name={name.replace('*', 'a')}",
                f"data.partition.alpha={alpha}",
                *few,
            )
    for name in {match[1] for word in words if (match := re.match(r"sweeps/(\w+)", word))}:
        if not (folder / "sweeps" / name).exists():
            fedray(folder, *small(["tune", name]))
    if "mine.pt" in words:
        code = "import torch, safetensors.torch as saved\n"
        code += "torch.save(saved.load_file('runs/fedavg-mnist/model.safetensors'), 'mine.pt')"
        assert python(code, folder=folder).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_one_after_another(page: str, tmp_path: Path) -> None:
    (tmp_path / "analysis").symlink_to(ROOT / "analysis")
    for name, content in files_of(page).items():
        (tmp_path / name).write_text(content)
    reading = [words for words in COMMANDS[page] if words[0] in ("compare", "report", "evaluate")]
    make_what_is_named(tmp_path, [word for words in reading for word in words])
    for words in COMMANDS[page]:
        make_what_is_named(tmp_path, words)
        fedray(tmp_path, *(name for word in small(words, tmp_path) for name in _expanded(tmp_path, word)))


def _expanded(folder: Path, word: str) -> list[str]:
    """What a shell makes of a word with a star."""
    return [str(path.relative_to(folder)) for path in folder.glob(word)] if re.match(r"runs/.*\*", word) else [word]
