"""Each command line that a page shows can be given as it stands there; which are run, and how, tests/README.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, files_of
from processes import python
from shown_commands import (
    black_images_for_data_that_are_elsewhere,
    check_fedray,
    fedray_words,
    kind_of,
    program_of,
    shown,
    unknown_options,
)

OF_KIND: dict[str, list[Any]] = {kind: [] for kind in ("fedray", "program", "options", "listed", "")}
for command in shown():
    OF_KIND[kind_of(command)].append(command)

PROGRAMS: dict[Path, list[list[str]]] = {}
for command in OF_KIND["program"]:
    path, words = program_of(command)
    PROGRAMS.setdefault(path, []).append(words)


def test_no_command_is_left_out() -> None:
    """A program that is new to the pages is checked, or listed with a reason."""
    assert [str(command) for command in OF_KIND[""]] == []
    least = {"fedray": 170, "program": 90, "options": 70, "listed": 25}
    assert {kind: len(OF_KIND[kind]) >= count for kind, count in least.items()} == dict.fromkeys(least, True)


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, but for what the pages name as it is in a checkout."""
    monkeypatch.chdir(tmp_path)
    for name in ("analysis", "cluster"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


LARGE = "fedray/models/README.md"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page == LARGE))
        for page in sorted({c.page for c in OF_KIND["fedray"]})
    ],
)
@pytest.mark.usefixtures("no_real_data", "without_hub")
def test_commands_of_fedray_could_run(page: str, page_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is resolved as by `--print-config`, with the files of its page, all keys and all values."""
    monkeypatch.setattr("fedray.data.sources.source.import_object", black_images_for_data_that_are_elsewhere)
    for name, content in files_of(page).items():
        (page_folder / name).write_text(content)
    wrong = {}
    for command in OF_KIND["fedray"]:
        if command.page == page:
            try:
                check_fedray(fedray_words(command) or [])
            except Exception as error:
                wrong[str(command)] = repr(error)
    assert wrong == {}


READING = """
import argparse, json, os, runpy, sys

plain = argparse.ArgumentParser.parse_args

def parse_all(parser, *ignored):
    for words in lines:
        plain(parser, words)
    print("read", program, flush=True)
    raise SystemExit

argparse.ArgumentParser.parse_args = parse_all
sys.path.insert(0, "")
for program, lines in json.loads(sys.argv[1]).items():
    sys.argv[:], sys.path[0], before = [program], os.path.dirname(program), set(sys.modules)
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (program, end.code)
    # another folder may have other modules of these names
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(os.path.dirname(program)):
            del sys.modules[name]
"""
"""Lets programs read words, and do nothing else."""


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(ROOT) for path in PROGRAMS}), ids=str)
def test_programs_take_their_words(folder: Path) -> None:
    here = {path: lines for path, lines in PROGRAMS.items() if path.parent == ROOT / folder}
    assert [str(path) for path in here if not path.is_file()] == []
    reading = {str(path): lines for path, lines in here.items() if "Parser(" in path.read_text()}
    assert [path for path, lines in here.items() if any(lines) and str(path) not in reading] == []
    done = python(READING, json.dumps(reading), folder=ROOT, seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"read {path}" for path in reading]


@pytest.mark.slow
def test_options_of_other_programs() -> None:
    found = {str(command): unknown_options(command) for command in OF_KIND["options"]}
    assert {command: options for command, options in found.items() if options} == {}
    # what is not installed has no help
    assert {command.split()[1] for command, options in found.items() if options is None} <= {"pip", "mlflow", "sbatch"}
    assert any(options == [] for options in found.values())
