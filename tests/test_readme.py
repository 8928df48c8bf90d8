"""What the README shows works as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fedray
from fedray.tuning.spec import read_sweeps

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def program() -> list[str]:
    return [sys.executable, str(Path(fedray.__path__[0]) / "run.py")]


def block(text: str) -> str:
    """The README's one Python block that contains ``text``."""
    (found,) = [code for code in BLOCKS if text in code]
    return found


def test_from_python(tmp_path: Path) -> None:
    code = block("fedray.simulate(").replace('"engine.kind"', '"model.name": "logistic", "engine.kind"')
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "fednag-sample" / "summary.json").exists()


def test_own_algorithm(tmp_path: Path) -> None:
    code = block("class Mine")
    assert len(code.splitlines()) < 30
    (tmp_path / "mine.py").write_text(code)
    settings = ["model.name=logistic", "engine.kind=local", "run.rounds=2", "data.clients=4"]
    command = [*program(), "algorithm.name=mine.py:Mine", "algorithm.mu=0.1", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "completed after 2 rounds" in done.stdout


def test_own_contract(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("class Mine"))
    (tmp_path / "test_mine.py").write_text(block("AlgorithmContract"))
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not actor_counts", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout


def test_space_file(tmp_path: Path) -> None:
    """The space that the README shows, and a sweep of one trial of it."""
    (text,) = [code for code in YAML if "spaces:" in code]
    (tmp_path / "my_space.yaml").write_text(text)
    assert len(read_sweeps(tmp_path / "my_space.yaml")) == 2
    small = ["data.source=sample", "model.name=logistic", "run.iterations=20", "data.partition.alpha=1"]
    command = [*program(), "tune", "my_space.yaml", *small, "tune.trials=1", "tune.seeds=1", "engine.address=local"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweeps" / "my_space" / "best.yaml").exists()
    again = [*program(), "run", "--from-trial", "sweeps/my_space/trials/0000"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    assert (tmp_path / "runs" / "my_space-0000-seed-0" / "summary.json").exists()
    onto_itself = ["run.output=sweeps/my_space/trials/0000", "run.name=seed-0", "run.resume=false"]
    done = subprocess.run([*again, *onto_itself], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "can't be repeated in its own folder" in done.stderr


def test_run_file_alone(tmp_path: Path) -> None:
    """`ray submit` copies run.py alone to the head."""
    (tmp_path / "run.py").write_text((Path(fedray.__path__[0]) / "run.py").read_text())
    settings = ["algorithm.name=fedavg", "model.name=logistic", "engine.kind=local", "run.rounds=1"]
    command = [sys.executable, "run.py", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
