"""Runs whose cohorts are not drawn uniformly: by samples, by losses among candidates, by utilities."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from small_runs import run
from torch.nn import functional as F

from fedray import UserError
from fedray.config import load
from fedray.core.seeds import Purpose, stream
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.selection import ROOT_MEAN_SQUARE
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.util.files import sha256_of_file

CHOICE = {"kind": "power_of_choice", "candidates": 5}
SLOW = {"system__flops_per_second": {"lognormal": [1e6, 1.5]}}
KEYS = {"train__cohort_size": 2, "run__rounds": 6, "run__checkpoint_every": 1}


def data_of():
    return resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), CustomObjects(source=small_source()))[1]


def losses_at(model, data):
    """Each client's mean loss over all its samples, by torch alone."""
    found, source = {}, small_source()
    for client in range(data.clients):
        places = data.client(client)
        x, y = torch.from_numpy(source.x_train[places]), torch.from_numpy(source.y_train[places])
        found[client] = float(F.cross_entropy(model(x).double(), y))
    return found


def candidates_of(number, data, count=5):
    present = np.flatnonzero(data.sizes())
    drawn = stream(SETTINGS.get("run.seed", 0), Purpose.COHORT, number).choice(
        present, count, replace=False, p=data.sizes()[present] / data.sizes().sum()
    )
    return sorted(drawn.tolist())


def test_power_of_choice_takes_those_with_the_largest_losses(tmp_path):
    data = data_of()
    for rounds in (1, 2, 5):
        keys = KEYS | {"run__rounds": rounds, "train__sampling": CHOICE}
        before = run(tmp_path / "runs", **keys | {"run__rounds": rounds - 1}).model() if rounds > 1 else None
        made = run(tmp_path / "runs", **keys)
        rows = made.clients[made.clients["round"] == rounds]
        if before is not None:
            losses = losses_at(before.eval(), data)
            candidates = candidates_of(rounds, data)
            best = sorted(sorted(candidates, key=lambda client: -losses[client])[:2])
            assert rows.client.tolist() == best
            assert rows.selection_loss.tolist() == pytest.approx([losses[client] for client in best], rel=1e-4)


def test_with_cached_losses(tmp_path):
    data = data_of()
    made = run(tmp_path, **KEYS | {"run__rounds": 9}, train__sampling=CHOICE | {"cached": True})
    known = {}
    for number, rows in made.clients.groupby("round"):
        candidates = candidates_of(number, data)
        best = sorted(candidates, key=lambda client: (-known.get(client, math.inf), client))[:2]
        assert rows.client.tolist() == sorted(best)
        assert rows.selection_loss.tolist() == [known.get(client, math.inf) for client in sorted(best)]
        known |= dict(zip(rows.client, rows.loss, strict=True))


def test_why_clients_were_chosen_of_whom_more_were_asked_than_answered(tmp_path):
    sampling = CHOICE | {"cached": True}
    made = run(tmp_path, **KEYS | {"run__rounds": 9}, train__sampling=sampling, system__over_select=1.5, **SLOW)
    known = {}
    for _, rows in made.clients.groupby("round"):
        assert len(rows) == 3
        used = rows[rows.outcome == "used"]
        assert used.selection_loss.tolist() == [known.get(client, math.inf) for client in used.client]
        known |= dict(zip(used.client, used.loss, strict=True))


OORT = {"kind": "oort"}


def square_losses_at(model, data):
    """n_i times the root of the mean of each client's squared losses, by torch alone."""
    found, source = {}, small_source()
    for client in range(data.clients):
        places = data.client(client)
        x, y = torch.from_numpy(source.x_train[places]), torch.from_numpy(source.y_train[places])
        each = F.cross_entropy(model(x).double(), y, reduction="none")
        found[client] = len(places) * each.square().mean().sqrt().item()
    return found


