"""Processes that Ray kills because the machine's memory runs out are started again, as others that die are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from processes import environment
from sweeps_on_ray import described

MODEL = """
import os, time
import ray
from torch import nn

class Greedy(nn.Module):
    '''In the first process of the cluster that computes with it, takes memory until it is killed.'''

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x):
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            self.be_greedy()
        return self.layer(x.flatten(1))

    def be_greedy(self):
        try:
            os.close(os.open(os.environ["GREEDY"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        taken = []
        while len(taken) < 60:
            taken.append(bytearray(os.urandom(1)) * 2**28)
            time.sleep(0.1)
        raise RuntimeError("nobody minded")
"""


def memory() -> dict[str, int]:
    """Bytes of this machine's memory, by Linux's names."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


@pytest.mark.slow
@pytest.mark.skipif(memory()["MemAvailable"] < 12e9, reason="needs 12 GB of free memory")
@pytest.mark.parametrize("command", ["run", "tune"])
def test_killed_by_rays_memory_monitor(command: str, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(MODEL)
    space = described(data__source="problem:source", model__name="greedy:Greedy", run__checkpoint_every=1)
    del space["base"]["model.hidden"]
    if command == "run":
        own = {**space["base"], "engine.kind": "ray", "engine.actors": 2, "run.output": str(tmp_path)}
    else:
        own = {**space, "tune": {"trials": 4, "output": str(tmp_path)}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(own))
    now = memory()
    limit = {
        "RAY_memory_usage_threshold": f"{(now['MemTotal'] - now['MemAvailable'] + 7e9) / now['MemTotal']:.3f}",
        "RAY_memory_monitor_refresh_ms": "100",
        "GREEDY": str(tmp_path / "was-here"),
        "PYTHONPATH": f"{environment()['PYTHONPATH']}{os.pathsep}{tmp_path}",
    }
    program = Path(sys.modules["fedray"].__path__[0]) / "run.py"
    done = subprocess.run(
        [sys.executable, str(program), command, str(tmp_path / "s.yaml"), "engine.address=local"],
        env={**environment(), **limit}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    line = (
        r"(died: .* killed due to the node running low on memory.*; it continues from its"
        r"|the server actor on .* ran out of memory; going back to the) last check"
    )
    assert re.search(line, done.stdout)
    assert "Traceback" not in done.stdout
