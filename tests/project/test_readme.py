"""What the documents show works as printed: their code, their links, and the names of files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from documents import TEXTS, code_of, indented
from processes import PROGRAM, python
from shown_commands import fedray_words, shown

import fedray
from fedray.config import load
from fedray.tuning.spec import read_sweeps
from fedray.tuning.suite import read_suite

PAGES = ("start.md", "stepping.md", "many_runs.md")
"""The pages whose blocks of Python belong together: a test runs those of a page one after another."""


TRIED = (
    "fedray.simulate(settings", "class Near", "class Mine(Algorithm)", "class Momentum",
    "AlgorithmContract", "from fedray import tune",
    "np.savez", "def load(root", "class TestMine(SourceContract", "def confidence", '"run.name": "prices"',
    "change = v2.Compose",
    "class Heavy", "class Median", "class Rare", "class FedPer", "def rings", "def focal", "class Lines", "class Clip",
    "class AroundMedian", "class Processes(", "class Struggling", "PoolContract", "@hydra.main",
    "BertWordPieceTokenizer()",
)  # fmt: skip
"""What tells the Python blocks from each other; a test runs each of them."""


PYTEST = "import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', '.']))"


def block(text: str) -> str:
    """The documents' one Python block that contains ``text``."""
    assert text in TRIED
    (found,) = [code for code in code_of("python") if text in code]
    return found


def program() -> list[str]:
    return [sys.executable, str(Path(fedray.__path__[0]) / "run.py")]


def fedray_commands() -> list[list[str]]:
    return [words for command in shown() if (words := fedray_words(command))]


def run(folder: Path, *arguments: str, seconds: int = 240) -> str:
    """What code of Python's (-c CODE) or a command of fedray's prints, which must succeed."""
    words = arguments[1:] if arguments[0] == "-c" else (PROGRAM, *arguments)
    done = python(*words, folder=folder, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_of_python_is_tried() -> None:
    together = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", TEXTS[f"docs/{page}"], re.DOTALL)]
    for code in set(code_of("python")) - set(together):
        assert sum(text in code for text in TRIED) == 1, code


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page == "many_runs.md")) for page in PAGES]
)
def test_pages_whose_blocks_belong_together(tmp_path: Path, page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", TEXTS[f"docs/{page}"], re.DOTALL))
    assert run(tmp_path, "-c", code)


NOT_RUN = {
    "class Momentum": "Flower's",
    "client_step_state": "FedJAX's",
    "grads, own": "FedJAX's",
    "def step(self": "methods without their class, beside FedJAX's",
    "fresh = objective": "the inside of a step, beside FedJAX's",
}
"""What tells indented blocks of Python that are only compiled."""

PARTITIONS = {
    "__init__.py": """
import numpy as np
from datasets import Dataset
from PIL import Image

class FederatedDataset:
    def __init__(self, dataset, partitioners):
        self.names = list(partitioners)
    def load_partition(self, number):
        return self.load_split(self.names[0])
    def load_split(self, split):
        pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 28), np.uint8)
        return Dataset.from_dict({"image": [Image.fromarray(each) for each in pixels], "label": np.arange(20) % 4})
""",
    "partitioner.py": "def DirichletPartitioner(num_partitions, partition_by, alpha): pass",
}
"""In place of flwr-datasets: images of that form."""


def test_indented_python(tmp_path: Path) -> None:
    """What is indented and is no command is Python (else test_shown_commands.py finds it), and is run if it can be."""
    blocks = [block for block in indented() if block.is_python() and block.page != "docs/hydra.md"]
    (partitions,) = [block for block in blocks if not any(text in block.text for text in NOT_RUN)]
    (tmp_path / "flwr_datasets").mkdir()
    for name, content in PARTITIONS.items():
        (tmp_path / "flwr_datasets" / name).write_text(content)
    run(tmp_path, "-c", partitions.text.replace('"run.rounds": 10', '"run.rounds": 1, "engine.kind": "local"'))
    assert list(tmp_path.glob("runs/*/summary.json"))


@pytest.mark.timeout(900)
def test_hydra(tmp_path: Path) -> None:
    """The page's file and program, with the real Hydra: a job, and four jobs of two algorithms and two seeds."""
    (tmp_path / "conf").mkdir()
    (settings,) = re.findall(r"\n\n((?:    .*\n)+?)\nAnd this is the program", TEXTS["docs/hydra.md"])
    (tmp_path / "conf" / "config.yaml").write_text(textwrap.dedent(settings).replace("rounds: 10", "rounds: 2"))
    (tmp_path / "train.py").write_text(block("@hydra.main"))
    for words in (["train.lr=0.1"], ["-m", "algorithm.name=fedavg,fedprox", "run.seed=0,1"]):
        environment = {**os.environ, "PYTHONPATH": str(Path(fedray.__path__[0]).parent)}
        subprocess.run([sys.executable, "train.py", *words], cwd=tmp_path, env=environment, check=True, timeout=240)
    assert len(list(tmp_path.glob("outputs/*/*/run/summary.json"))) == 1
    assert len(list(tmp_path.glob("multirun/*/*/*/run/summary.json"))) == 4
    assert run(tmp_path, "compare", "multirun").count("fedprox") > 0


def test_from_python(tmp_path: Path) -> None:
    run(tmp_path, "-c", block("fedray.simulate(settings").replace('"run.rounds"', '"model.name": "mlp", "run.rounds"'))
    assert (tmp_path / "runs" / "fednag-sample" / "summary.json").exists()


def test_own_task(tmp_path: Path) -> None:
    printed = run(tmp_path, "-c", block('"run.name": "prices"')).split()
    assert printed[0] == "mean_squared_error"
    assert 0 < float(printed[1]) < 5


def test_own_transform(tmp_path: Path) -> None:
    assert 0 < float(run(tmp_path, "-c", block("change = v2.Compose").replace("{", '{"train.local_steps": 1, '))) <= 1


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [
        ("Near", "class Near", "algorithm.mu=0.1"),
        ("Mine", "class Mine(Algorithm)", "algorithm.mu=0.1"),
        ("Momentum", "class Momentum", "algorithm.beta=0.5"),
        ("Median", "class Median", "train.server_lr=0.9"),
    ],
)
def test_own_algorithm(tmp_path: Path, name: str, text: str, setting: str) -> None:
    code, file = block(text), f"{name.lower()}.py"
    assert len(code.splitlines()) < 30
    (tmp_path / file).write_text(code)
    settings = ["model.name=logistic", "engine.kind=local", "run.rounds=2", "data.clients=4"]
    assert "completed after 2 rounds" in run(tmp_path, "run", f"algorithm.name={file}:{name}", setting, *settings)


