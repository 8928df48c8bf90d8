"""What a user hands over with a model: metrics that are checked, buffers that are hashed, frozen layers that rest."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.testing.pickling import pickling_workers
from fedray.tracking.result import RunResult
from fedray.tuning.opening import open_sweep
from fedray.tuning.spec import read_sweeps

FEATURES, CLASSES = 12, 4


class Normed(nn.Module):
    """BatchNorm, and a whole-number buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)
        self.register_buffer("places", torch.tensor([7, 3, 2**20]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def run(folder: Path, call: Any = None, **keys: Any) -> RunResult:
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    settings |= {"algorithm.name": "fedavg", "run.rounds": 3, "run.output": str(folder)}
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    return simulate({**settings, **changes}, data=small_source(), **{"model": Normed, **(call or {})})


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_one_value_per_class_is_not_one_per_sample_where_there_are_two_classes(what: str, tmp_path: Path) -> None:
    def of_classes(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.softmax(1).mean(0)

    source = small_source()
    two = replace(source, y_train=source.y_train % 2, y_test=source.y_test % 2, classes=2)
    call = {"loss": of_classes} if what == "loss" else {"metrics": {"own": of_classes}}
    with pytest.raises(UserError, match=rf"{what}.* must give one value per sample, \[b\], not .* shape \[2\]"):
        simulate({**SETTINGS, "run.output": str(tmp_path)}, data=two, **call)


def mean_of_batch(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (mean_of_batch, r"metric 'own' must give one value per sample, \[b\], not a tensor of shape \[\]"),
        (lambda logits, targets: 0.5, r"metric 'own' must give one value per sample, a tensor \[b\], not float"),
        (lambda logits, targets: logits, r"metric 'own' must give .* \[b\], not a tensor of shape \[2, 4\]"),
        (lambda logits: logits, r"metric 'own' failed on outputs of shape \[2, 4\] and targets of shape \[2\]: TypeE"),
        (3, "metric 'own' must be a function of outputs and targets, not 3"),
    ],
)
def test_a_metric_is_checked_as_the_loss_is(metric, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, {"metrics": {"fine": lambda logits, targets: targets == 0, "own": metric}})


def share_of_batch(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none") / len(targets)


def recall_of_third_class(logits: Tensor, targets: Tensor) -> Tensor:
    found = (logits.argmax(1) == 2) & (targets == 2)
    return (found.sum() / (targets == 2).sum().clamp(min=1)).expand(len(targets))


@pytest.mark.parametrize("metric", [share_of_batch, recall_of_third_class])
def test_a_metric_that_depends_on_the_batch_is_refused(metric, tmp_path):
    with pytest.raises(UserError, match="metric 'own' gives a sample another value when there are other samples"):
        run(tmp_path, {"metrics": {"own": metric}})


def by_item(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor([each.item() for each in F.cross_entropy(logits, targets, reduction="none")])


@pytest.mark.parametrize("detached", [by_item, lambda logits, targets: logits.argmax(1).float()])
def test_a_loss_without_a_gradient_is_at_fault_itself(detached, tmp_path):
    with pytest.raises(UserError, match=r"^the loss has no gradient: .*computed from the outputs by torch's functions"):
        run(tmp_path, {"loss": detached})
    # a metric needs none
    assert run(tmp_path, {"metrics": {"own": detached}}).summary["status"] == "completed"


def test_a_loss_that_fails_in_the_backward_pass_is_at_fault_itself(tmp_path):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, each: Tensor) -> Tensor:
            return each.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("no such thing")

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return Broken.apply(F.cross_entropy(logits, targets, reduction="none"))

    with pytest.raises(UserError, match=r"^the gradient of the loss can't be computed: ValueError: no such thing"):
        run(tmp_path, {"loss": loss})


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
def test_probabilities_in_place_of_logits_are_warned_about(loss, tmp_path):
    def notes(model: Any, **keys: Any) -> list[str]:
        config = load({"algorithm.name": "fedavg", "engine.kind": "local", "data.clients": 4, **keys})
        found = resolve(config, CustomObjects(source=small_source(), model=model))[0].notes
        return [note for note in found if "are probabilities" in note]

    keys = {} if loss is None else {"task.loss": loss}
    (line,) = notes(lambda: nn.Sequential(Normed(), nn.Softmax(1)), **keys)
    assert line.startswith("warning: the outputs of model")
    assert not notes(Normed, **keys)
    assert not notes(lambda: nn.Sequential(Normed(), nn.Sigmoid()), **keys)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x).mean(1))


@pytest.mark.parametrize(
    ("model", "dtype", "advice"),
    [
        (nn.Linear(6, CLASSES), np.int64, "; it takes floats: give images as bytes .uint8., .*, or inputs as float32$"),
        (Words(), np.uint8, "; it takes whole numbers: give tokens as int64, since bytes .uint8. are scaled to 0..1"),
        (Words(), np.float32, "; it takes whole numbers: give tokens as int64"),
        (nn.Linear(7, CLASSES), np.float32, r"\(2x6 and 7x4\)$"),
    ],
)
def test_inputs_of_another_type_have_advice(model, dtype, advice, tmp_path):
    x, y = np.arange(240).reshape(40, 6) % 9, np.arange(40) % CLASSES
    with pytest.raises(UserError, match=rf"can't take inputs of shape \[6\]: .*{advice}"):
        simulate(
            {"algorithm.name": "fedavg", "engine.kind": "local", "run.output": str(tmp_path), "run.name": "typed"},
            data=(x.astype(dtype), y), test=(x.astype(dtype), y), model=model,
        )  # fmt: skip


def test_a_metric_that_draws_random_numbers_is_taken(tmp_path):
    noisy = run(tmp_path, {"metrics": {"own": lambda logits, targets: torch.rand(len(targets))}})
    assert 0 < noisy.metrics["test_own"].iloc[-1] < 1


def test_a_loss_that_depends_on_the_batch_is_said(tmp_path, capsys):
    warning = "warning: the loss of a sample depends on the other samples of its batch"
    run(tmp_path / "one", {"loss": share_of_batch, "verbose": True})
    assert warning in " ".join(capsys.readouterr().out.split())
    run(tmp_path / "other", {"loss": nn.CrossEntropyLoss(), "verbose": True})
    assert warning not in " ".join(capsys.readouterr().out.split())


def test_torchs_loss_modules_are_metrics_of_each_sample(tmp_path):
    row = run(tmp_path, {"metrics": {"nll": nn.CrossEntropyLoss()}}).metrics.iloc[-1]
    assert row["test_nll"] == pytest.approx(row["test_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_a_metric_does_not_take_the_place_of_fedrays_own(name, tmp_path):
    with pytest.raises(UserError, match=f"metric '{name}' has the name of one of fedray's metrics"):
        run(tmp_path, {"metrics": {name: lambda logits, targets: targets == 0}})


class Two(Normed):
    """An auxiliary classifier that only training has."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class Averaged(Normed):
    """One answer for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Two, r"model Two, in training mode, must give logits \[b, 4\], a tensor, not tuple"),
        (
            lambda: nn.Linear(FEATURES, 1),
            r"\[b, 4\], not \[b, 1\] \(task.kind=regression takes numbers for quantities\)",
        ),
        (Averaged, r"model Averaged must give logits \[b, 4\], not \[1 for b = 2, 4\]"),
    ],
)
def test_logits_are_checked_in_both_modes(model, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, {"model": model})