def check_oort(made_with, rounds, most=math.inf, alpha=2.0):
    """``made_with(r)`` is the run after r rounds."""
    data = data_of()
    present, useful, last, took, slow = np.flatnonzero(data.sizes()), {}, {}, {}, 0
    for number in range(1, rounds + 1):
        made = made_with(number)
        rows = made.clients[made.clients["round"] == number]
        now = {}
        for client in sorted(useful):
            now[client] = useful[client] + math.sqrt(0.1 * math.log(number) / last[client])
            if took.get(client, 0) > most:
                now[client] *= (most / took[client]) ** alpha
                slow += 1
        new = [client for client in present if client not in now]
        fresh = min(len(new), max(round(max(0.2, 0.9 * 0.98 ** (number - 1)) * 3), 3 - len(now)))
        rng = stream(SETTINGS.get("run.seed", 0), Purpose.COHORT, number)
        chosen = rng.choice(new, fresh, replace=False).tolist() if new else rng.choice(np.zeros(0), 0).tolist()
        if fresh < 3:
            values = np.minimum([*now.values()], np.quantile([*now.values()], 0.95))
            chosen += rng.choice([*now], 3 - fresh, replace=False, p=values / values.sum()).tolist()
        assert rows.client.tolist() == sorted(chosen)
        expected = [now.get(client, math.nan) for client in rows.client]
        assert rows.selection_utility.tolist() == pytest.approx(expected, rel=1e-4, nan_ok=True)
        losses = square_losses_at(made_with(number - 1).model.eval(), data)
        useful |= {client: losses[client] for client in rows.client}
        last |= dict.fromkeys(rows.client, number)
        if most < math.inf:
            took |= dict(zip(rows.client, rows.virtual_seconds, strict=True))
    return slow


@pytest.mark.parametrize("system", [{}, SLOW], ids=["alike", "slow"])
def test_oort(system, tmp_path):
    keys = {"train__cohort_size": 3, "run__checkpoint_every": 1, **system}
    most = 0.01 if system else math.inf
    sampling = OORT | ({"seconds": most, "alpha": 1.5} if system else {})
    initial = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), CustomObjects(source=small_source()))[0]
    runs = {0: SimpleNamespace(model=initial.build_model())}

    def made_with(rounds):
        if rounds not in runs:
            made = run(tmp_path, **keys, run__rounds=rounds, train__sampling=sampling)
            runs[rounds] = SimpleNamespace(clients=made.clients, model=made.model())
        return runs[rounds]

    slow = check_oort(made_with, 8, most, 1.5)
    assert (slow > 0) == bool(system)


@pytest.mark.parametrize(
    "sampling", ["weighted", CHOICE, CHOICE | {"cached": True}, OORT], ids=["weighted", "fresh", "cached", "oort"]
)
@pytest.mark.parametrize("algorithm", ["fedavg", "pfedmo", "fedper"])
def test_the_same_bits_anywhere_and_when_it_is_resumed(algorithm, sampling, tmp_path):
    keys = KEYS | {"train__sampling": sampling, "algorithm": algorithm}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", **keys))
    assert_same(whole, run(tmp_path / "pickled", engine__kind="fedray.testing.pickling:PicklingPool", **keys))
    plain = run(tmp_path / "plain", **KEYS, algorithm=algorithm)
    assert not plain.clients.client.equals(whole.clients.client)


def test_a_checkpoint_without_what_is_noted_is_refused(tmp_path):
    """As of another version of fedray, whose numbers of clients were others."""
    keys = KEYS | {"train__sampling": OORT, "run__name": "run"}
    run(tmp_path, **keys | {"run__rounds": 3})
    last = max((tmp_path / "run" / "checkpoints").glob("round-*"))
    record, sums = (json.loads((last / name).read_text()) for name in ("record.json", "checksums.json"))
    record["table"] = {"utility": record["table"][ROOT_MEAN_SQUARE]}
    (last / "record.json").write_text(json.dumps(record))
    (last / "checksums.json").write_text(json.dumps(sums | {"record.json": sha256_of_file(last / "record.json")}))
    expected = (
        f"checkpoint of round 3 .* does not know clients' {ROOT_MEAN_SQUARE}, by which train.sampling=oort chooses"
    )
    with pytest.raises(UserError, match=expected):
        run(tmp_path, **keys)
    assert run(tmp_path, **keys, run__resume=False).summary["rounds"] == 6


