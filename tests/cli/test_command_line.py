"""What the command line says: the version, one of what there is, keys without their sign, help, and to a pipe's end."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

import fedray
from fedray.cli.main import COMMANDS, main
from fedray.models import MODELS
from fedray.models.bits import measured, promise

SETTINGS = {
    "algorithm.name": "fedavg", "model.name": "logistic", "engine.kind": "local", "run.rounds": 1, "data.clients": 2,
}  # fmt: skip
PROGRAM = [sys.executable, str(Path(fedray.__path__[0]) / "run.py")]
OWN = '''
import torch


class Small(torch.nn.Linear):
    """A linear model.

    Of one layer.
    """

    def __init__(self, input_shape, classes, bias: bool = True):
        super().__init__(input_shape[0], classes, bias)


def load():
    """Made of nothing."""
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # the width of the terminal that the tests are started in
    monkeypatch.delenv("COLUMNS", raising=False)
    Path("own.py").write_text(OWN)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    output = capsys.readouterr()
    return output.err if code else output.out


@pytest.mark.parametrize(
    "arguments", [["--version"], ["run", "--version"], ["keys", "--version"], ["tune", "--version"]]
)
def test_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fedray {fedray.__version__} (Python {platform.python_version()}, torch ")
    assert f"torch {torch.__version__.partition('+')[0]}, " in out
    assert f", {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}, " in out
    assert out.endswith(f", Ray {ray.__version__})\n")


def test_version_of_the_program() -> None:
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(f"fedray {fedray.__version__} (Python ")


def test_one_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    one = said(capsys, "algorithms", "fedprox")
    assert one.startswith("fedprox  (Li et al.")
    assert "algorithm.mu = 0.01" in one
    assert "fedavg" not in one
    assert one in said(capsys, "algorithms")
    models = said(capsys, "models", "lenet5", "mlp").splitlines()
    assert [line.split()[0] for line in models if line[0] != " "] == ["lenet5", "mlp"]
    assert said(capsys, "models", "lenet5") in said(capsys, "models")
    source = said(capsys, "datasets", "mnist")
    assert "MNIST" in source
    assert "Fashion" not in source
    assert "partitions" not in source
    partition = said(capsys, "datasets", "dirichlet")
    assert "data.partition.alpha" in partition
    assert "sources" not in partition


def test_one_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "models", "own.py:Small")
    assert shown.startswith(f"own.py:Small  ({promise('own.py:Small')})\n    A linear model.\n  model.bias = true")
    assert "Made of nothing." in said(capsys, "datasets", "own.py:load")
    assert "own.py has no 'Smal' (did you mean 'Small'?)" in said(capsys, "models", "own.py:Smal", code=2)


UNKNOWN = [
    (["algorithms", "fedporx"], "unknown algorithm 'fedporx' (did you mean 'fedprox'?)"),
    (["models", "lenet"], "unknown model 'lenet' (did you mean 'lenet5'?)"),
    (["datasets", "minst"], "there is no source and no partition 'minst' (did you mean 'mnist'?)"),
    (["datasets", "dirichelt"], "(did you mean 'dirichlet'?)"),
    (["algorithms", "--fedprox"], "unrecognized arguments: --fedprox"),
    (["run", "--seed", "3"], "unrecognized arguments: --seed (did you mean '--seeds'?)"),
    (["compare", "--outptu=here"], "unrecognized arguments: --outptu=here (did you mean '--output'?)"),
]


@pytest.mark.parametrize(("arguments", "words"), UNKNOWN)
def test_an_unknown_one(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in said(capsys, *arguments, code=2)


WITHOUT_SIGN = [
    (["run", "train.lr", "0.1"], "train.lr=0.1"),
    (["run", "a.yaml", "run.rounds=2", "train.lr", "0.1"], "train.lr=0.1"),
    (["run", "train.lr", "0.1", "a.yaml"], "train.lr=0.1"),
    (["run", "train.lr", "=", "0.1"], "train.lr=0.1"),
    (["run", "train.lr=", "0.1"], "train.lr=0.1"),
    (["run", "train.lr", "=0.1"], "train.lr=0.1"),
    (["run", "train.lr", "-0.1"], "train.lr=-0.1"),
    (["run", "--train.lr", "0.1"], "train.lr=0.1"),
    (["run", "--train.lr=0.1"], "train.lr=0.1"),
    (["run", "trian.lr", "0.1"], "train.lr=0.1"),
    (["run", "lr", "0.1"], "train.lr=0.1"),
    (["run", "name", "fedavg"], "run.name=fedavg or algorithm.name=fedavg or model.name=fedavg"),
    (["run", "algorithm.mu", "0.1"], "algorithm.mu=0.1"),
    (["run", "model.hidden", "[8]"], "model.hidden=[8]"),
    (["run", "train.lr"], "train.lr=..."),
    (["data", "data.clients", "4"], "data.clients=4"),
    (["costs", "data.clients", "4"], "data.clients=4"),
    (["tune", "fedavg", "tune.trials", "5"], "tune.trials=5"),
    (["tune", "fedavg", "train.lr", "0.1"], "train.lr=0.1"),
    (["tune", "fedavg", "trials", "5"], "tune.trials=5"),
]


@pytest.mark.parametrize(("arguments", "meant"), WITHOUT_SIGN)
def test_a_key_without_its_sign(capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str) -> None:
    assert f"(did you mean {meant}?)" in said(capsys, *arguments, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "name=x", "run.name=", "train.lr=0.1"],
        ["run", "run.name=", "a.yaml"],
        ["run", "--profile", "run.seed=3"],
    ],
)
def test_what_is_no_key_without_its_sign(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    Path("a.yaml").write_text("train: {lr: 0.1}\n")
    main([*arguments, "--print-config"])
    assert "one word" not in capsys.readouterr().err


def test_a_file_called_as_a_key_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.lr").write_text("train: {lr: 0.125}\n")
    assert "lr: 0.125" in said(capsys, "run", "train.lr", "--print-config")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > columns]
    if command in LISTS:
        main([command])
        assert not [line for line in capsys.readouterr().out.splitlines() if len(line) > columns]


LISTS = ("keys", "algorithms", "models", "datasets")


def test_what_is_piped_has_whole_lines() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run([*PROGRAM, "keys"], capture_output=True, text=True, timeout=60, env=environment)
    from fedray.config import documented_keys

    assert len(done.stdout.splitlines()) == len(list(documented_keys()))


@pytest.mark.parametrize("command", ["keys", "datasets", "run --help", "run algorithm.name=fedavg model.name=logistic "
                                     "engine.kind=local run.rounds=1 data.clients=2"])  # fmt: skip
def test_a_pipe_that_ends(command: str) -> None:
    """`| head -1` ends without a traceback, whether the rest was buffered or not."""
    line = f"{' '.join(PROGRAM)} {command} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    closed = subprocess.Popen([*PROGRAM, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert closed.stdout is not None
    assert closed.stderr is not None
    closed.stdout.close()
    assert closed.stderr.read() == ""
    closed.wait(120)


def test_an_output_without_room() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, "keys"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "fedray: can't write the output: no space left on the device\n")


def test_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


SMALL = {
    "algorithm.name": "fedavg", "model.name": "logistic", "engine.kind": "local", "run.rounds": 2, "data.clients": 3,
}  # fmt: skip


def test_simulate_shows_what_the_command_shows(capsys: pytest.CaptureFixture[str]) -> None:
    fedray.simulate(SMALL | {"run.output": "silent"})
    assert capsys.readouterr().out == ""
    fedray.simulate(SMALL, verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fedavg on sample: 3 clients")
    assert lines[1].startswith("round 1/2  loss")
    assert lines[-1].startswith("completed after 2 rounds, accuracy")
    command = said(capsys, "run", *(f"{key}={value}" for key, value in SMALL.items()), "run.output=command")
    assert [line.split(",")[0].split("  ")[0] for line in command.splitlines()[1:]] == [
        line.split(",")[0].split("  ")[0] for line in lines
    ]


def test_with_private_layers_the_accuracy_of_personal_models_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    keys = SMALL | {"algorithm.name": "fedper", "model.name": "mlp"}
    lines = said(capsys, "run", *(f"{key}={value}" for key, value in keys.items())).splitlines()
    assert any(line.startswith("the global model has initial values in its private layers") for line in lines)
    personal = lines[-2].partition("personal ")[2].split()[0]
    assert lines[-1].startswith(f"completed after 2 rounds, personal accuracy {personal}, accuracy of the global model")


@pytest.mark.slow
def test_tune_shows_what_the_command_shows(capsys: pytest.CaptureFixture[str], ray_cluster: None) -> None:
    from fedray.tuning import tune

    space = {"base": SMALL, "spaces": {"wide": {"train.lr": {"grid": [0.1]}}}, "tune": {"name": "one"}}
    tune(space, verbose=True)
    shown = capsys.readouterr().out
    assert "one: 1 trials of fedavg" in shown
    assert "trial 0 complete" in shown
    tune(space, ["tune.output=again"])
    assert capsys.readouterr().out == ""


def test_of_a_setting_that_is_given_twice_the_last_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--print-config", "data.clients=5", "model.name=logistic", "data.clients=6"]) == 0
    assert "clients: 6\n" in capsys.readouterr().out


def test_models_say_on_which_devices_bits_are_promised(capsys, monkeypatch):
    table = {
        "cpu": {"device": "a CPU of 2020", "torch": "2.11", "precisions": ["fp32", "bf16"], "models": {
            "lenet5": {"fp32": [], "bf16": []}, "mlp": {"fp32": ["put_ has none"], "bf16": ["put_ has none"]},
        }},
    }  # fmt: skip
    monkeypatch.setattr("fedray.models.bits.measured", lambda: table)
    shown = said(capsys, "models")
    assert "lenet5  (the same bits on a CPU: yes; a GPU: not measured)\n" in shown
    assert "mlp  (the same bits on a CPU: no (fp32, bf16: put_ has none); a GPU: not measured)\n" in shown
    assert "on a CPU measured on a CPU of 2020 with torch 2.11 in fp32, bf16; on a GPU not measured" in shown
    assert "a run on a GPU says before round 1" in said(capsys, "models", "torchvision:resnet34")


def test_the_table_of_bits_has_every_model():
    # a GPU is lent for a while only: `fedray models` says of which models nothing is known there
    assert measured()["cpu"]["models"].keys() >= MODELS.keys()
    for facts in measured().values():
        assert facts["models"].keys() <= MODELS.keys()
        assert all(own.keys() == set(facts["precisions"]) for own in facts["models"].values())


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "LOCKED/runs"],
        ["run", "model.weights=LOCKED/w.pt"],
        ["data", "LOCKED/images"],
        ["compare", "RUN", "--output", "LOCKED/comparison"],
    ],
)
def test_what_a_user_may_not_enter_is_one_line(arguments, tmp_path):
    locked, as_user = tmp_path / "locked", []
    locked.mkdir(mode=0)
    if not os.getuid():
        # root may enter everything, unless it gives that up
        os.chown(locked, 65534, 65534)
        as_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    words = [word.replace("LOCKED", str(locked)) for word in arguments]
    if "RUN" in words:
        done = fedray.simulate({**SETTINGS, "run.output": str(tmp_path), "run.name": "run"})
        words[words.index("RUN")] = str(done.folder)
    done = subprocess.run([*as_user, *PROGRAM, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "Permission denied" in done.stderr
    assert str(locked) in done.stderr


def test_the_output_of_a_page_is_a_file_or_folder_here(tmp_path, capsys):
    done = fedray.simulate({**SETTINGS, "run.output": str(tmp_path), "run.name": "run"})
    (tmp_path / "out").mkdir()
    assert main(["report", str(done.folder), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/report.html").is_file()
    for command in ("report", "compare", "evaluate"):
        assert main([command, str(done.folder), "--output", "s3://bucket/x"]) == 2
        assert "argument --output: s3://bucket/x is not on this machine" in capsys.readouterr().err
    assert not Path("s3:").exists()