@pytest.mark.parametrize("algorithm", ["fedavg", "moon"])
def test_a_model_that_normalises_by_the_batch_in_evaluation_too(algorithm, tmp_path):
    class ByBatch(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(7, track_running_stats=False)

    equal = {"train__local_steps": 2, "train__local_epochs": None}
    equal |= {"data__partition__kind": "iid", "data__partition__alpha": None}
    result = run(tmp_path, {"model": ByBatch}, algorithm__name=algorithm, **equal)
    assert result.summary["status"] == "completed"


def sha256(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().to(torch.float32).numpy().tobytes() for t in tensors)).hexdigest()


def test_the_hash_covers_buffers_after_the_parameters(tmp_path):
    result = run(tmp_path)
    model = result.model()
    assert result.summary["model_sha256"] == sha256([*model.parameters(), *model.buffers()])


def test_models_that_differ_in_a_buffer_alone_have_other_hashes(tmp_path):
    module, results = Normed(), []
    for number in range(2):
        module.places += number
        results.append(run(tmp_path / str(number), {"model": module}))
    one, two = (result.model() for result in results)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert results[0].summary["model_sha256"] != results[1].summary["model_sha256"]


def test_batchnorm_is_the_same_on_any_workers_and_resumed(tmp_path):
    local = run(tmp_path / "local")
    for workers in (1, 2):
        with pickling_workers(workers):
            assert_same(local, run(tmp_path / f"{workers}"))
    folder = tmp_path / "parts"
    run(folder, {"callbacks": [lambda report: report.round == 1]}, run__checkpoint_every=1)
    assert_same(local, run(folder, run__checkpoint_every=1))


