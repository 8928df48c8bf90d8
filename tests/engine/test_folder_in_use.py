"""A run whose folder another process still writes to: it says so at once, and begins when the folder is free."""

import contextlib

import pytest

from fedray import simulate
from fedray.config import load
from fedray.testing.contracts import small_source
from fedray.tracking.folder import RunFolder
from fedray.tracking.progress import Display


class Frees(Display):
    """Ends whatever has the folder as soon as the line is shown that says so."""

    def __init__(self, holder):
        super().__init__(quiet=True)
        self.holder, self.lines = holder, []

    def say(self, line):
        self.lines.append(line)
        if "is in use by" in line:
            self.holder.close()


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_folder_in_use_is_said_at_once(kind, tmp_path, ray_cluster):
    config = load(
        {"run.output": str(tmp_path), "run.name": "run", "run.rounds": 1, "algorithm.name": "fedavg",
         "model.name": "logistic", "data.clients": 3, "engine.kind": kind, "engine.actors": 1,
         "engine.cpus_per_actor": 0.1}
    )  # fmt: skip
    with contextlib.ExitStack() as holder:
        holder.enter_context(RunFolder(config, {}).lock(print))
        display = Frees(holder)
        result = simulate(config, data=small_source(), display=display)
    assert result.summary["status"] == "completed"
    (line,) = [line for line in display.lines if "is in use by" in line]
    assert line.startswith(f"{tmp_path / 'run'} is in use by process ")
    assert line.endswith("; waiting up to 20 s for it to end ...")
