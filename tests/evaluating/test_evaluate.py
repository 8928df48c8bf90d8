"""fedray evaluate: the same numbers as in the run, and as numpy and plain PyTorch find them; files; mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedray
from fedray import UserError, evaluate, simulate
from fedray.cli.main import main
from fedray.evaluating.evaluation_files import write

rng = np.random.default_rng(4)
X = rng.normal(size=(300, 6)).astype(np.float32)
Y = (X[:, :3].argmax(1) + (rng.random(300) < 0.2)) % 3
SETTINGS: dict[str, Any] = {
    "algorithm.name": "fedavg", "engine.kind": "local", "run.rounds": 8, "train.lr": 0.3, "data.clients": 6,
    "data.partition.alpha": 1, "run.eval_clients": "all",
}  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedray.RunResult:
    folder = tmp_path_factory.mktemp("runs")
    keys = {**SETTINGS, "run.output": str(folder), "run.save_best": True, "data.validation_samples": 20}
    return simulate(keys, data=(X[:200], Y[:200]), test=(X[200:], Y[200:]), model=network)


def evaluated(trained: fedray.RunResult, split: str = "test") -> fedray.Evaluation:
    return evaluate(trained.folder, split=split, data=(X[:200], Y[:200]), test=(X[200:], Y[200:]), model=network)


def test_the_numbers_are_those_of_the_run(trained):
    found, last = evaluated(trained), trained.metrics.iloc[-1]
    assert found.metrics["accuracy"] == last["test_accuracy"]
    assert found.metrics["loss"] == pytest.approx(last["test_loss"], rel=1e-12)
    assert found.model_sha256 == trained.summary["model_sha256"]
    assert found.samples == 100
    scores = trained.evaluation[trained.evaluation["round"] == 8].set_index("client")
    of_clients = found.clients.set_index("client")
    assert of_clients["samples"].to_dict() == scores.loc[of_clients.index, "test_samples"].to_dict()
    assert of_clients["accuracy"].to_dict() == scores.loc[of_clients.index, "global_accuracy"].to_dict()
    validation = evaluated(trained, "validation")
    assert validation.metrics["accuracy"] == last["validation_accuracy"]
    assert validation.samples == 20
    assert validation.clients is None


def test_classes_against_numpy(trained):
    found = evaluated(trained)
    with torch.no_grad():
        predicted = trained.model()(torch.from_numpy(X[200:])).argmax(1).numpy()
    real = Y[200:]
    expected = np.array([[((real == t) & (predicted == p)).sum() for p in range(3)] for t in range(3)])
    np.testing.assert_array_equal(found.confusion_matrix().to_numpy(), expected)
    for row in found.classes.itertuples():
        of_class, taken = real == row[1], predicted == row[1]
        assert row.samples == of_class.sum()
        assert row.accuracy == pytest.approx((taken & of_class).sum() / of_class.sum())
        assert row.precision == pytest.approx((taken & of_class).sum() / taken.sum())
        assert row.f1 == pytest.approx(2 / (1 / row.accuracy + 1 / row.precision))


def test_the_train_split_is_what_clients_hold(trained):
    found = evaluated(trained, "train")
    assert found.samples == 180
    assert found.clients["samples"].sum() == 180
    mean = np.average(found.clients["accuracy"], weights=found.clients["samples"])
    assert mean == pytest.approx(found.metrics["accuracy"])


def test_a_file_in_the_runs_folder_is_read_by_its_configuration(trained):
    best = trained.folder / "model-best.safetensors"
    found = evaluate(best, data=(X[:200], Y[:200]), test=(X[200:], Y[200:]), model=network)
    rows = trained.metrics
    assert found.metrics["accuracy"] == rows["test_accuracy"][rows["validation_accuracy"].idxmax()]
    assert found.folder == trained.folder / "model-best-evaluations"


def test_a_file_from_elsewhere(trained, tmp_path):
    """A state_dict that torch has saved, with own names of classes and clients, on samples that the run never saw."""
    torch.save(trained.model().state_dict(), tmp_path / "mine.pt")
    names, owners = np.array(["north", "east", "south"]), np.array(["b", "a"])
    fresh = rng.normal(size=(50, 6)).astype(np.float32)
    labels = fresh[:, :3].argmax(1)
    table = pd.DataFrame({f"x{i}": fresh[:, i] for i in range(6)})
    table["label"], table["client"] = names[labels], owners[np.arange(50) % 2]
    found = evaluate(tmp_path / "mine.pt", data=table, test=table, model=network)
    # names are numbered in the order of the alphabet
    assert found.classes["name"].tolist() == ["east", "north", "south"]
    assert found.clients["client_name"].tolist() == ["a", "b"]
    with torch.no_grad():
        predicted = trained.model()(torch.from_numpy(fresh)).argmax(1).numpy()
    numbers = np.argsort(np.argsort(names))[labels]
    assert found.metrics["accuracy"] == pytest.approx((predicted == numbers).mean())


@pytest.fixture(scope="module")
def on_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the command line can evaluate: its model and its data have names."""
    folder = tmp_path_factory.mktemp("named")
    keys = {
        **SETTINGS,
        "run.output": str(folder),
        "run.rounds": 2,
        "algorithm.name": "pfedmo",
        "model.name": "logistic",
    }
    return simulate({**keys, "data.clients": 4}).folder


