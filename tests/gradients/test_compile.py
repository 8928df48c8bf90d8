"""Compiled gradients: the same numbers as without the compiler, the same bits everywhere, and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from small_runs import needs_compiler
from torch import nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.core.batches import Batch
from fedray.core.task import Metric, Task, token_accuracy, token_cross_entropy
from fedray.experiment.backend import GPU_LONG, LONG, is_compiled
from fedray.experiment.custom import CustomObjects
from fedray.experiment.placement import missing_compiler
from fedray.experiment.resolve import resolve
from fedray.gradients.compiled import Compiled
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models.compiling import traced_gradient
from fedray.testing import AlgorithmContract
from fedray.testing.contracts import SETTINGS, small_source

pytestmark = pytest.mark.cpu
"""Compiled gradients are for CPUs, and need a C++ compiler."""


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


class Dense(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))


class Branching(nn.Module):
    """A model whose operations depend on values."""

    def __init__(self, input_shape=(64,), classes=5):
        super().__init__()
        self.layer = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.layer(x if x.sum() > 0 else 2 * x)


class Averaging(Branching):
    """A model with a frozen average of its weights, which each pass puts into other memory."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(64, 5).requires_grad_(False)

    def forward(self, x):
        self.slow.weight.data = 0.9 * self.slow.weight.data + 0.1 * self.layer.weight.data
        return self.layer(x)


def images(clients: int = 3, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(clients, size, 1, 8, 8, generator=draw),
        torch.randint(0, 5, (clients, size), generator=draw),
    )


def both(network: Any, batch: Batch, shape: Any) -> tuple[Any, Any, Any, Any]:
    """Gradients and models without and with the compiler."""
    row = 0.3 + 0.1 * torch.randn(len(batch.y), network.layout.row_width, generator=torch.Generator().manual_seed(1))
    plain, compiled = (network.layout.model(row.clone()) for _ in range(2))
    without = network.gradients(plain, batch)
    network.compiled = Compiled(network.pure_gradient, [shape])
    return without, network.gradients(compiled, batch), plain, compiled


