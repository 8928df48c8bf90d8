"""What clients upload passes the steps of train.upload before it is summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedray import UploadRows, UploadStep, UserError, evaluate, simulate
from fedray.algorithms import known_algorithms
from fedray.testing import UploadContract
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult

HERE = __name__


class Remembering(UploadStep):
    """Sends half of what it has, and the rest later."""

    keeps = True

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        assert upload.kept is not None
        rows = rows + upload.kept
        upload.kept = rows * (1 - self.share)
        return rows * self.share


def doubled(rows: Tensor, upload: UploadRows) -> Tensor:
    # it may write into its rows
    return rows.mul_(2)


def halved(rows: Tensor, upload: UploadRows) -> Tensor:
    return rows / 2


def noise(rows: Tensor, upload: UploadRows) -> Tensor:
    return rows + torch.stack([torch.randn(row.shape, generator=upload.generator(i)) for i, row in enumerate(rows)])


DRAWN: dict[tuple[int, str], float] = {}
"""What the step ``drawing`` has drawn, by client and phase."""


def drawing(rows: Tensor, upload: UploadRows) -> Tensor:
    for row, client in enumerate(upload.clients):
        DRAWN[client, upload.phase] = float(torch.rand((), generator=upload.generator(row)))
    return rows


def zeros(rows: Tensor, upload: UploadRows) -> Tensor:
    return torch.zeros_like(rows)


def narrow(rows: Tensor, upload: UploadRows) -> Tensor:
    return rows[:, 1:]


def failing(rows: Tensor, upload: UploadRows) -> Tensor:
    raise KeyError("mine")


def with_neighbours(rows: Tensor, upload: UploadRows) -> Tensor:
    return rows - rows.mean(0)


number = 3

MADE = {name: each() for name, each in known_algorithms().items()}
TAKE_STEPS = sorted(
    name for name, each in MADE.items() if each.sends_updates and not (each.sends_numbers or each.several_models)
)


class TestRemembering(UploadContract):
    step = {"name": f"{HERE}:Remembering", "share": 0.25}


class TestNoise(UploadContract):
    step = f"{HERE}:noise"


def test_the_contract_finds_steps_that_mix_clients():
    class TestMixing(UploadContract):
        step = f"{HERE}:with_neighbours"

    with pytest.raises(AssertionError, match="a client alone sends something else"):
        TestMixing().test_it_treats_each_row_by_itself()


def run(folder: Path, *steps: str, algorithm: str = "adabest", callbacks: Any = (), **changes: Any) -> RunResult:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    upload = [step if ":" in step or "." in step else f"{HERE}:{step}" for step in steps]
    own = {"algorithm.name": algorithm, "train.upload": upload, "run.output": str(folder), "run.rounds": 4}
    return simulate({**SETTINGS, **own, **keys}, data=small_source(), callbacks=callbacks)


def vector(result: RunResult) -> Any:
    return np.concatenate([p.detach().numpy().ravel() for p in result.model().parameters()])


def test_steps_follow_each_other(tmp_path):
    """Twice and half are nothing, but for the rounding of x + (y - x); and what an algorithm keeps is untouched."""
    plain, both = run(tmp_path / "plain"), run(tmp_path / "both", "doubled", "halved")
    np.testing.assert_allclose(vector(both), vector(plain), rtol=1e-4, atol=1e-5)
    assert np.abs(vector(run(tmp_path / "twice", "doubled")) - vector(plain)).max() > 1e-3


def test_the_rows_of_a_model_are_its_update(tmp_path):
    """A model whose update is zero is the one that was sent."""
    still = run(tmp_path / "still", "zeros", algorithm="fedavg", run__rounds=1)
    later = run(tmp_path / "later", "zeros", algorithm="fedavg", run__rounds=3)
    assert still.summary["model_sha256"] == later.summary["model_sha256"]


@pytest.mark.parametrize("name", TAKE_STEPS)
def test_if_nothing_is_sent_the_servers_model_stays(name, tmp_path):
    """Steps get updates and directions alone, so that zeros in their place move nothing, whatever the rule is."""
    losses = run(tmp_path, "zeros", algorithm=name, run__rounds=3).metrics.test_loss
    assert losses.nunique() == 1


REFUSING = ["domo", "fastslowmo", "fedcm", "feddyn", "fednag", "fedsiam_da", "pfedmo", "scaffold", "scaffold_m"]


@pytest.mark.parametrize("name", REFUSING)
def test_what_is_no_update_or_is_sent_twice_is_refused(name, tmp_path):
    keys = {"data.public_samples": 20} if name == "pfedmo" else {}
    with pytest.raises(UserError, match="send something else than an update, or an update twice"):
        run(tmp_path, "zeros", algorithm=name, **keys)


def test_on_actors_and_with_kept_rows_the_bits_are_the_same(tmp_path, ray_cluster):
    """Of an algorithm that keeps a state of its own as well, and of one that keeps none."""
    for algorithm in ("adabest", "fedavg"):
        steps = ("Remembering", "noise")
        local = run(tmp_path / f"{algorithm}-local", *steps, algorithm=algorithm)
        ray = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.1}
        assert_same(local, run(tmp_path / f"{algorithm}-ray", *steps, algorithm=algorithm, **ray))
        without = run(tmp_path / f"{algorithm}-without", "noise", algorithm=algorithm)
        assert without.summary["model_sha256"] != local.summary["model_sha256"]


def test_each_phase_has_its_own_random_numbers(tmp_path):
    """Or a step's noise on Mime's gradients would be that on its models, and take itself away."""
    DRAWN.clear()
    run(tmp_path, "drawing", algorithm="mime", run__rounds=1)
    of_phases = [
        {DRAWN[client, phase] for client, phase in DRAWN if phase == wanted} for wanted in ("gradients", "train")
    ]
    assert all(of_phases)
    assert not of_phases[0] & of_phases[1]


def test_in_stacks_it_is_the_same_but_for_rounding(tmp_path):
    loop = run(tmp_path / "loop", "Remembering", algorithm="fedavg")
    stacks = run(tmp_path / "stacks", "Remembering", algorithm="fedavg", engine__vectorize=True, engine__chunk=4)
    np.testing.assert_allclose(vector(stacks), vector(loop), rtol=1e-3, atol=1e-4)


def test_diagnostics_measure_what_was_trained(tmp_path):
    measured = run(tmp_path / "zeros", "zeros", algorithm="fedavg", run__diagnostics=True)
    assert (measured.clients["drift"] > 0).all()
    assert (measured.metrics["update_norm"] == 0).all()


@pytest.mark.parametrize(
    ("step", "message", "algorithm"),
    [
        ("narrow", r"train.upload: narrow must return rows \[1, \d+\] torch.float32, not \[1, \d+\]", "fedavg"),
        ("failing", r"failing failed on the upload 'y' of round 1: KeyError: 'mine' .test_upload_steps.py", "fedavg"),
        ("Remembering", "Remembering keeps something of each client, .* mime has 2", "mime"),
        ("number", "train.upload: .*:number must be a function or a class of such, not int", "fedavg"),
        ("halfed", "has no 'halfed' .did you mean 'halved'", "fedavg"),
        ("nothing.py:halved", "train.upload=nothing.py:halved: can't read the file", "fedavg"),
    ],
)
def test_steps_that_can_not_be_used_are_told(step, message, algorithm, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, step, algorithm=algorithm)


def test_a_run_goes_on_with_the_same_steps_only(tmp_path):
    """Whoever evaluates its model needs none of them."""
    file = tmp_path / "steps.py"
    file.write_text("def less(rows, upload):\n    return rows * 0.9\n")
    run(tmp_path, f"{file}:less", callbacks=[lambda report: report.round == 2])
    file.write_text("def less(rows, upload):\n    return rows * 0.8\n")
    with pytest.raises(UserError, match=r"step 1 of train\.upload differs"):
        run(tmp_path, f"{file}:less")
    file.unlink()
    assert evaluate(tmp_path / "adabest-small", data=small_source()).metrics["accuracy"] > 0