@pytest.mark.slow
def test_a_model_made_from_a_configuration(tmp_path: Path) -> None:
    run(tmp_path, "-c", block("BertWordPieceTokenizer()"))
    (words,) = [words for words in fedray_commands() if "model.name=transformers:small-bert" in words]
    printed = run(tmp_path, *words, "engine.kind=local")
    assert "15,490 parameters" in printed
    assert "completed after 5 rounds, accuracy 1.0000" in printed


@pytest.mark.slow
def test_own_contract(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("class Mine(Algorithm)"))
    (tmp_path / "test_mine.py").write_text(block("AlgorithmContract"))
    code = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    run(tmp_path, "-c", code, "-q", "-p", "no:cacheprovider", ".", seconds=200)


def test_own_file_of_data(tmp_path: Path) -> None:
    run(tmp_path, "-c", block("np.savez"))
    (command,) = [words for words in fedray_commands() if "data.root=mine.npz" in words]
    assert "10 clients" in run(tmp_path, *command, "engine.kind=local", "run.rounds=1")


def test_source_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("def load(root"))
    (tmp_path / "test_mine.py").write_text(block("class TestMine(SourceContract"))
    run(tmp_path, "-c", PYTEST)
    (command,) = [words for words in fedray_commands() if "data.source=mine.py:load" in words]
    assert "3 clients" in run(tmp_path, *command, "engine.kind=local", "run.rounds=1")


def test_own_loss_and_metrics(tmp_path: Path) -> None:
    assert "test_confidence" in run(tmp_path, "-c", block("def confidence"))


ADDED = {
    "heavy.py": "class Heavy", "fedper.py": "class FedPer", "rings.py": "def rings", "robust.py": "def focal",
    "logger.py": "class Lines", "sending.py": "class Clip", "byzantine.py": "class AroundMedian",
    "rare.py": "class Rare", "processes.py": "class Processes(", "struggling.py": "class Struggling",
    "test_mine.py": "PoolContract",
}  # fmt: skip
"""The files of docs/extending.md, and what tells each."""


@pytest.fixture
def added(tmp_path: Path) -> Path:
    """A folder with the files of docs/extending.md."""
    for file, text in ADDED.items():
        assert f"`{file}`" in TEXTS["docs/extending.md"]
        (tmp_path / file).write_text(block(text))
    (tmp_path / "all.yaml").write_text(re.findall(r"```yaml\n(.*?)```", TEXTS["docs/extending.md"], re.DOTALL)[0])
    return tmp_path


def test_everything_of_your_own_together(added: Path) -> None:
    """The same bits on the back end of the page as on the local engine; the private layers make clients good."""
    one, other = (run(added, "run", "all.yaml", f"run.name={kind}", *changed) for kind, changed in (
        ("a", []), ("b", ["engine.kind=local", "run.callbacks=[]"])))  # fmt: skip
    shas = [re.findall(r"sha256 (\w+)", printed) for printed in (one, other)]
    assert shas[0] == shas[1] != []
    lines = [json.loads(line) for line in (added / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 11))
    (last,) = re.findall(r"round 10/10 .* accuracy (\S+)  personal (\S+)", one)
    assert float(last[1]) > 0.9 > float(last[0])


def test_heavy(added: Path) -> None:
    settings = ["model.name=logistic", "engine.kind=local", "run.rounds=2", "data.clients=4"]
    assert "completed after 2 rounds" in run(added, "run", "algorithm.name=heavy.py:Heavy", *settings)


