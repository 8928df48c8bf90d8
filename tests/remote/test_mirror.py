"""What is at a URI is a state of the folder that is mirrored, whole at any moment and whoever dies."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fedray.errors import OutputLost, UserError
from fedray.remote import fetching, mirror, owner
from fedray.remote.fetching import as_path, fetch, fetch_new, fetched, fetched_place
from fedray.remote.local import scan
from fedray.remote.manifest import NAME, read_manifest
from fedray.remote.mirror import mirrored
from fedray.remote.storage import ATTEMPTS, Contact, Storage


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mirror, "PAUSE", 0.05)
    monkeypatch.setattr(mirror, "SILENCE", 1.5)
    monkeypatch.setattr(owner, "PATIENCE", 2.0)
    monkeypatch.setattr(fetching, "CHANGES", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def silent(line: str) -> None: ...


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def texts(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in 30 s"
        time.sleep(0.02)


def test_another_machine_goes_on_where_the_first_one_stopped(uri, tmp_path):
    one, other = tmp_path / "one" / "run", tmp_path / "other" / "run"
    with mirrored(uri, one, 60, silent):
        write(one, metrics="1\n", checkpoints__1="first", **{".hidden": "of this machine"})
        until(lambda: Storage(uri).read("metrics") == b"1\n")
        (one / "checkpoints" / "1").unlink()
        write(one, metrics="1\n2\n", checkpoints__2="second")
    assert texts(one) == {"metrics": "1\n2\n", "checkpoints/2": "second"}
    with mirrored(uri, other, 60, silent):
        assert texts(other) == texts(one)
        write(other, metrics="1\n2\n3\n", summary="done")
    # the first machine has an older state now
    with mirrored(uri, one, 60, silent):
        assert texts(one) == texts(other) == {"metrics": "1\n2\n3\n", "checkpoints/2": "second", "summary": "done"}
    assert sorted(Storage(uri).names()) == sorted([NAME, *texts(one)])


def test_what_was_not_sent_is_sent_the_next_time(s3, tmp_path):
    uri, folder, lines = s3.uri("unsent/run"), tmp_path / "run", list[str]()

    def write_while_it_is_frozen() -> None:
        with mirrored(uri, folder, 5, lines.append) as found:
            write(folder, metrics="1\n")
            until(lambda: Storage(uri).read("metrics") == b"1\n")
            with s3.frozen():
                write(folder, metrics="1\n2\n")
                wait_for_failure(found)

    with pytest.raises(OutputLost, match=r"has not answered since .*; what has been made is in .*same command goes on"):
        write_while_it_is_frozen()
    assert any(re.fullmatch(r"warning: no answer from s3://bucket/unsent/run since \S+; trying .*", x) for x in lines)
    assert texts(folder) == {"metrics": "1\n2\n"}
    assert Storage(uri).read("metrics") == b"1\n"
    with mirrored(uri, folder, 60, lines.append):
        until(lambda: Storage(uri).read("metrics") == b"1\n2\n")
    assert not any("fetching" in line for line in lines)


def test_the_first_state_is_sent_the_next_time(tmp_path):
    """Its files may be at the URI without the manifest: then nothing is visible there yet."""
    shared, folder, lines = tmp_path / "shared" / "run", tmp_path / "run", list[str]()
    in_the_way = shared / f"{NAME}.new"

    def write_where_no_manifest_can_be() -> None:
        with mirrored(f"file://{shared}", folder, 2, lines.append) as found:
            in_the_way.mkdir(parents=True)
            write(folder, metrics="1\n")
            wait_for_failure(found)

    with pytest.raises(OutputLost, match="same command goes on"):
        write_where_no_manifest_can_be()
    assert read_manifest(Storage(f"file://{shared}")) is None
    in_the_way.rmdir()
    write(folder, metrics="1\n2\n")
    with mirrored(f"file://{shared}", folder, 60, lines.append):
        assert texts(folder) == {"metrics": "1\n2\n"}
    assert texts(fetched(f"file://{shared}")) == {"metrics": "1\n2\n"}


def test_the_environment_may_name_the_server(s3, monkeypatch):
    Storage(s3.uri("named")).write("file", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    assert Storage("s3://bucket/named").read("file") == b"1"


def wait_for_failure(found: mirror.Mirror) -> None:
    stop = threading.Event()
    found.on_failure(stop)
    assert stop.wait(20)


def test_a_server_that_freezes_for_a_while_costs_nothing(s3, tmp_path):
    uri, folder = s3.uri("pause/run"), tmp_path / "run"
    lines: list[str] = []
    with mirrored(uri, folder, 60, lines.append):
        with s3.frozen():
            write(folder, metrics="1\n")
            until(lambda: any("no answer" in line for line in lines))
        until(lambda: Storage(uri).read("metrics") == b"1\n")
    assert lines[-1] == "s3://bucket/pause/run is up to date"


def test_an_error_of_the_run_is_the_one_that_is_shown_and_all_is_sent(uri, tmp_path):
    def fail() -> None:
        with mirrored(uri, tmp_path / "run", 60, silent):
            write(tmp_path / "run", log="the reason")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Storage(uri).read("log") == b"the reason"


def test_a_new_run_in_the_place_of_an_old_one_sets_it_aside(uri, tmp_path):
    folder = tmp_path / "run"
    with mirrored(uri, folder, 60, silent):
        write(folder, metrics="old\n", summary="old")
    # what prevents the new run before it has begun leaves the old one where it is
    with mirrored(uri, folder, 60, silent, anew=True):
        pass
    assert Storage(uri).read("metrics") == b"old\n"
    with mirrored(uri, folder, 60, silent, anew=True):
        folder.rename(tmp_path / "run.bak-1")
        write(folder, metrics="new\n")
    aside = Storage(uri.replace("/run", "/run.bak-1"))
    assert (aside.read("metrics"), aside.read("summary")) == (b"old\n", b"old")
    assert sorted(Storage(uri).names()) == [NAME, "metrics"]


def test_a_folder_of_its_own_and_another_state_at_the_uri_are_both_kept(uri, tmp_path):
    one, other, lines = tmp_path / "one" / "run", tmp_path / "other" / "run", list[str]()
    write(other, metrics="unsent\n")
    with mirrored(uri, one, 60, silent):
        write(one, metrics="sent\n")
    with mirrored(uri, other, 60, lines.append):
        assert texts(other) == {"metrics": "sent\n"}
    assert texts(other.with_name("run.bak-1")) == {"metrics": "unsent\n"}
    assert any(line.endswith(f"{other} is now {other}.bak-1") for line in lines)


def test_what_was_removed_at_the_uri_is_not_brought_back(uri, tmp_path):
    folder, lines = tmp_path / "run", list[str]()
    with mirrored(uri, folder, 60, silent):
        write(folder, metrics="1\n")
    for name in Storage(uri).names():
        Storage(uri).delete(name)
    with mirrored(uri, folder, 60, lines.append):
        assert not folder.exists()
    assert "there is nothing at" in lines[0]


WRITER = """
import sys, time
from pathlib import Path
from fedray.remote import mirror
mirror.PAUSE, mirror.SHARE = 0.02, 1
uri, folder = sys.argv[1], Path(sys.argv[2])
with mirror.mirrored(uri, folder, 60, print):
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    done = max((int(path.name) for path in checkpoints.iterdir()), default=0)
    (folder / ".metrics").write_text("".join(f"{n}\\n" for n in range(1, done + 1)))
    (folder / ".metrics").rename(folder / "metrics")
    for number in range(done + 1, 100000):
        with (folder / "metrics").open("a") as file:
            file.write(f"{number}\\n")
        new = checkpoints / f".{number}"
        new.write_text(f"{number} " * 1000)
        new.rename(checkpoints / str(number))
        (checkpoints / str(number - 1)).unlink(missing_ok=True)
        time.sleep(0.005)