def test_a_damaged_summary_is_told(on_sample, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(on_sample, folder)
    (folder / "summary.json").write_text("{")
    assert main(["evaluate", str(folder)]) == 2
    assert capsys.readouterr().err.strip().endswith("summary.json is damaged")


def test_command(on_sample, capsys):
    """Also of an algorithm that trains on a public set, which stays set aside."""
    assert main(["evaluate", str(on_sample)]) == 0
    out = capsys.readouterr().out
    summary = json.loads((on_sample / "summary.json").read_text())
    assert f"accuracy {summary['final_accuracy']:.4f}" in out
    assert "4 clients: mean accuracy" in out
    folder = on_sample / "evaluations" / "sample-test"
    assert {path.name for path in folder.iterdir()} == {
        "evaluation.json", "classes.csv", "clients.csv", "confusion.csv", "confusion.png"
    }  # fmt: skip
    facts = json.loads((folder / "evaluation.json").read_text())
    assert facts["metrics"]["accuracy"] == summary["final_accuracy"]
    assert facts["model_sha256"] == summary["model_sha256"]
    confusion = pd.read_csv(folder / "confusion.csv", index_col=0)
    assert confusion.to_numpy().trace() == round(summary["final_accuracy"] * 2000)
    assert (confusion.sum(axis=1) == 200).all()
    assert len(pd.read_csv(folder / "clients.csv")) == 4
    assert main(["evaluate", str(on_sample), "--split", "train"]) == 0
    assert (on_sample / "evaluations" / "sample-train" / "classes.csv").exists()


def test_another_source(on_sample, tmp_path, capsys):
    """The settings of the run's data are not those of another source, except how large images are."""
    rows = ["a,b,target", "1,2,0", "3,4,1", "2,2,0", "5,1,1"]
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("\n".join(rows))
    torch.save({f"linear.{k}": v for k, v in nn.Linear(2, 2).state_dict().items()}, tmp_path / "linear.pt")
    words = ["data.source=csv", f"data.root={tmp_path}", "model.name=logistic", "data.clients=2"]
    code = main(
        ["evaluate", str(tmp_path / "linear.pt"), *words, "data.partition.kind=iid", "--output", str(tmp_path / "o")]
    )
    assert code == 0, capsys.readouterr().err
    assert "4 test samples of csv" in capsys.readouterr().out
    assert main(["evaluate", str(on_sample), *words[:2], "data.clients=2", "data.partition.kind=iid"]) == 2
    captured = capsys.readouterr()
    assert re_line("the model in .*model.safetensors has 10 classes, but the targets of csv have 2$", captured.err)


def re_line(pattern: str, text: str) -> bool:
    return len(text.splitlines()) == 1 and re.search(pattern, text) is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a run's folder or a model's file"),
        (["{run}", "one.yaml", "two.yaml"], "one config file at most; not"),
        (["nowhere"], "there is no run folder or file nowhere"),
        (["{empty}"], "is not the folder of a run: it has no config.yaml"),
        (["{run}", "train.lr=1"], "train.lr: an evaluation trains nothing; it takes data.*"),
        (["{run}", "data.sorce=mnist"], "unknown key data.sorce (did you mean 'data.source'?)"),
        (["{run}", "--split", "tset"], "invalid choice: 'tset'"),
        (
            ["{run}", "--split", "validation"],
            "sample has no validation samples: data.validation_samples sets some aside",
        ),
        (["{run}", "--output", "{run}"], "holds something else than this evaluation: name another folder by --output"),
        (["{run}", "model.init=zeros"], "model.init: the weights are those of the file that is evaluated"),
        (["{weights}", "model.name=logistic"], "say on which data, for example data.source=mnist"),
        (["{weights}", "data.source=sample"], "say which model it is, for example model.name=lenet5"),
        (["{weights}", "data.source=sample", "model.name=mlp"], "has no tensor 'layers.1.weight'"),
        (["{junk}", "data.source=sample", "model.name=mlp"], "is damaged, or is not "),
    ],
)
def test_mistakes(words, message, on_sample, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    weights, junk = tmp_path / "some.pt", tmp_path / "junk.safetensors"
    torch.save(nn.Linear(2, 2).state_dict(), weights)
    junk.write_text("no weights")
    places = {"run": on_sample, "empty": tmp_path / "empty", "weights": weights, "junk": junk}
    before = sorted(path.name for path in on_sample.iterdir())
    assert main(["evaluate", *(word.format(**places) for word in words)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in on_sample.iterdir()) == before


def test_classes_of_another_number(trained, tmp_path):
    """A classifier for three classes says nothing about two."""
    data = X[:20], Y[:20] % 2

    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))

    with pytest.raises(
        UserError, match=r"the model in .*model.safetensors has 3 classes, but the targets of .* have 2$"
    ):
        evaluate(
            trained.folder,
            data=data,
            test=data,
            model=two,
            overrides=["data.partition.alpha=100", "data.validation_samples=0"],
        )


