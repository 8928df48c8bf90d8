"""Tasks other than classification: losses and metrics against plain PyTorch, and all algorithms on all tasks."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.algorithms import known_algorithms
from fedray.testing.pickling import pickling_workers
from fedray.tracking.result import RunResult

CLIENTS, SAMPLES, TESTS, TOKENS, WORDS, LABELS = 4, 40, 30, 7, 11, 3
SETTINGS = {
    "algorithm.name": "fedavg", "run.rounds": 3, "engine.kind": "local", "train.batch_size": "full",
    "train.local_steps": 2, "train.lr": 0.1, "run.checkpoint_every": 0,
}  # fmt: skip


class Reader(nn.Module):
    """Gives logits for each token, from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(x)))


class Painter(Reader):
    """The same with the classes as the second axis, as models for images have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).movedim(-1, 1)


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))


def features(seed: int, samples: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((samples, 5)).astype(np.float32)


def numbers(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = features(seed, samples)
    return x, x[:, 0] * 2 - x[:, 1] + 0.3


def pairs(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = features(seed, samples)
    return x, x[:, :2] * 2 - x[:, 1:3]


def labels(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    x = features(seed, samples)
    return x, (x[:, :LABELS] > 0.2).astype(np.int64)


def tokens(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of unequal lengths, whose ends are filled with tokens that do not count."""
    rng = np.random.default_rng(seed)
    steps = [rng.integers(0, WORDS, samples)]
    for _ in range(TOKENS):
        steps.append((3 * steps[-1] + rng.integers(0, 2, samples)) % WORDS)
    x = np.stack(steps, 1)
    y = x[:, 1:].copy()
    y[np.arange(TOKENS) >= rng.integers(1, TOKENS + 1, samples)[:, None]] = -100
    return x[:, :-1], y


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), y.reshape(-1), ignore_index=-100)


def painted_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, ignore_index=-100)


def number_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs.squeeze(1), y)


Drawn = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
TASKS: dict[str, tuple[Drawn, Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor], str]] = {
    "regression": (numbers, lambda: perceptron(1), number_loss, "mean_squared_error"),
    "regression of pairs": (pairs, lambda: perceptron(2), F.mse_loss, "mean_squared_error"),
    "multilabel": (
        labels, lambda: perceptron(LABELS), lambda z, y: F.binary_cross_entropy_with_logits(z, y.float()), "f1",
    ),
    "tokens": (tokens, Reader, token_loss, "perplexity"),
    "tokens, classes second": (tokens, Painter, painted_loss, "perplexity"),
}  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def owners(samples: int) -> np.ndarray:
    """Clients of unequal sizes."""
    return np.sort(np.arange(samples) % 7 % CLIENTS)


def run(folder: Any, task: str, call: dict[str, Any] | None = None, **keys: Any) -> RunResult:
    draw, make, _, _ = TASKS[task]
    settings = {**SETTINGS, "run.output": str(folder)} | {key.replace("__", "."): value for key, value in keys.items()}
    data = (*draw(1, SAMPLES), owners(SAMPLES))
    return simulate(settings, **{"data": data, "test": draw(2, TESTS), "model": made(make), **(call or {})})


def plain_fedavg(task: str, rounds: int, steps: int, lr: float) -> nn.Module:
    draw, make, loss, _ = TASKS[task]
    x, y = map(torch.from_numpy, draw(1, SAMPLES))
    of = owners(SAMPLES)
    server = made(make)
    for _ in range(rounds):
        average = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client in np.unique(of):
            own = made(make)
            own.load_state_dict(server.state_dict())
            mine = torch.from_numpy(of == client)
            sgd = torch.optim.SGD(own.parameters(), lr)
            for _ in range(steps):
                sgd.zero_grad()
                loss(own(x[mine]), y[mine]).backward()
                sgd.step()
            for name, value in own.state_dict().items():
                average[name] += value * (mine.sum() / len(of))
        server.load_state_dict(average)
    return server


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_fedavg_is_that_of_plain_pytorch(task, vectorize, tmp_path):
    found = run(tmp_path, task, engine__vectorize=vectorize, engine__chunk=2).model()
    expected = plain_fedavg(task, 3, 2, 0.1).state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


class Both(NamedTuple):
    """What a model may return, by name."""

    z: Tensor
    squares: Tensor


class Attributes(dict[str, Tensor]):
    """A dict whose entries are attributes too, as in the outputs of transformers."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Made(dict[str, Tensor]):
    """A dict that its class fills."""

    def __init__(self, z: Tensor, squares: Any) -> None:
        super().__init__(z=z, squares=z.square())


class Returning(nn.Module):
    """Returns its logits and their squares in a form that ``wrap`` makes."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.wrap = perceptron(2), wrap

    def forward(self, x: Tensor) -> Any:
        z = self.layers(x)
        return self.wrap(z=z, squares=z.square())


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a named tuple": (Both, lambda outputs: (outputs.z, outputs.squares)),
    "a dict with attributes": (Attributes, lambda outputs: (outputs.z, outputs.squares)),
    "a dict with a constructor of its own": (Made, lambda outputs: (outputs["z"], outputs["squares"])),
    "a dict": (dict, lambda outputs: (outputs["z"], outputs["squares"])),
    "a tuple": (lambda z, squares: (z, squares), lambda outputs: outputs),
}


