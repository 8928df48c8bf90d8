"""Whatever a user gets wrong: one line that says what, where and what would be right; nothing written is harmed."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from fedray import UserError, simulate
from fedray.cli import main
from fedray.config import dump_yaml, load, parse_yaml
from fedray.data.idx import FILES
from fedray.tracking.folder import RunFolder, read_metrics

FAST = ["engine.kind=local", "model.name=logistic", "algorithm.name=fedavg", "run.rounds=2", "run.name=run"]
PROGRAM = Path(sys.modules["fedray"].__path__[0]) / "run.py"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Tests run in a folder of their own, where `runs/` is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path / "nowhere"))


def refused(capsys, *arguments, command="run", base=FAST):
    """The one line on stderr of a command that must exit with code 2."""
    assert main([command, *base, *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("fedray: ")
    return lines[0].removeprefix("fedray: ")


def done(*arguments, code=0):
    assert main(["run", *FAST, *arguments]) == code


def hashes(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


KEYS = [
    ("trian.lr=1", "unknown key trian .did you mean 'train'"),
    ("train.lrr=1", "unknown key train.lrr .did you mean 'train.lr'"),
    ("Train.lr=1", "did you mean 'train'"),
    ("rounds=3", "did you mean 'run.rounds'"),
    ("train.rounds=3", "did you mean 'run.rounds'"),
    ("kind=iid", "did you mean 'data.partition.kind' or 'engine.kind'"),
    ("data.partition.apha=1", "did you mean 'data.partition.alpha'"),
    ("engine.gpus=1", r"unknown key engine.gpus \(there are: .*gpus_per_actor"),
    ("algorithm.mu=1", r"fedavg: unknown key algorithm.mu \(it has none"),
    ("algorithm.name=fedprox algorithm.muu=1", "fedprox: unknown key algorithm.muu .did you mean 'algorithm.mu'"),
    ("algorithm.name=fedprox algorithm.lr=1", "did you mean 'train.lr'"),
    ("model.hidden=[3]", r"logistic: unknown key model.hidden \(it has none"),
    ("model.name=mlp model.hiden=[3]", "did you mean 'model.hidden'"),
    ("train=3", "train is a section, as in train.local_steps"),
    ("data=mnist", "data is a section, as in data.source: ..., not 'mnist'"),
    ("algorithm=fedavg", "algorithm is a section, as in algorithm.name"),
    ("train.lr.x=1", "train.lr must be a number, not a section"),
    ("=3", "not of the form key=value"),
    ("run.rounds=ten", "run.rounds must be a whole number, not 'ten'"),
    ("run.rounds=2.5", "run.rounds must be a whole number, not 2.5"),
    ("run.rounds=true", "run.rounds must be a number, not true or false"),
    ("run.rounds=0", "run.rounds must be at least 1, not 0"),
    ("run.rounds=1e999", "run.rounds must be a finite number"),
    ("run.seed=-1", "run.seed must be at least 0, not -1"),
    ("data.seed=9223372036854775808", "data.seed must be below 9223372036854775808, not 9223372036854775808"),
    ("train.lr=0", "train.lr must be above 0, not 0"),
    ("train.lr=nan", "train.lr must be a finite number"),
    ("train.lr=[", "is not valid YAML: line 1, column 2"),
    ("run.rounds=010", "not valid YAML: line 1, column 1: 010 is a number in YAML 1.1 only: write 8, or put a text in"),
    ("run.rounds=1_000", "1_000 is a number in YAML 1.1 only: write 1000, or"),
    ("run.name=1:30", "1:30 is a number in YAML 1.1 only: write 90, or put a text in quotes"),
    ("run.seed=" + "9" * 5000, "a number is too long"),
    ("train.momentum=1", "train.momentum must be below 1, not 1"),
    ("train.batch_size=all", "train.batch_size must be a whole number or 'full', not 'all'$"),
    ("train.batch_size=0", "train.batch_size must be 'full' or at least 1, not 0"),
    ("train.precision=bf61", "must be 'fp32' or 'bf16', not 'bf61' .did you mean 'bf16'"),
    ("train.sampling=Uniform", "did you mean 'uniform'"),
    ("train.participation=2", "train.participation must be at most 1, not 2"),
    ("train.participation=.5 train.cohort_size=3", "train.cohort_size or train.participation, not both"),
    ("run.iterations=100", "run.rounds or run.iterations, not both"),
    ("run.targets=0.5", "run.targets must be a list, not 0.5"),
    ("run.targets=[0.5,abc]", r"run.targets\[1\] must be a number, not 'abc'"),
    ("run.resume=maybe", "run.resume must be 'auto' or true or false, not 'maybe'"),
    ("run.name=3", "run.name must be text, not 3: put it in quotes"),
    ("run.name=1e3", "run.name must be text, not 1000.0: put it in quotes"),
    ("run.name=a/b", "run.name must be the name of one folder, not 'a/b'; run.output"),
    ("run.name=../../x", "run.name must be the name of one folder"),
    ("run.name=..", "run.name must be the name of one folder"),
    ("run.name=" + "x" * 300, "run.name must be the name of one folder"),
    ('run.name="a\\0b"', "run.name must be the name of one folder"),
    ("engine.chunk=3", "engine.chunk must be auto or a power of two, not 3"),
    ("engine.threads=100000", "engine.threads must be at most 1024"),
    ("engine.gpus_per_actor=0.18", "use engine.actors_per_gpu=5"),
    ("engine.kind=lcoal", "engine.kind must be 'ray' or 'local', not 'lcoal' .did you mean 'local'"),
    ("algorithm.name=fedavgg", "unknown algorithm 'fedavgg' .did you mean 'fedavg'"),
    ("algorithm.name=zzz", "unknown algorithm 'zzz' .there are: .*fedavg, "),
    ("algorithm.name=fedprox algorithm.mu=-1", "algorithm.mu must be at least 0, not -1"),
    ("algorithm.name=pfedmo algorithm.form=veloctiy", "did you mean 'velocity'"),
    ("algorithm.name=pfedmo data.public_samples=0", "trains a model on a public set; use auto"),
    ("model.name=lenet", "unknown model 'lenet' .did you mean 'lenet5'"),
    ("model.name=mlp model.hidden=100", "hidden must be a list of positive whole numbers, not 100"),
    ("algorithm.name=moon model.head=none", "moon needs a head with a projection, such as moon; use auto"),
    ("algorithm.name=moon model.name=logistic", "model logistic has no representation"),
    ("data.source=mnits", "no source 'mnits' .did you mean 'mnist'"),
    ("data.source=npz", "npz needs data.root"),
    ("data.partition.kind=dirichelt", "no partition 'dirichelt' .did you mean 'dirichlet'"),
    (
        "data.partition.kind=iid data.partition.alpha=1",
        "does not apply to data.partition.kind=iid; it does to dirichlet",
    ),
    ("data.partition.kind=label_skew data.partition.classes_per_client=11", "more than the 10 classes"),
    ("data.partition.kind=natural", "needs a source that says whose each sample is"),
    ("data.partition.alpha=0.001 data.clients=60", "some client always had fewer than 1 samples"),
    ("data.clients=20000", "can't give data.clients=20000 at least 1 each"),
    ("train.cohort_size=50", "more than the 20 clients that have samples"),
    ("data.public_samples=10000", "leave none of the 10000 training samples"),
    ("run.eval_train_samples=100000", "the clients have 10000"),
]


@pytest.mark.parametrize(("arguments", "message"), KEYS)
def test_keys_and_values(arguments, message, capsys):
    assert re.search(message, refused(capsys, *arguments.split(" ")))
    assert not Path("runs").exists()


CONFIGS = [
    (None, "can't read the config file c.yaml: No such file"),
    (b"a: [1\nb: 2", "c.yaml is not valid YAML: line 2, column 2"),
    (b"train:\n\tlr: 1\n", "c.yaml is not valid YAML: line 2, column 1"),
    (b"- 1\n- 2\n", "c.yaml must hold sections"),
    (b"hello", "c.yaml must hold sections"),
    (b"\xff\xfe\x00abc", "c.yaml is not a text file: a config is YAML in UTF-8"),
    (b"train:\n  lr: 0.1\n  lr: 0.2\n", "line 3, column 3: key 'lr' is given twice"),
    (b"? [1, 2]\n: 3\n", "c.yaml is not valid YAML: line 1"),
    (b"a: " + b"[" * 5000, "c.yaml is nested too deeply"),
    (b"train: &t\n  sub: *t\n", "c.yaml is nested too deeply"),
    (b"train: 3\ntrain.lr: 0.1\n", "train.lr is below train, which has a value already"),
    (b"train: {lrr: 1}", "c.yaml: unknown key train.lrr .did you mean 'train.lr'"),
    (b"a: 1\n---\nb: 2\n", "c.yaml is not valid YAML"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_config_files(content, message, capsys):
    if content is not None:
        Path("c.yaml").write_bytes(content)
    assert re.search(message, refused(capsys, "c.yaml"))


def test_a_users_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"train\.lr must be above 0, not -1"):
        simulate({"train.lr": -1})


def test_more_config_files(capsys):
    Path("folder.yaml").mkdir()
    assert "Is a directory" in refused(capsys, "folder.yaml")
    assert "one config file at most, not a.yaml and b.yaml" in refused(capsys, "a.yaml", "b.yaml")


def test_what_yaml_may_look_like():
    """1e-3 is a number, an empty section is none, a date is text, and what is dotted is nested."""
    Path("c.yaml").write_text(
        "train:\nrun: {rounds: 1e3, name: 2024-01-01}\ntrain.lr: 1e-3\ndata.partition:\n  alpha: 1\n"
    )
    config = load("c.yaml", ["train.momentum=5e-1"])
    assert (config.run.rounds, config.run.name) == (1000, "2024-01-01")
    assert (config.train.lr, config.train.momentum, config.data.partition.alpha) == (1e-3, 0.5, 1)


NUMBERS = {
    "1e3": 1000.0, "-1E-3": -0.001, "-.5": -0.5, "2.": 2.0, "0x1f": 31, "0o17": 15, "08": 8, "-12": -12, "1e": "1e",
    "-0o7": "-0o7", ".inf": math.inf, "yes": True, "Off": False, "~": None, "'1e3'": "1e3", "2024-01-01": "2024-01-01",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_those_of_yaml_1_2(text, value):
    """What is read is written so that both versions of YAML read the same again."""
    read = parse_yaml(text)
    assert (type(read), read) == (type(value), value)
    written = dump_yaml({"key": value})
    assert parse_yaml(written) == yaml.safe_load(written) == {"key": value}


def test_commands(capsys):
    for arguments, message in (
        (["rnu"], "no command 'rnu' .did you mean 'run'"),
        (["c.yaml"], "did you mean 'fedray run c.yaml'"),
        (["run", "--foo"], "unrecognized arguments: --foo; see fedray --help"),
        (["run", "run.rounds=1", "--foo", "train.lr=1"], "unrecognized arguments: --foo; see fedray --help"),
        (["keys", "lenet5"], "unrecognized arguments: lenet5; see fedray --help"),
        (["data", "--plot"], "argument --plot: expected one argument; see fedray data --help"),
    ):
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert re.search(message, lines[0])


def test_helps_and_lists(capsys):
    for command in ("run", "data", "keys", "algorithms", "models", "datasets"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: fedray {command}")
        assert command != "run" or "train.momentum = 0.0" in text
    for command, pieces in {
        "keys": ["train.lr = 0.01", "client learning rate eta_l", "[a number > 0]", "data.partition.kind = auto"],
        "algorithms": ["fedprox  (Li et al., MLSys 2020", "algorithm.mu = 0.01", "[a number >= 0]"],
        "models": ["lenet5", "model.hidden"],
        "datasets": [
            "mnist",
            "free for research",
            "data.partition.classes_per_client",
            "data.normalization=ghbm: the dev",
        ],
    }.items():
        assert main([command]) == 0
        text = capsys.readouterr().out
        assert all(piece in text for piece in pieces), command


def test_data_and_its_picture(capsys):
    assert main(["data", "data.clients=4", "--plot", "who.png"]) == 0
    assert Path("who.png").read_bytes().startswith(b"\x89PNG")
    assert "4 clients, 9,000 samples" in capsys.readouterr().out
    assert "No such file" in refused(capsys, "--plot", "no/such/who.png", command="data", base=[])
    assert "not supported" in refused(capsys, "--plot", "who.foo", command="data", base=[])
    assert "unknown key trian" in refused(capsys, "trian=1", command="data", base=[])


def arrays(**changes):
    rng = np.random.default_rng(0)
    given = {
        "x_train": rng.normal(size=(200, 12)).astype(np.float32), "y_train": rng.integers(0, 4, 200),
        "x_test": rng.normal(size=(40, 12)).astype(np.float32), "y_test": rng.integers(0, 4, 40),
    } | changes  # fmt: skip
    return {key: value for key, value in given.items() if value is not None}


X, Y = arrays()["x_train"], arrays()["y_train"]
NATURAL = ["data.partition.kind=natural"]
NPZ = [
    ({"x_train": np.where(np.arange(200)[:, None] == 3, np.nan, X).astype(np.float32)}, [], "x_train has NaN in row 3"),
    ({"y_train": Y + 0.5}, [], "y_train must hold whole numbers, not [0-3].5 as in row 0"),
    ({"y_train": Y[:-1]}, [], "x_train has 200 samples and y_train 199"),
    ({"y_train": None}, [], "lacks y_train"),
    ({"y_train": -Y}, [], "y_train has label -"),
    ({"y_train": np.where(np.arange(200) == 3, 10**12, Y)}, [], "label 1000000000000 in row 3, but there are 240"),
    ({"x_test": X[:0], "y_test": Y[:0]}, [], "x_test is empty"),
    ({"client_train": np.arange(20)}, NATURAL, "x_train has 200 samples and client_train 20"),
    ({"client_train": np.arange(200) % 3}, [*NATURAL, "train.cohort_size=4"], "more than the 3 clients"),
    ({}, ["model.name=lenet5"], "lenet5 can't be made for inputs .12.*it takes images"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "more", "message"), NPZ)
def test_data_of_ones_own(changes, more, message, capsys):
    np.savez("mine.npz", **arrays(**changes))
    line = refused(capsys, "data.source=npz", "data.root=mine.npz", "data.clients=4", *more)
    assert re.search(message, line)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def test_damaged_mnist_files(tmp_path, capsys):
    images, labels = np.zeros((40, 28, 28), np.uint8), np.arange(40, dtype=np.uint8) % 10
    folder = tmp_path / "mnist"
    folder.mkdir()
    whole = [gzip.compress(idx(array)) for array in (images, labels, images, labels)]
    for broken, content, message in (
        (None, None, "lacks train-images-idx3-ubyte"),
        (0, whole[0][:-20], "train-images-idx3-ubyte.gz is truncated"),
        (0, b"<html>", "train-images-idx3-ubyte.gz is not an idx file"),
        (1, whole[0], "are the image and the label file swapped"),
        (1, gzip.compress(idx(labels + 10)), "label 10 in row 0; labels must be 0..9"),
        (3, gzip.compress(idx(labels[:-1])), "holds 40 images, but .* 39 labels"),
    ):
        for number, name in enumerate(FILES):
            if broken is not None:
                (folder / f"{name}.gz").write_bytes(content if number == broken else whole[number])
        assert re.search(message, refused(capsys, "data.source=mnist", f"data.root={folder}"))


USERS = """
import torch
from fedray.algorithms.fedavg import FedAvg
class Good(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.l = torch.nn.Linear(784, classes)
    def forward(self, x): return self.l(x.flatten(1))
class Narrow(Good):
    def forward(self, x): return super().forward(x)[:, :3]
class Pair(Good):
    def forward(self, x): return super().forward(x), 1
class Training(Good):
    def forward(self, x):
        if self.training: raise RuntimeError("boom")
        return super().forward(x)
class Small(Good):
    def __init__(self, classes):
        super().__init__(classes)
        self.l = torch.nn.Linear(5, classes)
class Raising(torch.nn.Module):
    def __init__(self): raise RuntimeError("two\\nlines")
class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.LazyLinear(10)
class MeanLoss(Good):
    @staticmethod
    def task_loss(logits, targets): return torch.nn.functional.cross_entropy(logits, targets)
class FloatLoss(Good):
    @staticmethod
    def task_loss(logits, targets): return 3.0
class RaisingLoss(Good):
    @staticmethod
    def task_loss(logits, targets): raise ValueError("boom")
class Demanding(FedAvg):
    class Hyper(FedAvg.Hyper):
        mu: float
class OwnBug(FedAvg):
    def step(self, client, carry, batch): raise ValueError("my own bug")
class BadMaker(FedAvg):
    def __init__(self, hyper): raise ValueError("boom")
number = 3
def source(): raise KeyError("boom")
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_things.py").write_text(USERS)
    (tmp_path / "users_raising.py").write_text("raise RuntimeError('boom')")
    (tmp_path / "users_exiting.py").write_text("raise SystemExit(0)")
    (tmp_path / "users_needing.py").write_text("import no_such_library")
    (tmp_path / "users_misspelt.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("users_things", None)


ANY = [
    ("users_nothing:X", "can't import 'users_nothing': no such module is on the import path"),
    ("users_raising:X", r"can't import 'users_raising': RuntimeError: boom \(users_raising.py, line 1\)"),
    ("users_exiting:X", "can't import 'users_exiting': SystemExit: 0"),
    ("users_needing:X", "can't import 'users_needing': ModuleNotFoundError: No module named 'no_such_library'"),
    ("users_misspelt:X", "can't import 'users_misspelt': SyntaxError"),
    ("users_things:Goood", "module users_things has no 'Goood' .did you mean 'Good'"),
    ("./things.py:Good", "can't read the file .*things.py: No such file"),
    ("no module:Good", "is not of the form file.py:Name or module:Name"),
]
OWN = [(f"{key}={name}", message) for key in ("model.name", "algorithm.name", "data.source") for name, message in ANY]
OWN += [
    (f"model.name=users_things:{name}", message)
    for name, message in [
        ("number", "is not a class or function that makes a model, but int"),
        ("source", "can't be made .*KeyError: 'boom'"),
        ("Narrow", r"must give logits \[b, 10\], not \[b, 3\]"),
        ("Pair", "must give logits .* a tensor, not tuple"),
        ("Training", "failed in training mode: RuntimeError: boom"),
        ("Small", r"can't take inputs of shape \[1, 28, 28\]"),
        ("Raising", r"RuntimeError: two lines \(users_things.py, line"),
        ("Lazy", "has lazy layers"),
        ("MeanLoss", "the loss must give one value per sample"),
        ("FloatLoss", "the loss must give one value per sample, a tensor .b., not float"),
        ("RaisingLoss", "the loss failed on .*ValueError: boom"),
    ]
]
OWN += [
    ("algorithm.name=users_things:number", "is not a subclass of fedray.algorithms.Algorithm"),
    ("algorithm.name=users_things:Good", "is not a subclass of fedray.algorithms.Algorithm"),
    ("algorithm.name=users_things:BadMaker", "can't be made: ValueError: boom"),
    ("algorithm.name=users_things:Demanding", "algorithm.mu must be given: a number"),
    ("data.source=users_things:number", "is not a function but int"),
    ("data.source=users_things:source", "failed: KeyError: 'boom' .users_things.py, line"),
]


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(("argument", "message"), OWN)
def test_users_own_code(argument, message, capsys):
    assert re.search(message, refused(capsys, argument))


def test_weights(tmp_path, capsys):
    good = {"linear.weight": torch.zeros(10, 784), "linear.bias": torch.zeros(10)}
    save_file(good, "good.safetensors")
    done("model.weights=good.safetensors")
    content = Path("good.safetensors").read_bytes()
    Path("short.safetensors").write_bytes(content[:1000])
    Path("junk.pt").write_bytes(b"junk")
    save_file({**good, "linear.weight": torch.zeros(10, 700)}, "shape.safetensors")
    save_file({**good, "linear.bias": torch.full((10,), torch.nan)}, "nan.safetensors")
    torch.save([1, 2], "list.pt")
    torch.save({"state_dict": good}, "nested.pt")
    torch.save({"linear.weigth": good["linear.weight"], "linear.bias": good["linear.bias"]}, "name.pt")
    for name, message in (
        ("none.safetensors", "can't read none.safetensors: No such file"),
        ("short.safetensors", "is not a weights file"),
        ("junk.pt", "is not a weights file"),
        ("shape.safetensors", r"linear.weight is \[10, 700\] in shape.safetensors, but \[10, 784\] in the model"),
        ("nan.safetensors", "linear.bias in nan.safetensors has numbers that are not finite"),
        ("list.pt", "must hold tensors by name"),
        ("nested.pt", "must hold tensors by name"),
        ("name.pt", "has no tensor 'linear.weight' .did you mean 'linear.weigth'"),
    ):
        assert re.search(message, refused(capsys, f"model.weights={name}"))


def test_unwritable_output(tmp_path, capsys):
    Path("file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below", "/proc/fedray", "/dev/null"):
        assert f"can't write to run.output={output}" in refused(capsys, f"run.output={output}")
    Path("runs").mkdir()
    Path("runs/run").write_text("mine")
    assert "exists and is not a run folder" in refused(capsys)
    Path("runs/other").mkdir()
    Path("runs/other/notes.txt").write_text("mine")
    assert "exists and is not a run folder" in refused(capsys, "run.name=other")
    assert (
        Path("runs/run").read_text() == Path("file").read_text() == Path("runs/other/notes.txt").read_text() == "mine"
    )


def test_resume(capsys, monkeypatch):
    assert "run.resume=true, but there is no run" in refused(capsys, "run.resume=true")
    done()
    before = hashes("runs/run")
    with monkeypatch.context() as patched:
        patched.setattr("ray.init", None)
        began = time.monotonic()
        done("engine.kind=ray")
        done("engine.kind=ray", "run.resume=true")
        assert time.monotonic() - began < 5
    assert "is finished already" in capsys.readouterr().out
    line = refused(capsys, "train.lr=0.5", "train.momentum=0.5")
    assert "holds another run (train.lr, train.momentum differ): use run.resume=false" in line
    assert "run.rounds differs" in refused(capsys, "run.rounds=1")
    assert hashes("runs/run") == before
    done("run.rounds=4")
    done("run.rounds=4", "run.output=straight")
    extended, straight = (read_metrics(Path(folder)) for folder in ("runs/run", "straight/run"))
    assert list(extended["test_loss"]) == list(straight["test_loss"])
    model = "run/model.safetensors"
    assert Path("runs", model).read_bytes() == Path("straight", model).read_bytes()
    before = hashes("runs/run")
    done("train.lr=0.5", "run.resume=false")
    assert list(hashes("runs/run.bak-1").values()) == list(before.values())
    assert len(read_metrics(Path("runs/run"))) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four rounds with checkpoints of the last two."""
    output = tmp_path_factory.mktemp("finished")
    assert main(["run", *FAST, "run.rounds=4", "run.checkpoint_every=1", f"run.output={output}"]) == 0
    return output / "run"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


EXTEND = ["run.rounds=6", "run.checkpoint_every=1"]
DAMAGES = [
    lambda last: flip(last / "server.safetensors"),
    lambda last: flip(last / "record.json"),
    lambda last: (last / "server.safetensors").unlink(),
    lambda last: (last / "checksums.json").write_text("{}"),
    lambda last: (last / "checksums.json").write_text("[]"),
    lambda last: (shutil.rmtree(last), last.mkdir()),
]


def test_damaged_checkpoints(finished, capsys):
    shutil.copytree(finished, "runs/run")
    done(*EXTEND)
    whole = Path("runs/run/model.safetensors").read_bytes()
    for damage in DAMAGES:
        shutil.rmtree("runs/run")
        shutil.copytree(finished, "runs/run")
        damage(Path("runs/run/checkpoints/round-00000004"))
        done(*EXTEND)
        log = Path("runs/run/log.txt").read_text()
        assert re.search(r"checkpoint \S*round-00000004 is damaged \(.*\); trying the one before it", log)
        assert Path("runs/run/model.safetensors").read_bytes() == whole
        assert len(read_metrics(Path("runs/run"))) == 6
    shutil.rmtree("runs/run")
    shutil.copytree(finished, "runs/run")
    for path in Path("runs/run/checkpoints").glob("round-*"):
        flip(path / "server.safetensors")
    before = hashes("runs/run")
    capsys.readouterr()
    line = refused(capsys, *EXTEND)
    assert "is damaged" in line
    assert "no other is left: use run.resume=false to start over" in line
    assert hashes("runs/run") == before
    shutil.rmtree("runs/run/checkpoints")
    assert "has no checkpoint to go on from" in refused(capsys, *EXTEND)


def test_other_damage_in_a_run_folder(finished, capsys):
    for name, content, message in (
        ("config.yaml", b"a: [", "config.yaml is damaged: use run.resume=false"),
        ("config.yaml", b"run: 3", "config.yaml is damaged"),
        ("config.yaml", b"\xff\xfe", "config.yaml is damaged"),
        ("summary.json", b"{", "summary.json is damaged"),
        ("summary.json", b"[]", "summary.json is damaged"),
        ("summary.json", b'{"status": "completed", "rounds": 4}', "summary.json is damaged"),
    ):
        shutil.rmtree("runs/run", ignore_errors=True)
        shutil.copytree(finished, "runs/run")
        Path("runs/run", name).write_bytes(content)
        before = hashes("runs/run")
        assert message in refused(capsys, *EXTEND)
        assert hashes("runs/run") == before
    shutil.rmtree("runs/run")
    shutil.copytree(finished, "runs/run")
    Path("runs/run/metrics.csv").write_bytes(b"\xff\xfe garbage")
    done(*EXTEND)
    assert "warning: metrics.csv lacks 4 of the rows" in Path("runs/run/log.txt").read_text()


def test_two_runs_in_one_folder():
    folder = RunFolder(load({"run.name": "run"}), {})
    said: list[str] = []
    again = RunFolder(folder.config, {}).lock(said.append, patience=0.3)
    ours = rf"process {os.getpid()} on .*"
    with (
        folder.lock(said.append),
        pytest.raises(UserError, match=rf"is being written by another run; choose another run\.name \({ours}\)"),
        again,
    ):
        pass
    (line,) = said
    assert re.fullmatch(rf"runs/run is in use by {ours}; waiting up to 0\.3 s for it to end \.\.\.", line)


def test_divergence_keeps_what_there_is(capsys):
    done("model.name=linear", "train.lr=1e6", "run.rounds=20", code=3)
    assert "diverged after" in capsys.readouterr().out
    metrics = read_metrics(Path("runs/run"))
    assert 1 <= len(metrics) < 20
    assert yaml.safe_load(Path("runs/run/summary.json").read_text())["status"] == "diverged"
    done("model.name=linear", "train.lr=1e6", "run.rounds=20", code=3)
    assert len(read_metrics(Path("runs/run"))) == len(metrics)
    # losses beyond what TensorBoard can draw are still finite
    done("run.name=huge", "train.lr=1e25")


CLIENT_ERROR = r"client [\d, ]*0[\d, ]* failed in phase train of round 1 on \S+\nTraceback .*users_things.*my own bug"


@pytest.mark.usefixtures("users")
def test_a_bug_in_a_client(capsys, ray_cluster):
    for kind in ("local", "ray"):
        own = ["algorithm.name=users_things:OwnBug", f"run.name={kind}", f"engine.kind={kind}"]
        done(*own, "engine.actors=1", "engine.cpus_per_actor=0.1", code=1)
        assert re.search(CLIENT_ERROR, capsys.readouterr().err, re.DOTALL)
        # the actors' own working directory is that in which Ray was started
        assert Path("runs", kind, "log.txt").exists()


def test_what_the_cluster_lacks(capsys, ray_cluster):
    ray = ["engine.kind=ray", "engine.start_timeout=2"]
    line = refused(capsys, *ray, "engine.actors=2", "engine.cpus_per_actor=50")
    assert re.search("engine.actors=2 of 50 CPU each; the cluster has 4 CPU .*did not start in 2 s", line)
    assert "engine.server_cpus=64" in refused(capsys, *ray, "engine.server_cpus=64", "engine.cpus_per_actor=0.1")
    line = refused(capsys, *ray, "engine.device=cuda")
    assert re.search("1 CPU and 1 GPU each; the cluster has 4 CPU .*, 0 GPU .*in 2 s; engine.device=cpu needs no", line)
    assert not Path("runs/run").exists()


def command(*arguments):
    return [sys.executable, str(PROGRAM), *FAST, *arguments]


def test_no_cluster_and_no_gpu():
    """A Ray of its own: what it lacks is said at once; an address where nobody listens is no reason to wait."""
    ours = command("engine.kind=ray", "engine.gpus_per_actor=1000", "engine.address=local")
    ended = subprocess.run(ours, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert re.fullmatch(r"fedray: engine.actors=1 of 1 CPU and 1000 GPU each; the cluster has .*\n", ended.stderr)
    began = time.monotonic()
    ended = subprocess.run(
        command("engine.kind=ray", "engine.address=127.0.0.1:1"), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2
    assert re.fullmatch("fedray: no Ray cluster answers at engine.address=127.0.0.1:1: .*\n", ended.stderr)
    assert time.monotonic() - began < 30


LONG = ["run.rounds=40", "run.eval_every=20", "data.clients=4", "run.checkpoint_every=1000", "train.local_steps=40"]


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_interrupted(kind, capsys):
    """Ctrl-C ends a run after its round; the same command then ends with the bits of an unbroken run."""
    done(*LONG, "run.output=whole")
    engine = [f"engine.kind={kind}", "engine.address=local", "engine.actors=1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command(*LONG, *engine), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    watchdog = threading.Timer(100, process.kill)
    watchdog.start()
    assert process.stdout is not None
    shown = process.stdout.readline()
    first = time.monotonic() - began
    while "round 1/40" not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    watchdog.cancel()
    assert process.returncode == 130, errors
    assert errors == ""
    assert shown.startswith("fedray: loading ...")
    assert first < 3, "nothing was on the screen for too long"
    assert "interrupted after" in output
    assert "to go on, give the same command again" in output
    assert yaml.safe_load(Path("runs/run/summary.json").read_text())["status"] == "interrupted"
    assert list(Path("runs/run/checkpoints").glob("round-*"))
    assert len(read_metrics(Path("runs/run"))) < 40
    done(*LONG)
    sums = [yaml.safe_load(Path(f, "run/summary.json").read_text())["model_sha256"] for f in ("runs", "whole")]
    assert sums[0] == sums[1]


def test_simulate_raises_what_the_command_line_prints():
    with pytest.raises(UserError, match=r"did you mean 'train\.lr'"):
        simulate({"train.lrr": 1})
    with pytest.raises(UserError, match="the loss must give one value per sample"):
        simulate({"engine.kind": "local"}, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)),
                 loss=lambda logits, targets: logits.mean())  # fmt: skip
