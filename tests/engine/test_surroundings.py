"""In odd surroundings (users, folders, variables, terminals, disks) a run gives the plain run's model, or one line."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from own_process import SETTINGS, model_of, refused, run

from fedray import UserError, simulate

LOCAL = "engine.kind=local"
NOBODY = 12345
"""A user without an entry in the system's list of users."""

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the plain run."""
    result = simulate({**SETTINGS, "engine.kind": "local", "run.output": str(tmp_path_factory.mktemp("plain"))})
    return result.summary["model_sha256"]


VARIABLES: dict[str, dict[str, str | None]] = {
    "odd": {
        "OMP_NUM_THREADS": "7", "COLUMNS": "1", "TERM": "dumb", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "1",
        "PYTHONOPTIMIZE": "2",
    },
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "folders that are not there": {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": None, "TMPDIR": "/proc/nowhere"},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [pytest.param(each, id=name, marks=() if name == "odd" else pytest.mark.slow) for name, each in VARIABLES.items()],
)
def test_variables(plain: str, tmp_path: Path, change: Mapping[str, str | None]) -> None:
    done = run(tmp_path, LOCAL, change=change)
    assert done.returncode == 0, done.stderr
    assert model_of(tmp_path) == plain


def test_letters_that_the_terminal_does_not_have(plain: str, tmp_path: Path) -> None:
    (tmp_path / "eigene_größe.py").write_text(
        "from fedray.models import Logistic\nclass Größe(Logistic):\n    pass\n", encoding="utf-8"
    )
    own = ("model.name=eigene_größe.py:Größe", "run.name=läuft-日本", "run.output=ausgäbe")
    done = run(tmp_path, LOCAL, *own, change={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"l\xe4uft-\u65e5\u672c" in done.stdout
    assert model_of(tmp_path / "ausgäbe" / "läuft-日本") == plain


def test_a_locale_without_the_letters_of_a_files_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run.name: läuft", encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    assert "LC_ALL=C.UTF-8" in refused(run(tmp_path, LOCAL, "config.yaml", change=ascii_only))


def test_closed_streams(plain: str, tmp_path: Path) -> None:
    def close() -> None:
        for stream in (0, 1, 2):
            os.close(stream)

    assert run(tmp_path, LOCAL, preexec_fn=close, stdout=None, stderr=None).returncode == 0
    assert model_of(tmp_path) == plain


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def remove() -> None:
        gone.rmdir()

    assert "working directory" in refused(run(gone, LOCAL, preexec_fn=remove))


def as_nobody(*without: str) -> dict[str, Any]:
    """Returns how a run is started by a user without an entry and a home folder, who may read all files here, because
    Python itself may lie in the home folder of root."""
    may_read = "+dac_read_search,+dac_override"
    return {
        "before": ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", f"--inh-caps={may_read}",
                   f"--ambient-caps={may_read}"),
        "change": {"HOME": None, "XDG_CACHE_HOME": None, "USER": None, "LOGNAME": None},
    }  # fmt: skip


@needs_root
def test_a_user_without_a_home_folder(plain: str, tmp_path: Path) -> None:
    how = as_nobody()
    done = run(tmp_path, LOCAL, **how)
    assert done.returncode == 0, done.stderr
    assert model_of(tmp_path) == plain
    assert "there is no home folder" in refused(run(tmp_path, LOCAL, "data.source=npz", "data.root=~/x.npz", **how))


@needs_root
@pytest.mark.slow
def test_ray_below_a_deep_folder_for_a_user_without_a_home_folder(plain: str, tmp_path: Path) -> None:
    """Paths of Ray's sockets would be longer than the 107 bytes that the system allows."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    how = as_nobody()
    how["change"] |= {"RAY_TMPDIR": None, "TMPDIR": str(deep)}
    done = run(tmp_path, "engine.kind=ray", "engine.address=local", **how)
    assert done.returncode == 0, done.stderr
    assert model_of(tmp_path) == plain
    # Ray's files were where the user wants them, and none are left
    assert [*deep.glob("fedray-*/ray/*")] == []
    assert [*deep.glob("fedray-*/ray")] != []


def with_limit(size: int) -> Callable[[], None]:
    """Returns a function that keeps this process and its children from writing longer files, as a full disk would."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_no_room(tmp_path: Path) -> None:
    line = refused(run(tmp_path, LOCAL, preexec_fn=with_limit(20_000)))
    assert line.startswith(f"can't write {tmp_path}/runs/fedavg-sample/checkpoints: File too large; make room")
    # the same command goes on
    assert run(tmp_path, LOCAL).returncode == 0


@pytest.mark.parametrize(
    ("size", "keys", "file"),
    [
        (20_000, {"run.checkpoint_every": 0}, "model.safetensors"),
        (400, {}, "config.yaml"),
    ],
)
def test_no_room_in_a_run_from_python(tmp_path: Path, size: int, keys: dict[str, Any], file: str) -> None:
    config = {**SETTINGS, "engine.kind": "local", "run.output": str(tmp_path), **keys}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(UserError, match=rf"can't write {tmp_path}/fedavg-sample/{file}: File too large"):
            simulate(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