OF_A_USER = """
import numpy as np
from fedray.selection import Chosen, Selection

class Last(Selection):
    asks = 3

    def choose(self, known):
        asked = known.draw(self.asks)
        largest = known.losses(asked).mean.argsort()[-known.count :]
        return Chosen(np.sort(asked[largest]))
"""


@pytest.mark.parametrize("sampling", [pytest.param(CHOICE, marks=pytest.mark.slow), "FILE:Last"])
def test_on_ray(sampling, tmp_path, ray_cluster):
    """The server's process gets the code of a user's file."""
    (tmp_path / "mine.py").write_text(OF_A_USER)
    keys = KEYS | {"train__sampling": f"{tmp_path / 'mine.py'}:Last" if sampling == "FILE:Last" else sampling}
    local = run(tmp_path / "local", **keys)
    on_ray = run(tmp_path / "ray", engine__kind="ray", engine__actors=2, engine__cpus_per_actor=0.5, **keys)
    pd.testing.assert_frame_equal(local.clients, on_ray.clients)
    assert local.summary["model_sha256"] == on_ray.summary["model_sha256"]


def test_costs_of_candidates(tmp_path):
    data = data_of()
    keys = KEYS | {"run__rounds": 1}
    plain, made = run(tmp_path / "plain", **keys), run(tmp_path / "made", **keys, train__sampling=CHOICE)
    cached = run(tmp_path / "cached", **keys, train__sampling=CHOICE | {"cached": True})
    parameters = sum(p.numel() for p in made.model().parameters())
    assert made.metrics.bytes_down[0] - plain.metrics.bytes_down[0] == 5 * 4 * parameters
    assert made.metrics.bytes_up[0] - plain.metrics.bytes_up[0] == 5 * 4
    assert cached.metrics.bytes_down[0] == plain.metrics.bytes_down[0]
    again = run(tmp_path / "again", **keys, train__sampling=CHOICE | {"candidates": 6})
    # what a sample costs that is trained on, and one on which a candidate computes its loss
    trained = [data.sizes()[each.clients.client].sum() for each in (plain, made, again)]
    asked = [0, *(data.sizes()[candidates_of(1, data, count)].sum() for count in (5, 6))]
    flops = [each.metrics.flops[0] for each in (plain, made, again)]
    gradient = flops[0] / trained[0]
    forward = (flops[1] - gradient * trained[1]) / asked[1]
    assert 0 < forward < gradient
    assert flops[2] == pytest.approx(gradient * trained[2] + forward * asked[2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"train__sampling": "weihgted"},
            r"train\.sampling: there is no 'weihgted' \(did you mean 'weighted'\?\)",
        ),
        ({"train__sampling": {"kind": "power_of_choice"}}, r"power_of_choice needs the option candidates$"),
        ({"train__sampling": {"candidates": 3}}, "must have the key kind, as in {kind: file.py:Name, option: 1}"),
        (
            {"train__sampling": {"kind": "cyclic", "candidates": 3}},
            r"sampling=cyclic has no option 'candidates' \(it has none\)$",
        ),
        ({"train__sampling": CHOICE | {"candidate": 3}}, r"has no option 'candidate' \(did you mean 'candidates'"),
        ({"train__sampling": CHOICE | {"candidates": 2.5}}, "candidates must be a whole number of at least 1, not 2.5"),
        ({"train__sampling": CHOICE | {"cached": "no"}}, "cached must be true or false, not 'no'"),
        ({"train__sampling": {"kind": "oort", "seconds": -1}}, "seconds must be above 0"),
        ({"train__sampling": {"kind": "oort", "alpha": 3}}, "alpha needs seconds"),
        ({"train__sampling": {"kind": "oort", "seconds": 3}}, "seconds are those of the virtual clock, and there is"),
        ({"train__sampling": CHOICE, "train__cohort_size": 6}, "candidates=5 must be at least 6"),
        ({"train__sampling": CHOICE | {"candidates": 5000}, "train__cohort_size": 2}, "and at most"),
        ({"train__sampling": CHOICE, "train__cohort_size": 2, "system__latency_ms": 3}, "are not on the virtual clock"),
        (
            {"train__sampling": "cyclic", "train__cohort_size": 2, "system__mode": "buffered"},
            "draws clients one by one",
        ),
    ],
)
def test_what_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, **keys)
