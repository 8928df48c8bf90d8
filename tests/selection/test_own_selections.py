"""Selections of the user's: what they are told, what of theirs is refused in a line, and which contract finds it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from small_runs import run

from fedray import UserError
from fedray.algorithms.fedavg import FedAvg
from fedray.errors import ClientError
from fedray.selection import LOSS, ROOT_MEAN_SQUARE, Chosen, Selection
from fedray.selection.oort import Oort
from fedray.selection.uniform import Uniform
from fedray.testing import SelectionContract

HERE = __name__
KEYS = {"train__cohort_size": 2, "run__rounds": 4, "run__checkpoint_every": 1}


class Struggling(Selection):
    """Some of those whose losses were largest, or will be."""

    why = "selection_loss"

    def __init__(self, among=4, fresh=False):
        self.among, self.fresh = among, fresh
        self.columns, self.asks = (() if fresh else (LOSS,)), (among if fresh else 0)

    def check(self, count, clients):
        if not count <= self.among <= clients:
            raise ValueError(f"among={self.among} is less than {count} or more than {clients}")

    def choose(self, known):
        drawn = known.draw(self.among)
        losses = known.losses(drawn).mean if self.fresh else known.column(LOSS, drawn, np.inf)
        places = np.sort(np.argsort(-losses, kind="stable")[: known.count])
        return Chosen(drawn[places], losses[places])


class ByNumber(Selection):
    """By a number that the algorithm notes of its clients."""

    columns = ("norm",)

    def choose(self, known):
        numbers = known.column("norm", missing=np.inf)
        return Chosen(np.sort(known.ids[np.argsort(-numbers, kind="stable")[: known.count]]))


class Noting(FedAvg):
    def server_update(self, server, phase, sums, scalars):
        super().server_update(server, phase, sums, scalars)
        server.column("norm").update(dict.fromkeys(server.cohort.ids, float(server.round)))


class TestStruggling(SelectionContract):
    selection = {"kind": f"{HERE}:Struggling", "among": 6}


class TestFresh(SelectionContract):
    selection = {"kind": f"{HERE}:Struggling", "fresh": True}


def test_options_and_columns(tmp_path):
    """What is drawn is a uniform cohort of ``among``, and the columns say why."""
    for fresh in (False, True):
        sampling = {"kind": f"{HERE}:Struggling", "among": 3, "fresh": fresh}
        made = run(tmp_path / str(fresh), train__sampling=sampling, **KEYS)
        among = run(tmp_path / "among", **KEYS | {"train__cohort_size": 3})
        for number, rows in made.clients.groupby("round"):
            drawn = among.clients[among.clients["round"] == number]
            assert set(rows.client) < set(drawn.client)
            assert rows.selection_loss.notna().all()


def test_a_column_of_the_algorithm(tmp_path):
    sampling = f"{HERE}:ByNumber"
    made = run(tmp_path / "made", f"{HERE}:Noting", train__sampling=sampling, **KEYS)
    cohorts = [rows.client.tolist() for _, rows in made.clients.groupby("round")]
    # whoever never took part comes first, and then who took part last
    assert cohorts == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"ByNumber uses the column 'norm', and fedavg does not fill it"):
        run(tmp_path / "other", train__sampling=sampling, **KEYS)


class Returning(Selection):
    """Returns what a test says."""

    found = None

    def choose(self, known):
        return type(self).found


class Explained(Returning):
    why = "selection_mine"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"train.sampling: Returning.choose of round 1: it must return Chosen\(ids\), not NoneType"),
        ([0, 1], r"it must return Chosen\(ids\), not list"),
        (Chosen(None), "clients must be a row of whole numbers, their ids, not None"),
        (Chosen(np.array([0.0, 1.0])), r"clients must be .*, not \[2\] float64"),
        (Chosen(np.array([True, True])), r"clients must be .*, not \[2\] bool"),
        (Chosen(np.array([[0, 1]])), r"clients must be .*, not \[1, 2\] int64"),
        (Chosen(np.array([1, 0])), "clients must be sorted by their ids"),
        (Chosen(np.array([1, 1])), "client 1 is there twice"),
        (Chosen(np.array([0, 99])), "there is no client 99 that holds samples"),
        (Chosen(np.array([-1, 0])), "there is no client -1 that holds samples"),
        (Chosen(np.array([0])), "it chose 1 clients instead of 2"),
        (Chosen(np.array([0, 1, 2])), "it chose 3 clients instead of 2"),
        (Chosen([0, 1], [1.0, 2.0]), "Chosen needs numbers `why` if the class names a column `why` for them"),
    ],
)
def test_wrong_choices_are_one_line(found, message, tmp_path, monkeypatch):
    monkeypatch.setattr(Returning, "found", found)
    with pytest.raises(UserError, match=message) as raised:
        run(tmp_path, train__sampling=f"{HERE}:Returning", **KEYS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("why", [None, [1.0], ["a", "b"], [[1.0, 2.0]]])
def test_wrong_reasons_are_one_line(why, tmp_path, monkeypatch):
    monkeypatch.setattr(Returning, "found", Chosen([0, 1], why))
    with pytest.raises(UserError, match=r"Explained.choose of round 1: .*`why`"):
        run(tmp_path, train__sampling=f"{HERE}:Explained", **KEYS)


class Failing(Selection):
    def choose(self, known):
        raise KeyError("mine")


class NotNamed(Selection):
    def choose(self, known):
        return Chosen(known.ids[known.column(LOSS) > 0])


class Greedy(Selection):
    asks = 1

    def choose(self, known):
        known.losses(known.ids[:2])
        return Chosen(known.draw(known.count))


class Overwriting(Selection):
    def choose(self, known):
        known.ids[:] = known.ids[::-1]
        return Chosen(known.ids[: known.count])


class Reported(Selection):
    why = "loss"

    def choose(self, known):
        return Chosen(known.draw(known.count), np.zeros(known.count))


class Letters(Selection):
    columns = LOSS

    def choose(self, known):
        return Chosen(known.draw(known.count))


class NoChoice(Selection):
    def chose(self, known):
        return Chosen(known.draw(known.count))


class Many(Selection):
    def choose(self, known):
        return Chosen(known.draw(known.count))

    def check(self, count, clients):
        if clients < 100:
            raise ValueError("it needs a hundred clients")


class Subclass(Uniform):
    pass


class Useful(Selection):
    columns = (ROOT_MEAN_SQUARE,)

    def choose(self, known):
        return Chosen(known.draw(known.count))


def function(known):
    return Chosen(known.ids[:2])


@pytest.mark.parametrize(
    ("name", "message", "keys"),
    [
        ("Failing", "train.sampling: Failing.choose failed in round 1: KeyError: 'mine' .test_own_selections.py", {}),
        ("NotNamed", "the selection's `columns` do not name 'loss when it last took part'", {}),
        ("Greedy", "known.losses asks 2 clients, and the selection's `asks` is 1", {}),
        ("Overwriting", "Overwriting.choose failed in round 1: ValueError: .*read-only", {}),
        ("Reported", "`why` is the name of a column and must begin with selection_, not be 'loss'", {}),
        ("Letters", "`columns` must be a tuple of names, not 'loss when it last", {}),
        ("NoChoice", r"NoChoice must be a selection, a class with the method choose\(known\): it lacks it", {}),
        ("function", "function must be a selection, .*: it is no subclass of fedray.selection.Selection", {}),
        ("Many", "Many can't choose 2 of 9 clients: ValueError: it needs a hundred clients", {}),
        ("Wrong", "has no 'Wrong'", {}),
        ("Useful", "goes by losses of one model, and ifca has several", {"algorithm__name": "ifca"}),
        ("Struggling", "epsilon is that of clients drawn uniformly", {"privacy__noise": 1.0}),
        ("Subclass", "epsilon is that of clients drawn uniformly", {"privacy__noise": 1.0}),
    ],
)
def test_what_is_refused(name, message, keys, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, **KEYS | keys | {"train__sampling": f"{HERE}:{name}"})


class Deaf(Selection):
    """It catches whatever happens while clients compute."""

    asks = 2

    def choose(self, known):
        with contextlib.suppress(Exception):
            known.losses(known.ids[:2])
        return Chosen(known.draw(known.count))


class Breaking(FedAvg):
    def candidates(self, client):
        raise RuntimeError("mine")


@pytest.mark.parametrize("sampling", [f"{HERE}:Deaf", {"kind": "power_of_choice", "candidates": 3}])
def test_errors_of_clients_stay_theirs(sampling, tmp_path):
    """They are no errors of the selection, which may not catch them either, as the run goes by them."""
    with pytest.raises(ClientError, match="failed in phase candidates of round 1"):
        run(tmp_path, f"{HERE}:Breaking", train__sampling=sampling, **KEYS)


class Counting(Selection):
    """Remembers how often it was asked."""

    def __init__(self):
        self.calls = 0

    def choose(self, known):
        self.calls += 1
        return Chosen(np.sort(np.roll(known.ids, self.calls)[: known.count]))


class Unseeded(Selection):
    def choose(self, known):
        return Chosen(np.sort(np.random.permutation(known.ids)[: known.count]))  # noqa: NPY002


class Fixed(Selection):
    def choose(self, known):
        return Chosen(known.ids[:3])


class Noted(Selection):
    """Changes a column."""

    columns = (LOSS,)

    def choose(self, known):
        known.columns[LOSS][2] = 5.0
        return Chosen(known.draw(known.count))


class Clear(Oort):
    """A user's version of what comes with fedray."""


