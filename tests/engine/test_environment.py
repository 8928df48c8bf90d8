"""The environment variables of the processes that compute, and who else gets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedray.engine import environment
from fedray.engine.environment import ALLOCATOR, CUBLAS, LATER, PORTABLE, given_to_cluster, runtime_env


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has started no cluster."""
    monkeypatch.setattr(environment, "_of_cluster", {})


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(("threads", "portable"), [(1, False), (3, True)])
def test_processes_of_a_cluster_that_is_there_are_given_them(threads: int, portable: bool) -> None:
    given = runtime_env(threads, portable)
    assert given is not None
    assert given["env_vars"].items() >= ALLOCATOR.items()
    later = json.loads(given["env_vars"][LATER])
    assert later == {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **CUBLAS, **(PORTABLE if portable else {}),
    }  # fmt: skip


@pytest.mark.usefixtures("no_cluster")
def test_a_cluster_that_has_them_needs_none_unless_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    with given_to_cluster(1, False):
        assert os.environ.items() >= ALLOCATOR.items()
        # this process may be importing torch at this moment
        assert os.environ.get("OMP_NUM_THREADS") == before.get("OMP_NUM_THREADS")
    assert dict(os.environ) == before
    assert runtime_env(1, False) is None
    assert runtime_env(2, False) is not None
    assert runtime_env(1, True) is not None
    monkeypatch.setattr(sys, "path", [*sys.path, "/another/folder/of/modules"])
    assert runtime_env(1, False) is not None


@pytest.mark.usefixtures("no_cluster")
def test_a_cluster_that_did_not_start_has_none() -> None:
    before = dict(os.environ)
    with pytest.raises(OSError, match="no room"), given_to_cluster(1, False):
        raise OSError("no room")
    assert dict(os.environ) == before
    assert runtime_env(1, False) is not None


PROGRAM = """
import json, os, ray
from fedray.config import EngineConfig
from fedray.engine.environment import runtime_env
from fedray.engine.ray.start import RayStart

def variables():
    import fedray
    return dict(os.environ)

with RayStart(EngineConfig(threads=3), lambda line: None, True) as start:
    start.ready()
    given = runtime_env(3, False), runtime_env(2, True)
    found = [ray.get(ray.remote(variables).options(runtime_env=each).remote()) for each in given]
print(json.dumps([given[0], runtime_env(3, False) is None, dict(os.environ), *found]))
"""


@pytest.mark.slow
def test_in_a_cluster_that_fedray_starts(tmp_path: Path) -> None:
    before = {name: value for name, value in os.environ.items() if name not in (*ALLOCATOR, "OMP_NUM_THREADS")}
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM], env={**before, "RAY_TMPDIR": str(tmp_path)})
    given, still, own, plain, other = json.loads(printed)
    assert (given, still) == (None, False)
    assert not own.keys() & {*ALLOCATOR, LATER, "OMP_NUM_THREADS"}
    assert {**ALLOCATOR, **CUBLAS, "OMP_NUM_THREADS": "3"}.items() <= plain.items()
    assert {**ALLOCATOR, **CUBLAS, **PORTABLE, "OMP_NUM_THREADS": "2"}.items() <= other.items()
    assert not plain.keys() & PORTABLE.keys()