@pytest.mark.parametrize("vectorize", [False, "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_gets_outputs_as_the_model_returns_them(form, vectorize, tmp_path):
    wrap, parts = FORMS[form]

    def loss(outputs: Any, y: Tensor) -> Tensor:
        z, squares = parts(outputs)
        return (z - y).square().mean(1) + 0.1 * squares.mean(1)

    def run_of(name: str, make: Callable[[], nn.Module], own: Callable[..., Tensor]) -> RunResult:
        call = {"model": made(make), "loss": own}
        return run(tmp_path / name, "regression of pairs", call, task__kind="other", engine__vectorize=vectorize)

    found = run_of("form", lambda: Returning(wrap), loss)
    plain = run_of("plain", lambda: perceptron(2), lambda z, y: (z - y).square().mean(1) + 0.1 * z.square().mean(1))
    for one, other in zip(found.model().parameters(), plain.model().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda z, squares: [z, squares], SimpleNamespace], ids=["list", "object"])
def test_outputs_in_other_forms_are_refused(wrap, tmp_path):
    with pytest.raises(UserError, match="model Returning must give tensors, alone or in tuples, named tuples and dict"):
        run(tmp_path, "regression of pairs", {"model": Returning(wrap), "loss": lambda outputs, y: outputs[0]})


@pytest.mark.parametrize("algorithm", ["fedavg", "qfedavg", "ifca"])
def test_a_client_none_of_whose_targets_count(algorithm, tmp_path):
    x, y = tokens(1, SAMPLES)
    y[owners(SAMPLES) == 0] = -100
    call = {"data": (x, y, owners(SAMPLES))}
    made = run(tmp_path, "tokens", call, algorithm__name=algorithm, train__lr=0.01)
    assert made.summary["status"] == "completed"
    assert np.isfinite(made.metrics["test_loss"]).all()


def mean_squared_error(z: Tensor, y: Tensor) -> float:
    return float((z.view(y.shape) - y).square().mean())


def f1(z: Tensor, y: Tensor) -> float:
    hits = ((z > 0) & (y == 1)).sum()
    return float(2 * hits / ((z > 0).sum() + (y == 1).sum()))


def perplexity(z: Tensor, y: Tensor) -> float:
    logits = (z if z.shape[-1] == WORDS else z.movedim(1, -1)).reshape(-1, WORDS)
    return math.exp(F.cross_entropy(logits, y.reshape(-1), ignore_index=-100))


@pytest.mark.parametrize("task", TASKS)
def test_the_main_metric_is_that_of_the_saved_model(task, tmp_path):
    draw, _, loss, main = TASKS[task]
    result = run(tmp_path, task, train__lr=0.1 if main == "mean_squared_error" else 0.5, run__rounds=6)
    with torch.no_grad():
        x, y = map(torch.from_numpy, draw(2, TESTS))
        outputs = result.model()(x)
    own = {"mean_squared_error": mean_squared_error, "f1": f1, "perplexity": perplexity}[main]
    summary, last = result.summary, result.metrics.iloc[-1]
    assert (summary["metric"], summary["mode"]) == (main, "max" if main == "f1" else "min")
    assert summary["final"] == last[f"test_{main}"] == pytest.approx(own(outputs, y), rel=1e-5)
    assert last["test_loss"] == pytest.approx(float(loss(outputs, y)), rel=1e-5)
    column = result.metrics[f"test_{main}"]
    assert summary["best"] == (column.max() if main == "f1" else column.min())
    assert result.metrics["test_loss"].iloc[-1] < result.metrics["test_loss"].iloc[0]


def test_the_accuracy_of_tokens_is_a_mean_over_tokens(tmp_path):
    result = run(tmp_path, "tokens", train__lr=0.5)
    x, y = map(torch.from_numpy, tokens(2, TESTS))
    right, real = result.model()(x).argmax(-1) == y, y != -100
    assert result.metrics["test_accuracy"].iloc[-1] == pytest.approx(float(right[real].float().mean()))
    assert result.summary["final_accuracy"] == result.metrics["test_accuracy"].iloc[-1]
    of_samples = float((right.sum(1) / real.sum(1)).mean())
    assert abs(of_samples - result.summary["final_accuracy"]) > 1e-3


def test_a_metric_of_ones_own_per_token(tmp_path):
    def margin(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.max(-1).values - logits.mean(-1)

    settings = {"task__metric": "margin", "task__mode": "max", "data__validation_samples": 8}
    result = run(tmp_path, "tokens", {"metrics": {"margin": margin}}, **settings)
    x, y = map(torch.from_numpy, tokens(2, TESTS))
    expected = margin(result.model()(x), y)[y != -100].mean().detach()
    assert result.summary["final"] == pytest.approx(float(expected), rel=1e-5)
    assert result.metrics["validation_margin"].notna().all()


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_targets_and_shares_follow_the_main_metric(engine, tmp_path):
    data, test = (*numbers(1, SAMPLES), owners(SAMPLES)), (*numbers(2, TESTS), owners(TESTS))
    settings = {"run__targets": [1e9, 1e-9], "run__eval_clients": "all", "run__finetune_steps": 1}
    result = run(tmp_path, "regression", {"data": data, "test": test}, engine__kind=engine, **settings)
    assert result.summary["targets"]["1e+09"]["round"] == 1
    assert result.summary["targets"]["1e-09"] is None
    last = result.metrics.iloc[-1]
    shares = result.evaluation.query("round == 3").set_index("client")["global_mean_squared_error"]
    assert last["clients_mean_squared_error_mean"] == pytest.approx(shares.mean())
    assert last["clients_mean_squared_error_worst_tenth"] == shares.max()
    assert last["finetuned_mean_squared_error"] < last["global_on_shares_mean_squared_error"]
    x, y = (torch.from_numpy(each[owners(TESTS) == 1]) for each in numbers(2, TESTS))
    assert shares[1] == pytest.approx(mean_squared_error(result.model()(x).detach(), y), rel=1e-5)


KINDS = ["regression", "multilabel", "tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", sorted(known_algorithms()))
def test_every_algorithm_runs_on_every_task_or_says_why_not(algorithm, kind, tmp_path):
    refusals = {
        **{
            (name, kind): f"needs samples of classes, which task.kind={kind} does not have"
            for name in ("pfedmo", "fedproto")
            for kind in ("regression", "multilabel")
        },
        **{
            (name, "tokens"): r"has no representation \[b, d\]: its last Linear takes inputs \[b, 7, 6\]"
            for name in ("moon", "fedsiam_da", "fedproto")
        },
    }
    settings = {"algorithm__name": algorithm, "train__cohort_size": 3, "run__rounds": 2}
    if (algorithm, kind) in refusals:
        with pytest.raises(UserError, match=refusals[algorithm, kind]):
            run(tmp_path, kind, **settings)
        return
    result = run(tmp_path, kind, **settings)
    assert result.summary["status"] == "completed"
    assert math.isfinite(result.summary["final"])


def named_inputs(seed: int, samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    x, y = numbers(seed, samples)
    return {"left": x[:, :2], "right": (x[:, 2:] * 100).astype(np.int32)}, y


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(3, 1)

    def forward(self, right: Tensor, left: Tensor) -> Tensor:
        assert right.dtype == torch.int64
        return self.first(left).sum(1, keepdim=True) + self.second(right / 100)


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_dict_of_inputs_and_a_tuple(vectorize, tmp_path):
    model = made(Named)

    class Positional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named = model

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.named(right=right, left=left)

    (x, y), (x_test, y_test) = named_inputs(1, SAMPLES), named_inputs(2, TESTS)
    named = {"data": (x, y, owners(SAMPLES)), "test": (x_test, y_test), "model": model}
    placed = {
        "data": ((x["left"], x["right"]), y, owners(SAMPLES)),
        "test": ((x_test["left"], x_test["right"]), y_test),
        "model": Positional(),
    }
    settings = {"engine__vectorize": vectorize, "engine__chunk": 2, "algorithm__name": "scaffold"}
    one = run(tmp_path / "a", "regression", named, **settings)
    other = run(tmp_path / "b", "regression", placed, **settings)
    assert one.summary["model_sha256"] == other.summary["model_sha256"]
    left, right = torch.from_numpy(x_test["left"]), torch.from_numpy(x_test["right"]).long()
    expected = mean_squared_error(one.model()(left=left, right=right).detach(), torch.from_numpy(y_test))
    assert one.summary["final"] == pytest.approx(expected, rel=1e-5)


def test_the_same_bits_on_any_workers(tmp_path):
    sha = run(tmp_path / "local", "tokens", algorithm__name="pfedmo").summary["model_sha256"]
    for workers in (1, 2):
        with pickling_workers(workers):
            result = run(tmp_path / str(workers), "tokens", algorithm__name="pfedmo")
        assert result.summary["model_sha256"] == sha


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_linear_model_of_a_regression_finds_the_least_squares(outputs, tmp_path):
    """For classes its loss is that of one-hot labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (x @ rng.normal(size=(3, outputs)) + 0.1 * rng.normal(size=(60, outputs))).astype(np.float32)
    y = y[:, 0] if outputs == 1 else y
    keys = {
        "algorithm.name": "fedavg", "data.clients": 2, "data.partition.kind": "iid", "model.name": "linear",
        "task.kind": "regression", "train.batch_size": "full", "train.local_steps": 1, "train.lr": 0.3,
        "run.rounds": 60, "run.output": str(tmp_path), "engine.kind": "local",
    }  # fmt: skip
    made = simulate(keys, data=(x, y), test=(x, y))
    weight, bias = (each.detach().numpy() for each in made.model().parameters())
    expected = np.linalg.lstsq(np.hstack([x, np.ones((60, 1))]), y.reshape(60, -1), rcond=None)[0]
    assert pytest.approx(expected, abs=1e-3) == np.hstack([weight, bias[:, None]]).T
