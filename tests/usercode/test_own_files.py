"""An object of the user's own is named by its file: ``mine.py:Mine``."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedray
from fedray.algorithms import find_algorithm
from fedray.errors import UserError
from fedray.testing import AlgorithmContract
from fedray.usercode.digests import code_digest
from fedray.usercode.importing import import_object, short_name

MINE = """
import torch

from fedray.algorithms import Algorithm, Carry, Result, Upload, parameter
from helpers import half


class Mine(Algorithm):
    '''FedAvg that moves half as far.'''

    class Hyper(Algorithm.Hyper):
        part: float = parameter(0.5, "how far", gt=0, le=1)

    def begin(self, client):
        return Carry({"y": client.start("x")})

    def step(self, client, carry, batch):
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch))

    def end(self, client, carry):
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(self, server, phase, sums, scalars):
        from late import whole  # found in the processes of the Ray engine too

        server["x"] = server["x"] + whole(half(2 * self.hyper.part)) * (sums["y"] - server["x"])


class Model(torch.nn.Linear):
    def __init__(self, input_shape, classes, bias: bool = True):
        super().__init__(input_shape[0], classes, bias)


def load():
    from fedray.testing.contracts import small_source

    return small_source()
"""

RUN: dict[str, Any] = {
    "algorithm.name": "folder/mine.py:Mine",
    "model.name": "folder/mine.py:Model",
    "data.source": "folder/mine.py:load",
    "data.clients": 3,
    "run.rounds": 3,
    "run.checkpoint_every": 1,
}


def write(folder: Path, name: str = "mine") -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(MINE)
    (folder / "helpers.py").write_text("def half(x):\n    return x / 2\n")
    (folder / "late.py").write_text("def whole(x):\n    return x\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def program(here: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(fedray.__path__[0]) / "run.py"), *arguments]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=timeout)


def sha(here: Path, run: str = "mine_Mine-mine_load", runs: str = "runs") -> str:
    import json

    return json.loads((here / runs / run / "summary.json").read_text())["model_sha256"]


@pytest.mark.slow
def test_one_run_on_either_engine_and_resumed(here: Path, ray_cluster: None) -> None:
    """An algorithm, model and data of a file: the same bits locally, with Ray, and resumed in a new process."""
    settings = [f"{key}={value}" for key, value in RUN.items()]
    local = program(here, *settings, "engine.kind=local", "run.output=local")
    assert local.returncode == 0, local.stderr
    ray = program(here, *settings, "engine.kind=ray", "engine.actors=2", "run.output=ray")
    assert ray.returncode == 0, ray.stderr
    assert sha(here, runs="local") == sha(here, runs="ray")
    stopped = fedray.simulate(RUN | {"engine.kind": "local"}, callbacks=[lambda report: report.round == 1])
    assert stopped.summary["status"] == "interrupted"
    resumed = program(here, *settings, "engine.kind=local")
    assert resumed.returncode == 0, resumed.stderr
    assert "round 2/3" in resumed.stdout
    assert sha(here) == sha(here, runs="local")


@pytest.mark.slow
def test_a_sweep(here: Path, ray_cluster: None) -> None:
    """A space whose base has an algorithm of a file, and the best trial run again by itself."""
    base = {key: value for key, value in RUN.items() if key != "data.source"} | {"model.name": "logistic"}
    (here / "space.yaml").write_text(
        f"base: {base}\nspaces: {{wide: {{algorithm.part: {{uniform: [0.1, 1]}}}}}}\ntune: {{trials: 2}}\n"
    )
    done = program(here, "tune", "space.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (here / "sweeps" / "space" / "best.yaml").exists(), done.stdout
    again = program(here, "run", "--from-trial", "sweeps/space/trials/0001")
    assert again.returncode == 0, again.stderr
    assert "identical" in again.stdout


def test_trials_work_where_the_driver_does(here: Path, ray_cluster: None) -> None:
    """The path of a file is relative to the driver's directory, not to the one in which Ray was started."""
    from fedray.tuning import tune

    base = RUN | {"algorithm.part": 0.5}
    (result,) = tune({"base": base, "spaces": {"wide": {"train.lr": {"grid": [0.1]}}}})
    assert result.trials["state"].tolist() == ["complete"], (result.folder / "trials/0000/error.txt").read_text()


def test_a_sweep_without_a_name_is_one_folder(here: Path) -> None:
    from fedray.tuning.spec import read_sweeps

    space = {"base": RUN, "spaces": {"wide": {"train.lr": {"uniform": [0.1, 1]}}}}
    assert read_sweeps(space)[0].name == "mine_Mine"


@pytest.mark.parametrize("stem", ["profile", "torch", "own-algorithm"])
def test_whatever_the_file_is_called(tmp_path: Path, stem: str) -> None:
    """A file in the working directory that is called as a module of Python's, or of a library's, hides nothing."""
    write(tmp_path, stem)
    small = ["model.name=logistic", "data.clients=3", "run.rounds=1", "engine.kind=local"]
    done = program(tmp_path, f"algorithm.name={stem}.py:Mine", *small)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / f"{stem}_Mine-sample" / "summary.json").exists()


@pytest.mark.slow
def test_nor_in_the_processes_of_ray(tmp_path: Path) -> None:
    """Ray puts the working directory first where its workers look for modules, before Python's own: neither a trial nor
    a client actor may find these there."""
    for stem in ("random", "torch", "timeit", "colorsys"):
        (tmp_path / f"{stem}.py").write_text("raise RuntimeError('this is not the module that was meant')\n")
    write(tmp_path, "profile")
    (tmp_path / "space.yaml").write_text(
        "base: {algorithm.name: profile.py:Mine, model.name: logistic, data.clients: 3, run.rounds: 1}\n"
        "spaces: {wide: {algorithm.part: {grid: [0.5]}}}\n"
    )
    on_ray = ["engine.address=local", "engine.kind=ray", "engine.actors=1", "engine.cpus_per_actor=0.5"]
    done = program(tmp_path, "tune", "space.yaml", *on_ray)
    assert done.returncode == 0, done.stderr + done.stdout