class Frozen(nn.Module):
    """A backbone that is not trained, with statistics of its own, below a layer that is, with its own."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        wide = norm is not nn.BatchNorm1d
        self.backbone = nn.Sequential(
            nn.Unflatten(1, (6, 2)) if wide else nn.Linear(FEATURES, 6),
            norm(6, affine=True, track_running_stats=True),
            nn.Flatten(),
        )
        for buffer in self.backbone.buffers():
            buffer.copy_(torch.rand(buffer.shape) + 0.5 if buffer.is_floating_point() else torch.tensor(41))
        self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
        self(torch.zeros(2, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("algorithm", ["fedavg", "pfedmo", "scaffold", "mime", "moon", "fedsiam_da"])
def test_the_statistics_of_frozen_layers_stay(algorithm, norm, tmp_path):
    module = Frozen(norm)
    before = {name: value.clone() for name, value in module.named_buffers()}
    result = run(tmp_path, {"model": module}, algorithm__name=algorithm)
    after = dict(result.model().named_buffers())
    own = [name for name in before if name.startswith("backbone")]
    assert own
    # torch before 2.10 writes the mean of equal copies back into the statistics of InstanceNorm in evaluation mode
    tolerance = 1e-6 if norm is nn.InstanceNorm1d else 0
    for name in own:
        torch.testing.assert_close(after[name], before[name], rtol=tolerance, atol=0)
    # those of the layer that is trained have moved
    assert not torch.equal(after["head.1.running_mean"], before["head.1.running_mean"])


def test_frozen_layers_train_as_torch_does_in_evaluation_mode(tmp_path):
    """One client, one full batch, one step: the gradient of a module whose frozen part is in evaluation mode."""
    module, source = Frozen(), small_source()
    one = {"data__clients": 1, "data__partition__kind": "iid", "data__public_samples": 0, "train__local_epochs": 1}
    one |= {"train__batch_size": "full", "train__cohort_size": 1, "run__rounds": 1}
    one["data__partition__alpha"] = None
    result = run(tmp_path, {"model": module}, **one).model()
    module.train()
    module.backbone.eval()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    F.cross_entropy(module(torch.from_numpy(source.x_train)), torch.from_numpy(source.y_train)).backward()
    found = [parameter for parameter in result.parameters() if parameter.requires_grad]
    for own, after in zip(trained, found, strict=True):
        torch.testing.assert_close(own - SETTINGS["train.lr"] * own.grad, after, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.head[1].running_mean, result.head[1].running_mean)


@pytest.mark.parametrize(
    ("model", "seeds", "said"), [(Normed(), 2, True), (Normed(), 1, False), (Normed, 2, False), (None, 2, False)]
)
def test_a_sweep_says_that_a_module_starts_all_seeds_from_the_same_weights(model, seeds, said, tmp_path):
    settings = {**SETTINGS, "algorithm.name": "fedavg"}
    if model is not None:
        settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
    described = {"base": settings, "spaces": {"wide": {"train.lr": {"uniform": [0.01, 0.5]}}}}
    (spec,) = read_sweeps(described, [f"tune.output={tmp_path}", "tune.name=s", f"tune.seeds={seeds}"])
    with open_sweep(spec, CustomObjects(small_source(), model)) as sweep:
        lines = [line for line in sweep.notes if "all 2 seeds start from the same initial weights" in line]
    assert len(lines) == said


def test_a_module_that_holds_an_activation_is_trained_as_one_without(tmp_path):
    model = Normed()
    without = run(tmp_path / "without", {"model": copy.deepcopy(model)})
    model.eval()
    model.seen = model(torch.zeros(2, FEATURES))
    assert run(tmp_path / "with", {"model": model}).summary["model_sha256"] == without.summary["model_sha256"]


def test_a_module_starts_all_seeds_from_the_same_weights_and_its_class_does_not():
    for model, equal in ((Normed(), True), (Normed, False)):
        config = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
        built = [
            resolve(load({**config, "run.seed": seed}), CustomObjects(small_source(), model))[0] for seed in (0, 1)
        ]
        one, two = (experiment.build_model().first.weight for experiment in built)
        assert torch.equal(one, two) == equal
