"""A run gives the same bits in whatever state the caller's torch is, and leaves that state as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import run
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from fedray import simulate
from fedray.core.torch_state import neutral
from fedray.testing.contracts import SETTINGS

State = Callable[[], contextlib.AbstractContextManager[Any]]


def setting(write: Callable[[Any], Any], value: Any, former: Any) -> State:
    """Returns a state that ``write(value)`` makes, and ``write(former)`` ends."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        write(value)
        try:
            yield
        finally:
            write(former)

    return context


def attribute(thing: Any, name: str, value: Any) -> State:
    return setting(lambda new: setattr(thing, name, new), value, getattr(thing, name, None))


def default_device(device: str | None) -> None:
    torch.set_default_device(device)
    if device is None:
        # torch 2.6 can't say any more what the default device is
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context")


@contextlib.contextmanager
def several() -> Iterator[None]:
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        yield


@contextlib.contextmanager
def several_devices() -> Iterator[None]:
    with setting(default_device, "meta", None)(), torch.device("meta"):
        yield


STATES: dict[str, State] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast that is not on": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": setting(default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "device context within a default device": several_devices,
    "matmul precision": setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "denormals": setting(torch.set_flush_denormal, True, False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "without flash attention": setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "deterministic": lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False)(),
    "numpy's errors": lambda: np.errstate(all="raise"),
    "threads": setting(torch.set_num_threads, 2, 1),
    "several": several,
    "without the fast path of attention": setting(torch.backends.mha.set_fastpath_enabled, False, True),
    "cached parametrizations": parametrize.cached,
}


class Net(nn.Module):
    """Has attention, normalisation, and numbers that are denormal."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.heads, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.BatchNorm1d(12)
        self.last = nn.Linear(12, classes)
        self.register_buffer("tiny", torch.tensor(1e-39))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(-1, 3, 4)
        h = self.heads(parts, parts, parts, need_weights=False)[0].flatten(1) * (self.tiny * 1e30 * 1e9)
        return self.last(self.norm(h))


KEYS = {"model__hidden": None, "model__name": None, "run__rounds": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"), call={"model": Net}, **KEYS)


@pytest.mark.parametrize("state", STATES)
def test_a_run_gives_the_same_bits(tmp_path, state, plain):
    with STATES[state]():
        found = run(tmp_path, call={"model": Net}, **KEYS)
        numbers = [parameter.detach() for parameter in found.model().parameters()]
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]
    for tensor, expected in zip(numbers, plain.model().parameters(), strict=True):
        assert tensor.isfinite().all()
        assert tensor.dtype is torch.float32
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected)


class Casting(nn.Module):
    """Casts itself, so that torch may keep what it has cast."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(weight_norm(nn.Linear(12, 8)), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()


@pytest.mark.parametrize("state", ["autocast", "autocast that is not on", "cached parametrizations"])
@pytest.mark.parametrize(("model", "precision"), [(Casting, "fp32"), (Net, "bf16")])
def test_what_torch_keeps_of_a_weight_is_not_used_for_the_next(tmp_path, state, model, precision):
    """In bf16 a run ended without having learnt anything: each step had the weights of the first one."""
    keys = KEYS | {"train__precision": precision, "call": {"model": model}}
    expected = run(tmp_path / "plain", **keys)
    with STATES[state]():
        found = run(tmp_path / "found", **keys)
    assert found.summary["model_sha256"] == expected.summary["model_sha256"]


def test_on_ray_too(tmp_path, ray_cluster, plain):
    with torch.inference_mode(), torch.autocast("cpu"):
        found = run(tmp_path, call={"model": Net}, **KEYS, engine__kind="ray", engine__actors=1)
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]


def test_a_module_that_was_made_in_inference_mode_is_trained(tmp_path):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(12, 4))
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    x, y = np.random.default_rng(0).normal(size=(200, 12)).astype(np.float32), np.arange(200) % 4
    settings = keys | {"algorithm.name": "fedavg", "data.clients": 5, "run.output": str(tmp_path)}
    assert simulate(settings, data=(x, y), test=(x, y), model=model).status == "completed"


@pytest.mark.parametrize("state", STATES)
def test_the_callers_state_is_as_before(state):
    def present() -> Any:
        precisions = [getattr(unit, "fp32_precision", None) for unit in (torch.backends, torch.backends.mkldnn)]
        return (
            torch.get_default_dtype(), torch.empty(0).device, torch.is_grad_enabled(), precisions,
            torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, np.geterr(),
            torch.backends.cuda.flash_sdp_enabled(), float(torch.full((1,), 1e-40, device="cpu") * 1.0 > 0)
            if torch.empty(0).device.type == "cpu" else None,
        )  # fmt: skip

    with STATES[state]():
        before = present()
        with contextlib.suppress(ZeroDivisionError), neutral():
            within = present()
            raise ZeroDivisionError
        assert present() == before
    with neutral():
        assert within[:3] == present()[:3] == (torch.float32, torch.device("cpu"), True)


def test_a_callback_may_set_the_default_device(tmp_path, plain):
    with STATES["default device"]():
        callbacks = [lambda report: torch.set_default_device("meta")]
        found = run(tmp_path, call={"model": Net, "callbacks": callbacks}, **KEYS)
        assert torch.empty(0).device.type == "meta"
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]


def test_what_a_callback_sets_does_not_last(tmp_path, plain):
    def callback(report: Any) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    try:
        found = run(tmp_path, call={"model": Net, "callbacks": [callback]}, **KEYS)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]


def test_two_threads_share_the_settings():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with neutral():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    torch.set_default_dtype(torch.float64)
    try:
        thread.start()
        assert entered.wait(30)
        with neutral():
            assert torch.get_default_dtype() is torch.float32
        # the other thread still computes
        assert torch.get_default_dtype() is torch.float32
        leave.set()
        thread.join()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