class TestMine(AlgorithmContract):
    algorithm = "folder/mine.py:Mine"
    zero = {"part": 1.0}

    @pytest.fixture(autouse=True)
    def _in_its_folder(self, here: Path) -> None:
        """The path is relative to the working directory."""


def test_an_edited_file_is_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's second run has the code that is in the file now; the first run's objects stay what they were."""
    first = import_object("folder/mine.py:Mine", "algorithm.name")
    assert import_object(f"{here}/folder/mine.py:Mine", "algorithm.name") is first
    monkeypatch.syspath_prepend(here / "folder")
    assert code_digest(import_object("mine:Mine", "algorithm.name")) == code_digest(first), "compiled otherwise"
    (here / "folder" / "mine.py").write_text(MINE.replace("half as far", "half as FAR"))
    second = import_object("folder/mine.py:Mine", "algorithm.name")
    assert "FAR" in second.__doc__
    assert "FAR" not in first.__doc__
    assert code_digest(first) == code_digest(second), "a docstring computes nothing"


def test_an_edited_helper_is_not_taken_for_what_python_has_loaded(tmp_path: Path) -> None:
    """Neither one that a file imports nor one that its helper imports."""
    (tmp_path / "inner_of_a_test.py").write_text("RATE = 1\n")
    (tmp_path / "outer_of_a_test.py").write_text("from inner_of_a_test import RATE\n")
    (tmp_path / "own.py").write_text("from outer_of_a_test import RATE\nclass Mine:\n    rate = RATE\n")
    name = f"{tmp_path}/own.py:Mine"
    first = import_object(name, "algorithm.name")
    assert import_object(name, "algorithm.name") is first
    (tmp_path / "inner_of_a_test.py").write_text("RATE = 22\n")
    with pytest.raises(
        UserError, match=r"inner_of_a_test\.py has been edited since Python loaded it.* importlib\.reload"
    ):
        import_object(name, "algorithm.name")
    for module in ("inner_of_a_test", "outer_of_a_test"):
        importlib.reload(sys.modules[module])
    assert (import_object(name, "algorithm.name").rate, first.rate) == (22, 1)


def test_the_name_of_a_folder() -> None:
    assert short_name("/a/b/mine.py:Mine") == "mine:Mine"
    assert short_name("package.mine:Mine") == "package.mine:Mine"
    assert short_name("fedavg") == "fedavg"


WRONG = [
    ("folder/mnie.py:Mine", ["can't read the file", "folder/mnie.py: No such file", "did you mean 'mine.py'?"]),
    ("folder/mine.py:Mien", ["folder/mine.py has no 'Mien' (did you mean 'Mine'?)"]),
    ("folder/mine.py", ["is not of the form file.py:Name or module:Name"]),
    ("folder/mine.py:", ["is not of the form file.py:Name or module:Name"]),
    ("not_there:Mine", ["no such module is on the import path"]),
    ("folder/raises.py:Mine", ["can't import 'folder/raises.py': ZeroDivisionError", "(raises.py, line 2)"]),
    ("folder/syntax.py:Mine", ["can't import 'folder/syntax.py': SyntaxError", "line 1"]),
    ("folder/needs.py:Mine", ["ModuleNotFoundError: No module named 'not_there' (needs.py, line 1)"]),
    ("nowhere/mine.py:Mine", ["can't read the file", "No such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_what_is_wrong(here: Path, name: str, words: list[str]) -> None:
    (here / "folder" / "raises.py").write_text("x = 1\nx / 0\n")
    (here / "folder" / "syntax.py").write_text("class Mine\n")
    (here / "folder" / "needs.py").write_text("import not_there\n")
    with pytest.raises(UserError) as caught:
        find_algorithm(name)
    message = str(caught.value)
    assert message.startswith(f"algorithm.name={name}")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_helpers_of_the_same_name_in_two_folders_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """The second file would have run with the first one's helper."""
    for number, folder in enumerate(("first", "second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rates_of_a_test.py").write_text(f"LR = {number}\n")
        (tmp_path / folder / "mine.py").write_text("from rates_of_a_test import LR\nclass Mine:\n    lr = LR\n")
    assert import_object(f"{tmp_path}/first/mine.py:Mine", "algorithm.name").lr == 0
    with pytest.raises(
        UserError, match=r"imports rates_of_a_test, and Python takes .*first/rates_of_a_test\.py for it"
    ):
        import_object(f"{tmp_path}/second/mine.py:Mine", "algorithm.name")


def test_imports_for_type_checkers_are_not_made(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "types_of_a_test.py").write_text(f"# {folder}\n")
    (tmp_path / "one" / "mine.py").write_text("import types_of_a_test\nclass Mine: pass\n")
    (tmp_path / "two" / "mine.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import types_of_a_test\nclass Mine: pass\n"
    )
    classes = [import_object(f"{tmp_path}/{folder}/mine.py:Mine", "algorithm.name") for folder in ("one", "two")]
    assert classes[0] is not classes[1]


def test_a_module_without_a_file_and_one_of_a_library_beside_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    for name in ("made_by_hand", "numpy"):
        (tmp_path / f"{name}.py").write_text("1 / 0\n")
    (tmp_path / "mine.py").write_text("import made_by_hand\nimport numpy\nclass Mine:\n    size = numpy.int64(3)\n")
    assert import_object(f"{tmp_path}/mine.py:Mine", "algorithm.name").size == 3