def test_what_a_run_got_from_python_is_asked_for(trained):
    with pytest.raises(UserError, match=r"the run got data= and model= from Python: use fedray.evaluate\(RUN, data="):
        evaluate(trained.folder)
    with pytest.raises(UserError, match=r"the run got model= from Python"):
        evaluate(trained.folder, overrides=["data.source=sample"])


def test_tasks_without_classes(tmp_path):
    """A regression has metrics and clients, and neither classes nor a confusion matrix."""
    data = X[:100], X[:100] @ np.arange(6, dtype=np.float32)
    run = simulate({**SETTINGS, "run.output": str(tmp_path), "data.partition.alpha": None}, data=data, test=data,
                   model=lambda: nn.Linear(6, 1))  # fmt: skip
    found = evaluate(run.folder, data=data, test=data, model=lambda: nn.Linear(6, 1))
    assert found.metrics["mean_squared_error"] == pytest.approx(run.metrics["test_mean_squared_error"].iloc[-1])
    assert found.classes is None
    assert found.confusion is None
    assert len(found.clients) == 6
    names = {path.name for path in write(found, tmp_path / "found")}
    assert names == {"evaluation.json", "clients.csv"}


def test_tokens(tmp_path):
    """Each token that counts is a sample of its class. Ignored ones do not count."""
    tokens = rng.integers(0, 5, size=(40, 7))
    targets = np.where(rng.random((40, 7)) < 0.3, -100, tokens)

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    keys = {**SETTINGS, "run.output": str(tmp_path), "data.partition.alpha": None, "task.kind": "tokens"}
    run = simulate(keys, data=(tokens, targets), test=(tokens, targets), model=model)
    found = evaluate(run.folder, data=(tokens, targets), test=(tokens, targets), model=model)
    assert found.metrics["perplexity"] == pytest.approx(run.metrics["test_perplexity"].iloc[-1])
    assert found.classes["samples"].tolist() == [(targets == c).sum() for c in range(5)]
    assert found.classes["correct"].sum() / found.classes["samples"].sum() == pytest.approx(found.metrics["accuracy"])


def test_many_classes_are_listed_by_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr("fedray.evaluating.evaluation_files.MATRIX", 20)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), np.r_[29, rng.integers(0, 30, 59)]
    torch.save(nn.Linear(4, 30).state_dict(), tmp_path / "many.pt")
    found = evaluate(tmp_path / "many.pt", data=(x, y), test=(x, y), model=lambda: nn.Linear(4, 30),
                     overrides=["data.clients=1", "data.partition.kind=iid"])  # fmt: skip
    names = {path.name for path in write(found, tmp_path / "found")}
    assert names == {"evaluation.json", "classes.csv", "clients.csv", "confusion.csv"}
    pairs = pd.read_csv(tmp_path / "found" / "confusion.csv")
    assert pairs["count"].sum() == 60
    assert list(pairs) == ["target", "predicted", "count"]


def three(folder: Path, names: list[str], swapped: bool = False) -> str:
    """Writes a csv data set of three classes with these names."""
    folder.mkdir(exist_ok=True)
    spots = np.random.default_rng(7).normal(size=(90, 2)) + 4 * np.eye(3)[np.arange(90) % 3][:, :2]
    labels = [names[(i + swapped) % 3] for i in range(90)]
    lines = [f"{a:.4f},{b:.4f},{label}" for (a, b), label in zip(spots, labels, strict=True)]
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text("\n".join(["a,b,target", *lines]))
    return f"data.root={folder}"


