"""The programs that measure fedray run. What they measure is not tested."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import yaml

import fedray

BENCHMARKS = Path(fedray.__file__).parent.parent / "analysis" / "benchmarks"


def test_client_steps_of_each_back_end(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("chunks")
    monkeypatch.setattr("common.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["chunks.py", "--quick", "--compiled", "--models", "logistic"])
    program.main()
    (summary,) = tmp_path.glob("chunks-cpu-*.json")
    full, half = json.loads(summary.read_text())["cells"]
    back_ends = {"loop", "loop compiled", "vmap 1", "vmap 1 compiled", "vmap 8", "vmap 8 compiled"}
    assert {name for name in full if isinstance(full[name], dict)} == back_ends
    assert {name for name in half if isinstance(half[name], dict)} == {"loop", "vmap 1", "vmap 8"}
    assert full["vmap 8 compiled"]["steps_per_second"] > 0
    assert capsys.readouterr().out.count("| logistic |") == 4


def test_which_models_give_the_same_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("bits")
    table = tmp_path / "bits.yaml"
    monkeypatch.setattr(program, "TABLE", table)
    monkeypatch.setattr("fedray.engine.rehearsal.REHEARSING", {"cuda"})
    for name in ("logistic", "stackoverflow_lstm"):
        monkeypatch.setattr(sys, "argv", ["bits.py", "--models", name, "--write"])
        program.main()
    found = yaml.safe_load(table.read_text())
    # what is measured later is added
    assert found["cpu"]["models"] == {key: {"fp32": [], "bf16": []} for key in ("logistic", "stackoverflow_lstm")}
    assert capsys.readouterr().out.count(": the same bits") == 4