"""
"""Writes what a run writes: a row, then a checkpoint that replaces the one before, over and over."""


def last_checkpoint(uri: str, folder: Path) -> int:
    """Fetches the state at ``uri``, checks that a run can be resumed from it, and returns its checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    fetch(Storage(uri), folder)
    found = texts(folder)
    rows = found.pop("metrics").split()
    numbers = [int(name.removeprefix("checkpoints/")) for name in found]
    for number in numbers:
        assert found[f"checkpoints/{number}"] == f"{number} " * 1000
    last = max(numbers, default=0)
    assert rows[:last] == [str(number) for number in range(1, last + 1)]
    return last


def test_whoever_reads_finds_a_whole_state_while_writers_are_killed(uri, tmp_path):
    folder, seen = tmp_path / "writer" / "run", [0]
    draws = random.Random(0)
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, uri, str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            before = read_manifest(Storage(uri))
            until(lambda before=before: read_manifest(Storage(uri)) not in (None, before))
            end = time.monotonic() + draws.uniform(0.2, 1.0)
            while time.monotonic() < end:
                seen.append(last_checkpoint(uri, tmp_path / "reader"))
        finally:
            writer.kill()
            writer.wait()
        seen.append(last_checkpoint(uri, tmp_path / "reader"))
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def begin(uri: str, folder: Path) -> None:
    with mirrored(uri, folder, 60, silent):
        raise AssertionError


def test_two_writers_are_noticed(uri, tmp_path):
    line = r"is being written by another run \(process \d+ on .*\); choose another name"
    with mirrored(uri, tmp_path / "one" / "run", 60, silent), pytest.raises(UserError, match=line):
        begin(uri, tmp_path / "two" / "run")


def test_a_writer_that_has_died_elsewhere_is_waited_for_and_then_replaced(uri, tmp_path):
    record = {"token": "x", "beat": 7, "number": 12, "node": "host3", "start": "1", "kernel": ["", ""]}
    Storage(uri).write(owner.NAME, json.dumps(record).encode())
    lines: list[str] = []
    with mirrored(uri, tmp_path / "run", 60, lines.append):
        write(tmp_path / "run", metrics="1\n")
    assert "is in use by process 12 on host3; waiting up to 2 s" in lines[0]
    assert "process 12 on host3 has not been heard of for 2 s: going on in its place" in lines
    assert Storage(uri).read("metrics") == b"1\n"