def test_rare(added: Path) -> None:
    settings = ["model.name=mlp", "engine.kind=local", "run.rounds=2", "data.clients=4"]
    assert "completed after 2 rounds" in run(added, "run", "algorithm.name=rare.py:Rare", *settings)


def test_fedper(added: Path) -> None:
    """The page's is fedray's, to the bit."""
    assert len((added / "fedper.py").read_text().splitlines()) <= 15
    settings = ["model.name=mlp", "engine.kind=local", "run.rounds=3", "data.clients=4", "train.cohort_size=3"]
    printed = [run(added, "run", f"algorithm.name={name}", *settings) for name in ("fedper.py:FedPer", "fedper")]
    one, other = (re.findall(r"sha256 (\w+)", each) for each in printed)
    assert one == other
    assert len(one) == 1


def test_a_rule_and_attacks_of_your_own(added: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(algorithm.name.*?)```", TEXTS["docs/extending.md"], re.DOTALL)
    (added / "robust.yaml").write_text(shown)
    settings = ["model.name=logistic", "engine.kind=local", "run.rounds=2", "data.clients=10"]
    for name, attack in (("mirror", []), ("labels", ["attack.kind=byzantine.py:WrongLabels", "attack.options={}"])):
        printed = run(added, "run", "robust.yaml", f"run.name={name}", *settings, *attack)
        assert "2 of 10 clients are Byzantine (byzantine.py" in printed
        assert "completed after 2 rounds" in printed


def test_contracts_of_your_own(added: Path) -> None:
    printed = run(added, "-c", PYTEST)
    assert "44 passed, 3 skipped" in printed


def spaces() -> list[str]:
    return [code for code in code_of("yaml") if "spaces:" in code]


def test_space_files(tmp_path: Path) -> None:
    assert {len(read_sweeps(yaml.safe_load(code))) for code in spaces()} == {1, 2}
    (short,) = re.findall(r"^ {8}(base: .*\n) {8}(spaces: .*\n)", TEXTS["README.md"], re.MULTILINE)
    assert len(read_sweeps(yaml.safe_load("".join(short)))) == 1


def test_whole_configurations_and_suites(tmp_path: Path) -> None:
    """Every other block of YAML is a whole file: a suite if it lists algorithms, and a run's configuration if not."""
    others = [code for code in code_of("yaml") if "spaces:" not in code]
    assert ["algorithms:" in code for code in others].count(True) == 1
    # what a block extends
    (tmp_path / "common.yaml").write_text("run.rounds: 2\n")
    for code in others:
        path = tmp_path / "shown.yaml"
        path.write_text(code)
        if "algorithms:" in code:
            assert len(read_suite(path).specs) > 1
        else:
            assert load(path).run.rounds


@pytest.mark.slow
def test_first_sweep_from_python(tmp_path: Path, ray_cluster: None) -> None:
    (text,) = [code for code in spaces() if "data.source: sample" in code]
    (tmp_path / "my_space.yaml").write_text(text)
    code = block("from fedray import tune").replace("tune.trials=2", "tune.trials=1")
    assert "best.yaml" in run(tmp_path, "-c", code)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_space_file(tmp_path: Path, ray_cluster: None) -> None:
    """The space with environments, and a sweep of one trial of it."""
    (text,) = [code for code in spaces() if "environments:" in code]
    (tmp_path / "my_space.yaml").write_text(text)
    small = ["data.source=sample", "model.name=logistic", "run.iterations=20", "data.partition.alpha=1"]
    run(tmp_path, "tune", "my_space.yaml", *small, "tune.trials=1", "tune.seeds=1")
    assert (tmp_path / "sweeps" / "my_space" / "best.yaml").exists()
    again = ["run", "--from-trial", "sweeps/my_space/trials/0000"]
    assert "identical" in run(tmp_path, *again)
    assert (tmp_path / "runs" / "my_space-0000-seed-0" / "summary.json").exists()
    onto_itself = ["run.output=sweeps/my_space/trials/0000", "run.name=seed-0", "run.resume=false"]
    done = subprocess.run([*program(), *again, *onto_itself], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "can't be repeated in its own folder" in done.stderr


def test_run_file_alone(tmp_path: Path) -> None:
    """`ray submit` copies run.py alone to the head."""
    (tmp_path / "run.py").write_text((Path(fedray.__path__[0]) / "run.py").read_text())
    settings = ["algorithm.name=fedavg", "model.name=logistic", "engine.kind=local", "run.rounds=1"]
    command = [sys.executable, "run.py", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["start.md", "many_runs.md", "loggers.md", "beside_a_rule.md"])
def test_commands_of_a_page_one_after_another(tmp_path: Path, page: str) -> None:
    """Each succeeds in a folder that has the files of the page and what the commands before have left."""
    text = TEXTS[f"docs/{page}"]
    for name, content in re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content)
    commands = re.findall(r"^    \$ fedray (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        run(tmp_path, *shlex.split(command))
