"""The programs that measure fedray run. What they measure is not tested."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import fedray

BENCHMARKS = Path(fedray.__file__).parent.parent / "analysis" / "benchmarks"


@pytest.mark.slow
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


def test_gradients_of_a_stack(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("gpu_stacks")
    monkeypatch.setattr(sys, "argv", ["gpu_stacks.py", "logistic", "--clients", "2", "--cpu", "--no-compile"])
    program.main()
    lines = capsys.readouterr().out.splitlines()[1:3]
    assert [line.startswith("logistic") and "same bits True" in line for line in lines] == [True, True]


def test_the_table_of_a_gpu_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("gpu")
    chosen = ["--device", "cpu", "--quick", "--only", "lenet5", "--precisions", "fp32,bf16", "--actors", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *chosen, "--out", str(tmp_path)])
    program.main()
    found = json.loads((tmp_path / "gpu.json").read_text())
    rates = {(row["precision"], row["way"]): row["median"] for row in found["rows"]}
    assert set(rates) == {(precision, way) for precision in ("fp32", "bf16") for way in ("fedray", "eager loop")}
    assert min(rates.values()) > 0
    assert found["card"] == "CPU"
    assert (tmp_path / "gpu.md").read_text().count("| lenet5 |") == 2
    assert "| lenet5 | bf16 |" in capsys.readouterr().out


def test_a_part_that_fails_or_takes_too_long_is_said(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("gpu")
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert program.ended(slow, 0.1) == "the part took too long, and was ended"
    failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    assert program.ended(failing, 30) == "the part ended with exit code 3"
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    kept = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    kept.stdout.readline()
    monkeypatch.setattr(program, "GRACE", 0.1)
    assert program.ended(kept, 0.1) == "the part took too long, and was ended"
    kept.stdout.close()
    rows = [
        {"part": "lenet5", "workload": "lenet5", "precision": "fp32", "way": "fedray", "peak_tflops": 1.0, "error": "E"}
    ]
    about = {"card": "a card", "machine": {"cores": 2}, "versions": {"fedray": "x"}, "seconds": 1.0}
    assert "- lenet5 fp32 fedray: E" in program.report(rows, about)


def test_bits_of_a_gpu_on_a_cpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("gpu_cases")
    case = program.model_cases(["logistic"])["logistic, one by one"]
    found = {way: program.outcome(case, way, "cpu") for way in ("1 lane", "8 lanes")}
    case = replace(case, ways=tuple(found))
    (line,) = program.rows("name", case, found)
    assert f"| {found['1 lane']['sha256'][:12]} | same | yes |" in line
    found["8 lanes"] = program.outcome(replace(case, settings={"model.name": "none"}), "8 lanes", "cpu")
    first, second = program.rows("name", case, found)
    assert "| NOT THE SAME |" in first
    assert second.startswith("|   8 lanes | UserError: ")


def test_which_models_give_the_same_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("bits")
    table = tmp_path / "bits.yaml"
    monkeypatch.setattr(program, "TABLE", table)
    monkeypatch.setattr("fedray.engine.rehearsal.REHEARSING", {"cuda"})
    for name in ("logistic", "lenet5"):
        monkeypatch.setattr(sys, "argv", ["bits.py", "--models", name, "--write"])
        program.main()
    found = yaml.safe_load(table.read_text())
    # what is measured later is added
    assert found["cpu"]["models"] == {key: {"fp32": [], "bf16": []} for key in ("logistic", "lenet5")}
    assert capsys.readouterr().out.count(": the same bits") == 4