def test_a_writer_whose_place_was_taken_ends(uri, tmp_path):
    folder, stop = tmp_path / "run", threading.Event()

    def another_one_writes() -> bool:
        Storage(uri).write(owner.NAME, json.dumps({"token": "x", "number": 12, "node": "host3"}).encode())
        return stop.is_set()

    def write_on() -> None:
        with mirrored(uri, folder, 60, silent) as found:
            write(folder, metrics="1\n")
            until(lambda: Storage(uri).read("metrics") == b"1\n")
            found.on_failure(stop)
            until(another_one_writes)
            write(folder, metrics="1\n2\n")

    with pytest.raises(OutputLost, match=r"is now written by another run \(process 12 on host3\): this one ends"):
        write_on()
    assert Storage(uri).read("metrics") == b"1\n"


def test_damage_is_noticed(uri, tmp_path):
    with mirrored(uri, tmp_path / "run", 60, silent):
        write(tmp_path / "run", metrics="1\n", summary="done")
    Storage(uri).write("metrics", b"7\n")
    with pytest.raises(UserError, match=r": metrics is damaged or gone: it is not what \.mirror/manifest\.json says"):
        fetched(uri)


def test_folders_below_one_another_have_states_of_their_own(uri, tmp_path):
    sweep = tmp_path / "run"
    trial = sweep / "trials" / "0"
    inner = uri.replace("/run", "/run/trials/0")
    with mirrored(uri, sweep, 60, silent), mirrored(inner, trial, 60, silent):
        write(sweep, study="one trial", trials__error="none")
        write(trial, metrics="1\n")
    outer = read_manifest(Storage(uri))
    assert outer is not None
    assert sorted(outer.files) == ["study", "trials/error"]
    whole = {"study": "one trial", "trials/error": "none", "trials/0/metrics": "1\n"}
    assert texts(fetched(uri)) == whole


def test_a_run_that_is_being_fetched_is_no_part_of_the_folder_above(uri, tmp_path):
    """If it were, the mirror of a sweep's folder would send the files of trials, and later remove them as gone."""
    inner, run = uri.replace("/run", "/run/trials/0"), tmp_path / "run" / "trials" / "0"
    with mirrored(inner, run, 60, silent):
        write(run, **{f"file{number}": str(number) for number in range(40)})
    other, seen, over = tmp_path / "other" / "run", set[str](), threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.update(scan(other))

    looking = threading.Thread(target=look)
    looking.start()
    fetch_new(uri, other)
    over.set()
    looking.join()
    assert texts(other / "trials" / "0") == texts(run)
    assert seen == set()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("bucket/", "nobucket/"), "s3://nobucket/x can't be used: The specified bucket does not exist"),
        (("s3://", "s4://"), "s4://bucket/x names an unknown storage, s4:// (there are: abfs, file, gs, hdfs, s3)"),
        (("scheme", "schem"), "s3://bucket/x has an unknown option, schem (did you mean 'scheme'?)"),
        (("s3://", "s3://KEY:SECRET@"), "s3://KEY:SECRET@bucket/x must not hold a password, because it is recorded"),
        ((":PORT", ":1"), "s3://bucket/x can't be used: Could not connect to server"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_one_line_at_once(s3, tmp_path, change, line, monkeypatch):
    old, new = change
    uri = s3.uri("x").replace(old.replace("PORT", str(s3.port)), new)
    asked, attempt = Counter(), Contact.attempt

    def counted(self, request):
        return attempt(self, lambda: (asked.update([request]), request())[1])

    monkeypatch.setattr(Contact, "attempt", counted)
    with pytest.raises(UserError) as found:
        begin(uri, tmp_path / "run")
    assert str(found.value).startswith(line)
    assert "\n" not in str(found.value)
    # it is not repeated for as long as one that begins to fail later
    assert all(times <= ATTEMPTS for times in asked.values())


def test_what_was_removed_is_removed_with_all_that_is_in_it(tmp_path):
    uri = f"file://{tmp_path}/there"
    for name in ("kept", "sweep", "sweep/trials/0001"):
        with mirrored(f"{uri}/{name}", tmp_path / name, 60, silent):
            write(tmp_path / name, metrics="1\n")
    folder = fetched(uri)
    shutil.rmtree(tmp_path / "there" / "sweep")
    assert fetched(uri) == folder
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_model_deep_in_a_run_is_found(tmp_path):
    uri, model = f"file://{tmp_path}/my%20runs/a", "personal/client-3.safetensors"
    with mirrored(uri, tmp_path / "run", 60, silent):
        write(tmp_path / "run", **{"metrics.csv": "1\n", model: "numbers"})
    found = as_path(f"{uri}/{model}")
    assert found.read_text() == "numbers"
    # where a sweep or run of that name has its working copy
    assert found.parents[2] == fetched_place(f"file://{tmp_path}") / "my runs"
    with pytest.raises(UserError, match=f"no run or sweep at file://{tmp_path}/nowhere"):
        as_path(f"file://{tmp_path}/nowhere/model.safetensors")
