"""The notebooks run as they stand, from the first cell to the last, and show what they say."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SLOW = {"own_algorithm": pytest.mark.slow}


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=SLOW.get(path.stem, ()), id=path.stem) for path in NOTEBOOKS]
)
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    kept = nbformat.read(path, as_version=4)
    made = nbformat.read(path, as_version=4)
    NotebookClient(made, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(kept.cells, made.cells, strict=True):
        assert forms(after) == forms(before), after.source


def forms(cell):
    """What a cell shows, apart from numbers: a text may come in several pieces."""
    found = [sorted(output.get("data", {"text": ""})) for output in cell.get("outputs", [])]
    return [each for place, each in enumerate(found) if each != ["text"] or found[place - 1 : place] != [each]]


def test_a_run_has_a_bar():
    """It ends where the run ends."""
    first = nbformat.read(FOLDER / "first_run.ipynb", as_version=4)
    shown = "".join(output.get("data", {}).get("text/html", "") for output in first.cells[1].outputs)
    assert 'round 15/15 <progress value="15" max="15"' in shown
