from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from published_tables import EXPERIMENT
from reproducing import costs, published


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A folder with an experiment, three tables of it, and what it costs."""
    folder = tmp_path / "experiments"
    (folder / "paper/published").mkdir(parents=True)
    (folder / "paper/small.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    (folder / "costs.csv").write_text("experiment,cohort,local_steps,rounds,hours_per_run\npaper/small,3,3,20,0.5\n")
    column = {"experiment": "paper/small", "published": [4, 8]}
    for name, unit, columns in (
        ("rounds", "rounds", {"a": column, "b": column | {"with": {"train.lr": 0.1}}}),
        ("ratio", "ratio", {"a": column}),
        ("sent", "gib_sent", {"a": column}),
        ("accuracy", "final", {"a": column | {"published": [50, None]}}),
        ("steps", "final", {"a": {"experiment": "paper/small", "with": {"train.local_steps": 6}}}),
    ):
        table = {"title": f"Paper, {name}", "measure": unit, "seeds": 2, "rows": ["fedavg", "fedprox"]}
        table |= {"of": "train"} if unit == "final" else {"until": "first row"} if unit == "gib_sent" else {}
        (folder / f"paper/published/{name}.yaml").write_text(yaml.safe_dump(table | {"columns": columns}))
    for module in (published, costs):
        monkeypatch.setattr(module, "EXPERIMENTS", folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path
