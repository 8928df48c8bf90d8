"""Contract tests of callbacks and upload steps. To test yours, subclass one of the classes here in a test file of
pytest.

from fedray.testing import UploadContract

class TestClip(UploadContract):
    step = {"name": "mine.py:Clip", "norm": 0.5}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedray.api import simulate
from fedray.config import load
from fedray.core.upload import UploadRows, UploadStep
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult
from fedray.uploads import STEPS
from fedray.usercode.extensions import Entry, make


def small_run(folder: Path, callbacks: Any = (), **changes: Any) -> RunResult:
    """Makes a run of FedAvg on a small data set and returns its result. The run folder is created in ``folder``.
    ``changes`` replace keys of the configuration; in their names ``__`` stands for a dot, as in ``run__rounds=2``."""
    settings = {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(folder)}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return simulate(settings, data=small_source(), callbacks=callbacks)


class CallbackContract:
    """Tests that every callback must pass. A callback is a function or object of the user's that is called as a run
    goes on.

    To test a callback, set ``callback`` in a subclass in a test file of pytest, as in ``callback = "mine.py:Watch"``.
    """

    callback: ClassVar[Entry]
    """The entry of ``run.callbacks``: file.py:Name or module:Name, or a mapping with ``name`` and options."""

    def test_it_changes_no_bit(self, tmp_path: Path) -> None:
        """Checks that a run has the same model and tables to the bit with the callback and without it."""
        assert_same(small_run(tmp_path / "with", run__callbacks=[self.callback]), small_run(tmp_path / "without"))

    def test_a_run_with_it_can_be_resumed(self, tmp_path: Path) -> None:
        """Checks that a run with the callback can be stopped and resumed, with a new instance of the callback. It must
        end with the same model and tables as a run without the callback that was never stopped."""
        keys = {"run__callbacks": [self.callback], "run__checkpoint_every": 2}
        small_run(tmp_path / "parts", [lambda report: report.round == 3], **keys)
        assert_same(small_run(tmp_path / "parts", **keys), small_run(tmp_path / "whole"))


class UploadContract:
    """Tests that every upload step must pass. An upload step (``train.upload``) changes what clients send before the
    server sums it, for example by clipping or noise.

    To test a step, set ``step`` in a subclass in a test file of pytest, as in ``step = "mine.py:Clip"``.
    """

    step: ClassVar[Entry]
    """The entry of ``train.upload``: file.py:Name or module:Name, a mapping with ``name`` and options, or a step that
    comes with fedray, as ``{topk: 0.1}``."""
    before: ClassVar[Sequence[Entry]] = ()
    """The entries of ``train.upload`` before it, for a step that depends on them, as ``[{clip: 1.0}]`` for noise."""

    def made(self) -> Any:
        """Returns a new instance of the upload step, which knows the steps before it."""
        steps = [make(entry, "train.upload", STEPS) for entry in (*self.before, self.step)]
        for number, step in enumerate(steps):
            if isinstance(step, UploadStep):
                step.follows(steps[:number])
        return steps[-1]

    def sent(self, rows: Tensor, clients: list[int], kept: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Applies a new instance of the upload step to the uploads of some clients, as a run does.

        Args:
            rows: The uploads ``[C, width]`` of C clients, one in each row. They are not changed.
            clients: The numbers of these clients.
            kept: The rows that the step stored for these clients at their last participation, or None.

        Returns:
            The rows that the clients send instead, and the rows that the step stores for their next participation (None
            if it stores nothing).
        """
        upload = UploadRows("y", "train", 3, clients, 0, 0, kept)
        found: Tensor = self.made()(rows.clone(), upload)
        return found, upload.kept

    def test_it_treats_each_row_by_itself(self) -> None:
        """Checks that the step treats each client separately. What a client sends must be the same to the bit whether
        the step is applied to several clients together or to this client alone, and when it is repeated. What the step
        stores for the client must also be the same with other clients and alone."""
        step, clients = self.made(), [4, 7, 9]
        numbers = np.random.Generator(np.random.Philox(key=1)).normal(size=(2, 3, 50)).astype(np.float32)
        rows, before = torch.from_numpy(numbers)
        kept = before if getattr(step, "keeps", False) else None
        together, kept_together = self.sent(rows, clients, kept)
        assert together.shape == rows.shape
        assert together.dtype == rows.dtype
        assert torch.equal(self.sent(rows, clients, kept)[0], together), "the same rows were sent differently"
        for row, client in enumerate(clients):
            part = slice(row, row + 1)
            alone, kept_alone = self.sent(rows[part], [client], None if kept is None else kept[part])
            assert torch.equal(alone, together[part]), "a client alone sends something else"
            if kept is not None:
                assert kept_alone is not None
                assert kept_together is not None
                assert torch.equal(kept_alone, kept_together[part]), "a client alone keeps something else"

    def test_it_is_part_of_the_result(self, tmp_path: Path) -> None:
        """Checks that a run records the code of the step among its inputs, so that a run with the step and a run
        without it are not taken for the same run."""
        with_step, without = (
            resolve(load(self._keys(tmp_path, steps)), CustomObjects(small_source()))[0]
            for steps in ([*self.before, self.step], self.before)
        )
        last = len(self.before) + 1
        assert set(with_step.inputs) - set(without.inputs) == {f"step {last} of train.upload"}

    def test_a_run_has_the_same_bits_in_chunks_and_in_parts(self, tmp_path: Path) -> None:
        """Checks that a run with the step has the same model and tables to the bit if workers get clients one by one
        (``engine.chunk=1``), and if the run is stopped and resumed."""
        keys = {"train__upload": [*self.before, self.step], "run__checkpoint_every": 2}
        whole = small_run(tmp_path / "whole", **keys)
        assert_same(whole, small_run(tmp_path / "chunks", engine__chunk=1, **keys))
        small_run(tmp_path / "parts", [lambda report: report.round == 3], **keys)
        assert_same(whole, small_run(tmp_path / "parts", **keys))

    def _keys(self, folder: Path, steps: Sequence[Entry]) -> dict[str, Any]:
        return {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(folder), "train.upload": [*steps]}
