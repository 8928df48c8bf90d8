"""Learning rates that change from round to round: against torch's schedulers, resumed, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR, StepLR

from fedray import UserError, simulate
from fedray.config import ScheduleConfig, load
from fedray.core.schedule import Schedule
from fedray.testing.contracts import SETTINGS, small_source

ROUNDS = 12


def made(total: int = ROUNDS, **given: Any) -> Schedule:
    return Schedule(**ScheduleConfig(**given).over(total).model_dump(exclude_none=True))


def torchs(settings: dict[str, Any], lr: float) -> list[float]:
    """Returns the rates of rounds 1 to 12, as torch's own schedulers set them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    kind, warmup = settings.get("kind", "constant"), settings.get("warmup", 0)
    main: Any = {
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0),
        "exponential": lambda: ExponentialLR(optimizer, settings["decay"]),
        "step": lambda: StepLR(optimizer, settings["every"], settings["decay"]),
        "cosine": lambda: CosineAnnealingLR(
            optimizer, settings.get("rounds", ROUNDS) - warmup, eta_min=lr * settings.get("final", 0.0)
        ),
    }[kind]()
    if warmup:
        rising = LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
        main = SequentialLR(optimizer, [rising, main], [warmup])
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        main.step()
    return rates


SETTINGS_OF_SCHEDULES: list[dict[str, Any]] = [
    {}, {"warmup": 3}, {"kind": "exponential", "decay": 0.9}, {"kind": "exponential", "decay": 0.5, "warmup": 4},
    {"kind": "step", "decay": 0.1, "every": 5}, {"kind": "step", "decay": 0.5, "every": 2, "warmup": 1},
    {"kind": "cosine"}, {"kind": "cosine", "final": 0.1}, {"kind": "cosine", "warmup": 4},
    {"kind": "cosine", "final": 0.25, "warmup": 2}, {"kind": "cosine", "rounds": 12, "warmup": 11},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("settings", SETTINGS_OF_SCHEDULES, ids=str)
def test_they_are_torchs(settings):
    schedule = made(**settings)
    ours = [0.3 * schedule.factor(number) for number in range(1, ROUNDS + 1)]
    np.testing.assert_allclose(ours, torchs(settings, 0.3), rtol=1e-12)


@given(st.sampled_from(SETTINGS_OF_SCHEDULES), st.integers(1, 500), st.integers(1, 600))
def test_factors_are_between_0_and_1(settings, rounds, number):
    given = {key: value for key, value in settings.items() if key != "rounds"}
    assert 0 <= made(rounds, **given).factor(number) <= 1


def settings(folder: Any, **keys: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(folder), "engine.kind": "local", **changed}


def final(given: dict[str, Any]) -> np.ndarray:
    model = simulate(given, data=small_source()).model()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def test_a_cosine_stays_where_it_has_ended():
    schedule = made(kind="cosine", final=0.2, rounds=5)
    assert [schedule.factor(number) for number in (6, 7, 11, 30)] == [0.2] * 4


def test_a_run_makes_the_steps_of_torch(tmp_path):
    """Of one client and full batches, FedAvg is SGD, whose rate is that of the round."""
    schedule = {"kind": "cosine", "final": 0.1, "warmup": 2}
    source = small_source()
    keys = settings(
        tmp_path, model__name="logistic", train__lr=0.3, train__lr_schedule=schedule, data__clients=1,
        data__partition__kind="iid", train__cohort_size=1, train__batch_size="full", run__rounds=ROUNDS,
        data__public_samples=0,
    )  # fmt: skip
    keys = {key: value for key, value in keys.items() if key not in ("model.hidden", "train.local_epochs")}
    found = final({**keys, "train.local_steps": 1})
    torch.manual_seed(0)
    start = simulate(
        {**keys, "train.local_steps": 1, "run.rounds": 1, "train.lr": 1e-12, "run.name": "start"}, data=source
    )
    model, lrs = start.model(), iter(torchs({**schedule}, 0.3))
    x, y = torch.from_numpy(np.asarray(source.x_train)), torch.from_numpy(source.y_train)
    for lr in lrs:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_decay_is_the_exponential_schedule(tmp_path):
    one = final(settings(tmp_path, run__name="one", train__lr_decay=0.5))
    other = final(settings(tmp_path, run__name="other", train__lr_schedule={"kind": "exponential", "decay": 0.5}))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("algorithm", ["slowmo", "fedcm", "scaffold", "ghbm"])
def test_resumed_in_the_middle_of_a_schedule(algorithm, tmp_path):
    keys = settings(
        tmp_path, algorithm__name=algorithm, run__rounds=6, run__checkpoint_every=1,
        train__lr_schedule={"kind": "cosine", "warmup": 2},
    )  # fmt: skip
    whole = simulate({**keys, "run.name": "whole"}, data=small_source())

    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        if report.round == 3:
            raise Stop

    with pytest.raises(Stop):
        simulate({**keys, "run.name": "parts"}, data=small_source(), callbacks=[stop])
    parts = simulate({**keys, "run.name": "parts"}, data=small_source())
    assert parts.summary["model_sha256"] == whole.summary["model_sha256"]
    assert (tmp_path / "parts" / "config.yaml").read_text().count("rounds: 6") == 2, "the cosine's rounds are written"
    with pytest.raises(UserError, match=r"holds another run \(train.lr_schedule.rounds differs\)"):
        simulate({**keys, "run.name": "parts", "run.rounds": 8}, data=small_source())
    longer = {**keys, "run.name": "parts", "run.rounds": 8}
    longer["train.lr_schedule"] = {"kind": "cosine", "warmup": 2, "rounds": 6}
    with pytest.raises(UserError, match="a cosine over rounds=6 leaves no learning rate for the 8 rounds of the run"):
        simulate(longer, data=small_source())


def test_the_servers_rate(tmp_path):
    """With next to no rate of the server after the first round, nothing changes any more."""
    keys = settings(tmp_path, run__rounds=4, train__server_lr_schedule={"kind": "exponential", "decay": 1e-30})
    result = simulate(keys, data=small_source())
    assert result.metrics["test_loss"].nunique() == 1
    plain = simulate({**settings(tmp_path, run__rounds=1), "run.name": "plain"}, data=small_source())
    assert result.summary["model_sha256"] == plain.summary["model_sha256"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.lr_schedule.kind": "cosinus"}, "train.lr_schedule.kind"),
        (
            {"train.lr_schedule.kind": "step", "train.lr_schedule.decay": 0.1},
            "lr_schedule: kind=step needs every",
        ),
        ({"train.lr_schedule.decay": 0.1}, "decay is not for kind=constant, but for exponential and step"),
        ({"train.lr_schedule": {"kind": "cosine", "rounds": 3, "warmup": 3}}, "rounds=3 must be more than warmup=3"),
        ({"train.lr_schedule.kind": "cosine", "train.lr_decay": 0.9}, "give train.lr_decay or train.lr_schedule"),
        ({"train.lr_schedule.knd": "cosine"}, "unknown key train.lr_schedule.knd (did you mean"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(UserError) as error:
        load(keys)
    assert message in str(error.value)


def test_a_server_without_a_rate(tmp_path):
    for schedule in ({"kind": "cosine"}, {"warmup": 2}):
        keys = settings(tmp_path, algorithm__name="fednag", train__server_lr_schedule=schedule)
        with pytest.raises(UserError, match=r"train.server_lr_schedule: fednag has no server learning rate"):
            simulate(keys, data=small_source())