@needs_compiler
class TestNumbers:
    def close(self, a: torch.Tensor, b: torch.Tensor) -> None:
        assert (a - b).norm() <= 1e-5 * b.norm()

    def check(self, network: Any, batch: Batch, shape: Any) -> None:
        without, found, plain, compiled = both(network, batch, shape)
        self.close(found.value, without.value)
        self.close(found.task_loss, without.task_loss)
        assert not found.value[:, network.layout.parameters :].any()
        for a, b in zip(found.followed, without.followed, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert torch.allclose(compiled.buffers, plain.buffers, rtol=1e-6)

    def test_one_after_another_with_running_statistics(self):
        torch.manual_seed(0)
        self.check(LoopNetwork(Normed()), Batch(*images(), 0), 7)

    @pytest.mark.parametrize("counts", [None, [7, 5, 2]])
    def test_stacks_with_batches_of_unequal_sizes(self, counts):
        torch.manual_seed(0)
        self.check(StackNetwork(Dense()), Batch(*images(), 0, counts), (3, 7))

    def test_tokens_that_do_not_count(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
        x = torch.randint(0, 6, (2, 3, 5))
        y = torch.where(x > 1, x, -100)
        loss, accuracy = (partial(f, axis=-1) for f in (token_cross_entropy, token_accuracy))
        task = Task(
            "tokens", partial(loss, ignored=-100), {"accuracy": Metric(accuracy, "max")}, ignored=-100,
            loss_per_entry=True,
        )  # fmt: skip
        self.check(LoopNetwork(model, task), Batch(x, y, 0), 3)

    def test_other_shapes_are_computed_as_without_the_compiler(self):
        torch.manual_seed(0)
        without, found, *_ = both(LoopNetwork(Dense()), Batch(*images(size=6), 0), 7)
        assert torch.equal(found.value, without.value)


class TestDecision:
    def decide(self, asked: bool | str = "auto", begun: bool | None = None, **given: Any) -> tuple[bool, str | None]:
        graph = traced_gradient(Dense(), Task(), False, *(each[0] for each in images(1)))
        facts = {
            "steps": LONG,
            "device": "cpu",
            "vectorize": False,
            "module": Dense(),
            "trace": lambda: graph,
            "missing": lambda: None,
            **given,
        }
        return is_compiled(load({"engine.compile": asked}), begun, **{**facts, **given})

    def test_long_runs_of_dense_models_are(self):
        assert self.decide()[0]
        assert self.decide(steps=LONG - 1) == (False, None)
        assert self.decide(device="cuda") == (False, None)
        assert self.decide(module=Normed()) == (False, None)

    def test_long_runs_of_stacks_with_convolutions_are_on_a_gpu(self):
        on_gpu = {"device": "cuda", "vectorize": True, "steps": GPU_LONG, "module": Normed()}
        assert self.decide(**on_gpu)[0]
        for other in ({"vectorize": False}, {"steps": GPU_LONG - 1}, {"module": Dense()}):
            assert self.decide(**{**on_gpu, **other}) == (False, None)
        assert "no C compiler" in self.decide(**on_gpu, missing=lambda: "no C compiler (gcc or clang)")[1]

    @pytest.mark.parametrize("layer", [nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.BatchNorm2d(1)])
    def test_those_of_other_layers_are_not(self, layer):
        model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(5))
        x, y = (each[0] for each in images(1))
        model(x)
        graph = traced_gradient(model, Task(), False, x, y)
        assert self.decide(trace=lambda: graph) == (False, None)
        assert self.decide(True, trace=lambda: graph)[0]

    def test_what_the_user_says_holds(self):
        assert self.decide(False) == (False, None)
        assert self.decide(True, steps=1)[0]

    def test_a_run_that_has_begun_goes_on_as_it_began(self):
        assert self.decide(begun=True, steps=1)[0]
        assert self.decide(begun=False) == (False, None)

    def test_what_can_not_be_traced_is_told(self):
        reason = traced_gradient(Branching(), Task(), False, torch.randn(7, 64), torch.zeros(7, dtype=torch.int64))
        assert isinstance(reason, str)
        compiled, line = self.decide(True, trace=lambda: reason)
        assert not compiled
        assert line.startswith("warning: engine.compile=true: gradients are not compiled, because it can't be traced, ")

    def test_what_is_traced_wrongly_is_told(self):
        """The gradient is right here, but not what the pass does to the frozen average."""
        x, y = torch.randn(7, 64), torch.zeros(7, dtype=torch.int64)
        reason = traced_gradient(Averaging(), Task(), False, x, y, ["slow.weight"])
        assert isinstance(reason, str)
        assert reason.startswith("what was traced is off by ")

    def test_without_a_compiler(self):
        lacking = {"missing": lambda: "no C++ compiler (g++) on node7"}
        assert self.decide(**lacking) == (
            False,
            "engine.compile=auto: gradients are not compiled, because there is no C++ compiler (g++) on node7",
        )
        for asked, begun in ((True, None), ("auto", True)):
            with pytest.raises(UserError, match=r"there is no C\+\+ compiler \(g\+\+\) on node7; install it, or use"):
                self.decide(asked, begun, **lacking)


def test_what_a_gpu_needs_to_compile(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_compiler("cuda") == "no C compiler (no-such-compiler)"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_compiler("cuda") == "no Triton (pip install triton)"


KEYS = {**SETTINGS, "algorithm.name": "fedavg", "engine.compile": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_the_compiler_is_looked_for_on_every_node(tmp_path, kind):
    """In a process of its own, whose Ray has the same environment."""
    keys = [f"engine.kind={kind}", "engine.address=local", "engine.actors=1", "engine.compile=true", "run.rounds=1"]
    command = [sys.executable, "-m", "fedray.run", "algorithm.name=fedavg", "data.source=sample", *keys]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True
    )
    assert ended.returncode == 2
    line = ended.stderr.strip().splitlines()[-1]
    assert "engine.compile=true: there is no C++ compiler (no-such-compiler)" in line
    assert line.endswith("install it, or use engine.compile=false in a new run")
    assert not list(tmp_path.iterdir())


def test_other_reasons_are_told(tmp_path):
    for changed, reason in (
        ({"train.batch_size": "full"}, "each client has mini-batches of another size"),
        ({"train.precision": "bf16"}, "train.precision=bf16 is not float32"),
        ({"algorithm.name": "moon", "model.proj_dim": 8}, "the loss of moon is the algorithm's own"),
        ({"engine.portable_bits": True}, "the same bits on different processors"),
    ):
        experiment, _ = resolve(
            load({**KEYS, **changed, "run.output": str(tmp_path)}), CustomObjects(source=small_source())
        )
        assert not experiment.compile
        assert not experiment.config.engine.compile
        assert [note for note in experiment.notes if reason in note]


class Masked(nn.Sequential):
    """Half of the gradient of its weights is dropped by a hook."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(input_shape[0], classes))
        self[0].weight.register_hook(lambda grad: grad * (torch.arange(input_shape[0]) % 2))


@pytest.mark.parametrize("stacked", [False, True])
def test_parameters_with_hooks_are_left_to_autograd(tmp_path, stacked):
    keys = {key: value for key, value in KEYS.items() if not key.startswith("model.")}
    keys |= {"engine.compile": not stacked, "engine.vectorize": stacked, "run.output": str(tmp_path)}
    own = CustomObjects(source=small_source(), model=Masked)
    if stacked:
        with pytest.raises(UserError, match=r"its parameter 0\.weight has a hook"):
            resolve(load(keys), own)
        return
    experiment, _ = resolve(load(keys), own)
    assert not experiment.compile
    assert [note for note in experiment.notes if "because its parameter 0.weight has a hook" in note]


@needs_compiler
def test_a_finished_run_needs_no_compiler(tmp_path, monkeypatch):
    keys = {**KEYS, "run.output": str(tmp_path), "run.rounds": 1}
    found = simulate(keys, data=small_source())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert simulate(keys, data=small_source()).summary == found.summary


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("vectorize", [False, True])
def test_cold_and_filled_caches_give_the_same_bits(tmp_path, monkeypatch, vectorize):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = {**KEYS, "engine.vectorize": vectorize, "run.rounds": 2}
    shas = []
    for name in ("cold", "filled"):
        torch._dynamo.reset()
        result = simulate({**keys, "run.output": str(tmp_path / name)}, data=small_source())
        shas.append(result.summary["model_sha256"])
        assert list((tmp_path / "cache" / "fedray" / "compiled").iterdir())
    assert shas[0] == shas[1]
    plain = simulate({**keys, "run.output": str(tmp_path / "plain"), "engine.compile": False}, data=small_source())
    assert plain.summary["model_sha256"] != shas[0]


def test_a_run_that_an_older_fedray_began_goes_on(tmp_path):
    keys = {**KEYS, "run.output": str(tmp_path), "engine.compile": "auto"}
    begun = simulate(keys, data=small_source(), callbacks=[lambda report: report.round == 2])
    recorded = begun.folder / "config.yaml"
    recorded.write_text(recorded.read_text().replace("  compile: false\n", ""))
    assert "compile" not in recorded.read_text()
    assert simulate(keys, data=small_source()).summary["status"] == "completed"


@needs_compiler
def test_a_resumed_run_goes_on_as_it_began(tmp_path):
    keys = {**KEYS, "run.output": str(tmp_path)}
    simulate(keys, data=small_source(), callbacks=[lambda report: report.round == 2])
    whole = simulate({**keys, "engine.compile": "auto"}, data=small_source())
    assert whole.summary["status"] == "completed"
    assert "compile: true" in (whole.folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"engine.compile differs"):
        simulate({**keys, "engine.compile": False, "run.rounds": 8}, data=small_source())


@pytest.mark.slow
@needs_compiler
class TestCompiled(AlgorithmContract):
    """All contracts, with clients one after another."""

    algorithm = "scaffold"
    settings = {"engine.compile": True}


@needs_compiler
@pytest.mark.slow
class TestCompiledWithServerTraining(AlgorithmContract):
    algorithm = "pfedmo"
    hyper = {"pi": 0.7, "probe_batch": 32}
    settings = {"engine.compile": True}