@pytest.mark.parametrize(
    ("name", "test", "error", "message"),
    [
        ("Counting", "test_a_choice_follows_from_what_is_known", AssertionError, "other clients are chosen in round"),
        ("Unseeded", "test_a_choice_follows_from_what_is_known", AssertionError, "other clients are chosen in round"),
        ("Fixed", "test_it_chooses_as_many_clients_as_are_wanted", UserError, "it chose 3 clients instead of"),
        ("NotNamed", "test_it_chooses_as_many_clients_as_are_wanted", UserError, "do not name"),
        ("Greedy", "test_it_chooses_as_many_clients_as_are_wanted", UserError, "asks 2 clients"),
        ("Overwriting", "test_it_changes_nothing", UserError, "read-only"),
        ("Noted", "test_it_changes_nothing", AssertionError, "has changed what it was told"),
    ],
)
def test_the_contract_finds_wrong_selections(name, test, error, message):
    contract = type("TestWrong", (SelectionContract,), {"selection": f"{HERE}:{name}"})()
    with pytest.raises(error, match=message):
        getattr(contract, test)()


def test_the_contract_finds_what_a_resumed_run_would_forget(tmp_path):
    contract = type("TestWrong", (SelectionContract,), {"selection": f"{HERE}:Counting"})()
    with pytest.raises(AssertionError):
        contract.test_a_run_has_the_same_cohorts_on_workers_and_in_parts(tmp_path)


def test_a_run_folder_is_not_continued_with_other_code(tmp_path, monkeypatch):
    run(tmp_path, train__sampling=f"{HERE}:Clear", **KEYS)
    monkeypatch.setattr(Clear, "why", "selection_other")
    with pytest.raises(UserError, match=r"code of train.sampling differs"):
        run(tmp_path, train__sampling=f"{HERE}:Clear", **KEYS | {"run__rounds": 5})