@pytest.fixture
def on_csv(tmp_path) -> Path:
    words = ["data.source=csv", three(tmp_path / "own", ["cat", "dog", "eel"]), "model.name=logistic", "data.clients=2"]
    keys = ["algorithm.name=fedavg", "run.rounds=3", "engine.kind=local", "data.partition.kind=iid"]
    assert main(["run", *words, *keys, f"run.output={tmp_path}", "run.name=run"]) == 0
    return tmp_path / "run"


def test_classes_of_other_names(on_csv, tmp_path, capsys):
    """Names are numbered anew in each data set, so the same number may mean something else."""
    assert main(["evaluate", str(on_csv), three(tmp_path / "other", ["dog", "eel", "fox"])]) == 2
    assert "the model's classes are cat, dog, eel, but those of csv are dog, eel, fox" in capsys.readouterr().err


def test_data_that_have_changed(on_csv, tmp_path, capsys):
    assert main(["evaluate", str(on_csv)]) == 0
    assert "warning" not in capsys.readouterr().out
    three(tmp_path / "own", ["cat", "dog", "eel"], swapped=True)
    assert main(["evaluate", str(on_csv)]) == 0
    assert "warning: not as in the run: training data, test data" in capsys.readouterr().out


def test_other_settings_have_a_folder_of_their_own(on_csv, capsys):
    for _ in range(2):
        assert main(["evaluate", str(on_csv)]) == 0
        assert main(["evaluate", str(on_csv), "run.seed=3"]) == 0
        assert main(["evaluate", str(on_csv), "train.precision=bf16"]) == 0
    folders = {
        path.name: json.loads((path / "evaluation.json").read_text()) for path in (on_csv / "evaluations").iterdir()
    }
    assert folders.keys() == {"csv-test", "csv-test-2", "csv-test-3"}
    assert folders["csv-test-2"]["settings"]["run.seed"] == 3
    assert folders["csv-test-3"]["settings"]["train.precision"] == "bf16"


def test_data_that_were_handed_over_have_no_source(trained):
    with pytest.raises(UserError, match=r"data.source: the data were handed over"):
        evaluate(trained.folder, data=(X, Y), test=(X, Y), model=network, overrides=["data.source=mnist"])


def test_features_are_the_inputs_of_the_last_layer(trained, tmp_path):
    keys = {"data": (X[:200], Y[:200]), "test": (X[200:], Y[200:]), "model": network}
    found = evaluate(trained.folder, features=40, **keys)
    assert found.features.values.shape == (40, 12)
    assert len(set(found.features.samples.tolist())) == 40
    x = torch.from_numpy(X[200:][found.features.samples])
    with torch.no_grad():
        wanted = trained.model().eval()[:3](x)
    assert found.features.values == pytest.approx(wanted.numpy(), abs=1e-5)
    assert found.features.targets.tolist() == Y[200:][found.features.samples].tolist()
    assert {path.name for path in write(found, tmp_path / "out")} >= {"features.npz", "tsne.png"}
    with np.load(tmp_path / "out/features.npz") as arrays:
        assert np.array_equal(arrays["features"], found.features.values)
    # the same samples again, and all of them if more are asked for than there are
    assert np.array_equal(evaluate(trained.folder, features=40, **keys).features.samples, found.features.samples)
    assert len(evaluate(trained.folder, features=10**6, **keys).features.samples) == 100
    # without them, the files of before are gone
    assert "features.npz" not in {path.name for path in write(evaluated(trained), tmp_path / "out")}
    assert not (tmp_path / "out/tsne.png").exists()


def test_models_without_a_linear_layer_have_no_features(tmp_path):
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten())

    keys = {"data": (X[:200], Y[:200]), "test": (X[200:], Y[200:]), "model": convolution}
    run = simulate({**SETTINGS, "run.output": str(tmp_path), "run.rounds": 1}, **keys)
    with pytest.raises(UserError, match="--features: the model has no Linear layer"):
        evaluate(run.folder, features=5, **keys)
    with pytest.raises(UserError, match="--features must be a whole number of at least 0, not -1"):
        evaluate(run.folder, features=-1, **keys)


def test_a_global_model_with_private_layers_is_told(tmp_path):
    """It has their initial values, and a client's model does not."""
    keys = {"algorithm.name": "fedper", "model.name": "mlp", "run.personal_models_of": [0], "run.output": str(tmp_path)}
    with pytest.warns(fedray.FedrayWarning, match="final and test_accuracy say little"):
        made = simulate({"engine.kind": "local", "data.clients": 3, "run.rounds": 1, **keys})
    with pytest.warns(
        fedray.FedrayWarning, match="this is the global model, with initial values in its private layers"
    ):
        evaluate(made)
    lines: list[str] = []
    evaluate(made.folder / "personal/client-0.safetensors", say=lines.append)
    assert not any("private" in line for line in lines)
