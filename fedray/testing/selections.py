"""Contract tests of a selection. To test yours, subclass :class:`SelectionContract` in a test file of pytest.

from fedray.testing import SelectionContract

class TestMine(SelectionContract):
    selection = {"kind": "mine.py:Mine", "option": 3}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.named import named_selection
from fedray.experiment.resolve import resolve
from fedray.selection import SELECTIONS, Chosen, Known, Losses, Selection
from fedray.selection.selection import chosen_by
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.testing.extensions import small_run
from fedray.testing.pickling import pickling_workers
from fedray.usercode.extensions import Entry

HOLDERS = np.array([0, 2, 3, 5, 6, 8, 9, 11, 12])
"""The clients of the tests that hold samples; others of their numbers hold none."""

ROUNDS = (1, 2, 7, 40)


class SelectionContract:
    """Tests that every selection must pass. A selection chooses the clients that take part in a round
    (``train.sampling``), of which nine hold samples here.

    To test a selection, set ``selection`` in a subclass in a test file of pytest, as in
    ``selection = "mine.py:Mine"``.
    """

    selection: ClassVar[Entry]
    """The value of ``train.sampling``: file.py:Name or module:Name, a mapping with ``kind`` and options, or the name of
    a selection that comes with fedray."""

    count: ClassVar[int] = 3
    """How many clients it chooses."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Further keys of the runs, by dotted name, such as those of a virtual clock."""

    def made(self) -> Selection:
        """Returns a new instance of the selection, as a run makes it."""
        return named_selection(self.selection)

    def known(self, round: int, count: int) -> Known:
        """Returns what a selection may know when it chooses ``count`` clients in ``round``. In the first round no
        client has taken part, and later all but two. Of the server's columns it has those that the selection names."""
        rng = np.random.Generator(np.random.Philox(key=round))
        sizes, latest = rng.integers(1, 50, len(HOLDERS)), rng.integers(1, max(round, 2), len(HOLDERS))
        seen = HOLDERS[:0] if round == 1 else np.sort(rng.permutation(HOLDERS)[2:])
        selection = self.made()

        def ask(clients: NDArray[np.int64]) -> Losses:
            return Losses(2 + np.sin(clients * round), 3 + np.cos(clients * round))

        return Known(
            round=round,
            count=count,
            ids=HOLDERS.copy(),
            sizes=sizes,
            seed=5,
            data_seed=6,
            latest=dict(zip(seen.tolist(), latest.tolist(), strict=False)),
            columns={
                name: dict(zip(seen.tolist(), rng.exponential(size=len(seen)).tolist(), strict=True))
                for name in selection.columns
            },
            ask=ask,
            asks=selection.asks,
        )

    def test_it_chooses_as_many_clients_as_are_wanted(self) -> None:
        """Checks that the selection chooses as many clients as a run asks for: each once, sorted, and only such that
        hold samples. One that can't choose so many says so in ``check``. It may use no column of the server that it
        does not name, and ask no more clients for their losses than it says."""
        for number in ROUNDS:
            for count in self._counts():
                chosen = chosen_by(self.made(), self.known(number, count))
                assert set(chosen.ids.tolist()) <= set(HOLDERS.tolist())
                assert len(chosen.ids) == count

    def test_a_choice_follows_from_what_is_known(self) -> None:
        """Checks that the selection chooses the same clients, by the same numbers, whenever the same is known. It must
        remember nothing of earlier rounds, and draw from ``known.rng`` alone. Otherwise a run that is resumed would
        choose other clients."""
        often = self.made()
        for number in (*ROUNDS, *ROUNDS):
            one, other = (chosen_by(each, self.known(number, self.count)) for each in (often, self.made()))
            assert one.ids.tolist() == other.ids.tolist(), f"other clients are chosen in round {number}"
            assert _numbers(one) == _numbers(other), f"clients are chosen by other numbers in round {number}"

    def test_it_changes_nothing(self) -> None:
        """Checks that the selection changes nothing of what it is told."""
        for number in ROUNDS:
            known = self.known(number, self.count)
            before = copy.deepcopy((known.ids, known.sizes, known.latest, known.columns))
            chosen_by(self.made(), known)
            after = known.ids, known.sizes, known.latest, known.columns
            assert repr(after) == repr(before), "the selection has changed what it was told"

    def test_it_is_part_of_the_result(self, tmp_path: Path) -> None:
        """Checks that a run records the code of a user-defined selection among its inputs, so that a run folder is not
        continued with another version of it."""
        keys = {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(tmp_path), **self.settings}
        keys |= {"train.cohort_size": self.count}
        with_it, without = (
            resolve(load(keys | {"train.sampling": each}), CustomObjects(small_source()))[0].inputs
            for each in (self.selection, "uniform")
        )
        user_defined = type(self.made()) not in SELECTIONS.values()
        assert set(with_it) - set(without) == ({"code of train.sampling"} if user_defined else set())

    def test_a_run_has_the_same_cohorts_on_workers_and_in_parts(self, tmp_path: Path) -> None:
        """Checks that a run has the same cohorts, model and tables to the bit with one worker and with two to which
        everything is pickled, as on Ray, and if it is stopped and resumed."""
        keys = {key.replace(".", "__"): value for key, value in self.settings.items()}
        keys |= {"train__sampling": self.selection, "train__cohort_size": self.count, "run__checkpoint_every": 1}
        whole = small_run(tmp_path / "whole", **keys)
        for workers in (1, 2):
            with pickling_workers(workers):
                assert_same(whole, small_run(tmp_path / str(workers), **keys))
        small_run(tmp_path / "parts", [lambda report: report.round == 3], **keys)
        assert_same(whole, small_run(tmp_path / "parts", **keys))

    def _counts(self) -> Iterator[int]:
        for count in {1, self.count, len(HOLDERS)}:
            try:
                self.made().check(count, len(HOLDERS))
            except ValueError:
                assert count != self.count
            else:
                yield count


def _numbers(chosen: Chosen) -> str:
    return "none" if chosen.why is None else repr(chosen.why.tolist())
