"""A mistake in the user's data, weights, model, algorithm or source is one line that says where it is."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_runs import done, refused
from safetensors.torch import save_file

from fedray import UserError, simulate
from fedray.cli.main import main
from fedray.data.sources.idx import FILES

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")


def test_data_and_its_picture(capsys):
    assert main(["data", "data.clients=4", "--plot", "who.png"]) == 0
    assert Path("who.png").read_bytes().startswith(b"\x89PNG")
    assert "4 clients with samples: " in capsys.readouterr().out
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
    ({"y_train": Y + 0.5}, ["task.kind=classification"], "y_train must hold whole numbers, not [0-3].5 as in row 0"),
    ({"y_train": Y[:-1]}, [], "x_train has 200 samples and y_train 199"),
    ({"y_train": None}, [], "lacks y_train"),
    ({"y_train": -Y}, [], "y_train has label -"),
    ({"y_train": np.where(np.arange(200) == 3, 10**12, Y)}, [], "label 1000000000000 in row 3, but there are 240"),
    ({"x_test": X[:0], "y_test": Y[:0]}, [], "x_test is empty"),
    ({"client_train": np.arange(20)}, NATURAL, "x_train has 200 samples and client_train 20"),
    ({"client_train": np.arange(200) % 3}, [*NATURAL, "train.cohort_size=4"], "more than the 3 clients"),
    ({}, ["model.name=lenet5"], "lenet5 can't be made for inputs .12.*it takes images"),
    (
        {"x_train": np.zeros((200, 20, 20, 3), np.uint8), "x_test": np.zeros((40, 20, 20, 3), np.uint8)},
        ["model.name=lenet5"],
        r"\[20, 20, 3\] \(channels come first: np.moveaxis\(x, -1, 1\)\)",
    ),
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
        (0, whole[0][:-20], "train-images-idx3-ubyte.gz is damaged or no idx file .*ended before"),
        (0, b"<html>", "train-images-idx3-ubyte.gz is no idx file"),
        (1, whole[0], "are files swapped"),
        (1, gzip.compress(idx(labels + 10)), "label 10 in row 0; labels must be 0..9"),
        (3, gzip.compress(idx(labels[:-1])), r"holds an array .40, 28, 28. and .* one .39., not images"),
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


CLIENT_ERROR = r"client [\d, ]*0[\d, ]* failed in phase train of round 1 on \S+\nTraceback .*users_things.*my own bug"


@pytest.mark.usefixtures("users")
def test_a_bug_in_a_client(capsys, ray_cluster):
    for kind in ("local", "ray"):
        own = ["algorithm.name=users_things:OwnBug", f"run.name={kind}", f"engine.kind={kind}"]
        done(*own, "engine.actors=1", "engine.cpus_per_actor=0.1", code=1)
        assert re.search(CLIENT_ERROR, capsys.readouterr().err, re.DOTALL)
        # the actors' own working directory is that in which Ray was started
        assert Path("runs", kind, "log.txt").exists()


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
        ("short.safetensors", "is damaged, or is not "),
        ("junk.pt", "is damaged, or is not "),
        ("shape.safetensors", r"linear.weight is \[10, 700\] in shape.safetensors, but \[10, 784\] in the model"),
        ("nan.safetensors", "linear.bias in nan.safetensors has numbers that are not finite"),
        ("list.pt", "must hold tensors by name"),
        ("nested.pt", "must hold tensors by name"),
        ("name.pt", "has no tensor 'linear.weight' .did you mean 'linear.weigth'"),
    ):
        assert re.search(message, refused(capsys, f"model.weights={name}"))


def test_simulate_raises_what_the_command_line_prints():
    with pytest.raises(UserError, match=r"did you mean 'train\.lr'"):
        simulate({"train.lrr": 1})
    with pytest.raises(UserError, match="the loss must give one value per sample"):
        simulate({"engine.kind": "local"}, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)),
                 loss=lambda logits, targets: logits.mean())  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fedavg", "moon", "mime"])
def test_a_target_that_the_loss_does_not_take_is_named(algorithm):
    """With its client and its item: in local steps, in passes for a loss of the algorithm's own, in full gradients."""
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(40, 6)), rng.normal(size=40), np.arange(40) // 8
    y[21] = 99

    def picky(outputs, targets):
        if (targets > 50).any():
            raise LookupError("beyond the table")
        return (outputs[:, 0] - targets).square()

    settings = {"engine.kind": "local", "algorithm.name": algorithm, "run.rounds": 1, "engine.vectorize": False}
    line = "item 21 of the training data, which client 2 holds: the loss does not take its target 99.0 (LookupError: "
    with pytest.raises(UserError, match=re.escape(line)):
        simulate(settings, data=(x, y, owner), test=(x[:6], y[:6]), model=small_model, loss=picky)


def small_model():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
