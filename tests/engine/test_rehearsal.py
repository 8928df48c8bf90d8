"""What is not deterministic is told before the first round, and attention takes kernels that are.

It happens on GPUs; here a CPU is taken for one, and a loss says or does what operations of GPUs do.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import run
from torch import Tensor, nn

from fedray.engine import rehearsal
from fedray.engine.determinism import FLASH, deterministic, is_refused, nondeterministic_operations, strictly
from fedray.engine.process import computing_process

PUT = "put_ does not have a deterministic implementation"
TOLD = f"warning: bits are not promised, because they may differ from run to run: {PUT}"


class Net(nn.Module):
    """Draws numbers, has running statistics, and keeps its parameters where they are trained, as large models do."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(input_shape[0], hidden), nn.BatchNorm1d(hidden)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def put() -> None:
    torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))


def putting(logits: Tensor, targets: Tensor) -> Tensor:
    put()
    return F.cross_entropy(logits, targets, reduction="none")


def like_flash(logits: Tensor, targets: Tensor) -> Tensor:
    """Says what torch says of flash attention, which is deterministic where it says nothing."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(f"{FLASH}. To explicitly enable determinism", UserWarning, stacklevel=1)
    return F.cross_entropy(logits, targets, reduction="none")


def like_flash_and_putting_later(logits: Tensor, targets: Tensor) -> Tensor:
    """Does more than it does with the few samples of a rehearsal."""
    if len(targets) > rehearsal.SAMPLES:
        put()
    return like_flash(logits, targets)


@pytest.fixture
def as_a_gpu(monkeypatch):
    monkeypatch.setattr(rehearsal, "REHEARSING", {"cpu"})


def of(folder: Path, loss: Any = None, model: Any = Net, **call: Any) -> Any:
    keys = {
        "model__hidden": None,
        "model__name": None,
        "run__rounds": 2,
        "engine__vectorize": False,
        "engine__device": "cpu",
    }
    return run(folder, call={"model": model, "loss": loss, **call}, **keys)


def test_it_is_told_before_the_first_round(tmp_path, as_a_gpu):
    logs = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = of(tmp_path, putting, callbacks=[lambda report: logs.append(len(told))])
    (place,) = [place for place, each in enumerate(told) if TOLD.endswith(str(each.message))]
    assert place < logs[0]
    log = (found.folder / "log.txt").read_text()
    assert TOLD in log
    assert log.count(PUT) == 2
    machine = found.summary["machine"]
    assert not machine["bits_promised"]
    assert machine["nondeterministic"] == [PUT]
    assert all("nondeterministic" not in process for process in machine["processes"])


def test_a_model_that_is_deterministic_is_told_nothing_of(tmp_path, as_a_gpu):
    found = of(tmp_path)
    assert found.summary["machine"]["bits_promised"]
    assert "bits" not in (found.folder / "log.txt").read_text()


@pytest.mark.parametrize("hidden", [8, 20_000])
def test_it_changes_no_bit_and_no_state(hidden, tmp_path, monkeypatch):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    shas = set()
    for kind in ("cuda", "cpu"):
        monkeypatch.setattr(rehearsal, "REHEARSING", {kind})
        made = of(tmp_path / kind, model=lambda input_shape, classes: Net(input_shape, classes, hidden))
        shas.add(made.summary["model_sha256"])
    assert len(shas) == 1
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.is_warn_always_enabled()


def test_what_raises_is_left_to_the_first_round(tmp_path, as_a_gpu):
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise ValueError("no such loss")
        return F.cross_entropy(logits, targets, reduction="none")

    with pytest.raises(Exception, match="client 3 failed in phase train of round 1"):
        of(tmp_path, loss)


def test_flash_attention_is_made_deterministic(tmp_path, as_a_gpu):
    """It is where operations without a deterministic version raise."""
    found = of(tmp_path, like_flash)
    assert found.summary["machine"]["bits_promised"]
    assert "bits" not in (found.folder / "log.txt").read_text()
    assert found.summary["model_sha256"] == of(tmp_path / "plain").summary["model_sha256"]


def test_an_operation_that_comes_later_ends_no_run(tmp_path, as_a_gpu):
    found = of(tmp_path, like_flash_and_putting_later)
    assert found.summary["status"] == "completed"
    assert found.summary["machine"]["nondeterministic"] == [FLASH, PUT]
    assert found.summary["model_sha256"] == of(tmp_path / "plain").summary["model_sha256"]


def test_operations_raise_within_the_context_alone():
    with deterministic():
        with strictly(), pytest.raises(RuntimeError) as raised:
            put()
        assert is_refused(raised.value)
        put()
        assert nondeterministic_operations() == (PUT,)
        put()
    # those that a run before has not asked for are none of the next one's
    with deterministic():
        assert nondeterministic_operations() == ()
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_takes_kernels_that_are_deterministic():
    def allowed() -> tuple[bool, ...]:
        backend = torch.backends.cuda
        return (
            backend.math_sdp_enabled(), backend.flash_sdp_enabled(), backend.mem_efficient_sdp_enabled(),
            backend.cudnn_sdp_enabled(),
        )  # fmt: skip

    q, k, v = torch.randn(3, 2, 4, 70, 16, generator=torch.Generator().manual_seed(0))
    before, plain = allowed(), F.scaled_dot_product_attention(q, k, v)
    with computing_process(1, False):
        assert allowed() == (True, True, False, False)
        # that of CPUs is the same
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), plain)
    assert allowed() == before
