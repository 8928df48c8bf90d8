"""The environment variables of the processes that compute, and who else gets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedray.engine import environment
from fedray.engine.environment import ALLOCATOR, CUBLAS, PORTABLE, PROCESS, given_to_cluster, runtime_env


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
    assert json.loads(given["env_vars"][PROCESS])["variables"] == {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **CUBLAS, **(PORTABLE if portable else {}),
    }  # fmt: skip


def test_processes_find_a_checkout_that_a_folder_of_its_name_would_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed with `pip install -e`, it is in no path, and Ray's processes look in the working directory first."""
    checkout = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if os.path.abspath(entry) != checkout])
    assert environment.environment(1, False)["PYTHONPATH"] == checkout
    # in an environment, which all have
    monkeypatch.setattr(environment, "__file__", f"{sys.prefix}/lib/python3/site-packages/fedray/engine/x.py")
    assert environment.environment(1, False)["PYTHONPATH"] == ""


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
import json, os, ray, sys, sysconfig
from fedray.config import EngineConfig
from fedray.engine.environment import runtime_env
from fedray.engine.ray.start import RayStart

def found():
    import fedray
    return dict(os.environ), sys.path

sys.path[:] = [os.environ["FIRST"], *sys.path, os.environ["LAST"]]

with RayStart(EngineConfig(threads=3), lambda line: None, True) as start:
    start.ready()
    given = runtime_env(3, False), runtime_env(2, True)
    own = [ray.get(ray.remote(found).options(runtime_env=each).remote()) for each in given]
print(json.dumps([given[0], runtime_env(3, False) is None, dict(os.environ), *own, sysconfig.get_path("stdlib")]))
"""


@pytest.mark.slow
def test_in_a_cluster_that_fedray_starts(tmp_path: Path) -> None:
    before = {name: value for name, value in os.environ.items() if name not in (*ALLOCATOR, "OMP_NUM_THREADS")}
    first, last = str(tmp_path / "first"), str(tmp_path / "last")
    changes = {"RAY_TMPDIR": str(tmp_path), "FIRST": first, "LAST": last}
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM], env={**before, **changes})
    given, still, own, (plain, path), (other, other_path), python = json.loads(printed)
    assert (given, still) == (None, False)
    assert not own.keys() & {*ALLOCATOR, PROCESS, "OMP_NUM_THREADS"}
    assert {**ALLOCATOR, **CUBLAS, "OMP_NUM_THREADS": "3"}.items() <= plain.items()
    assert {**ALLOCATOR, **CUBLAS, **PORTABLE, "OMP_NUM_THREADS": "2"}.items() <= other.items()
    assert not plain.keys() & PORTABLE.keys()
    for each in (path, other_path):
        assert each.index(first) < each.index(python) < each.index(last)
    # Ray itself does not look there
    assert first not in plain["PYTHONPATH"]
