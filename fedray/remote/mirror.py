"""Copies the folder of a run or sweep to a URI, such as ``s3://bucket/runs``, while the run or sweep writes into it.

A thread in the process that the user started looks at the folder every few seconds, and sends the files that have
changed. So the run waits for the storage only at its beginning and its end.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from fedray.errors import OutputLost, UserError, first_line
from fedray.remote.fetching import fetch
from fedray.remote.local import EMPTY, Stamp, aside_of, commits_of, freeze, note_commits, scan, set_aside, was_mirrored
from fedray.remote.manifest import NAME, File, Manifest, read_manifest, staging
from fedray.remote.owner import NAME as OWNER
from fedray.remote.owner import Owner
from fedray.remote.storage import GivenUp, Storage, in_parallel, reason_of
from fedray.util.files import sha256_of_file
from fedray.warning import WARNING

PAUSE = 5.0
"""The seconds between two looks at the folder."""

SHARE = 0.1
"""The largest share of the time in which files are sent, however often they change."""

SILENCE = 10.0
"""The seconds without an answer after which the user is told, and again and again in this interval."""


class Mirror:
    """Keeps the files at ``uri`` equal to those in ``folder``, in which a run or sweep works (see :func:`mirrored`).

    If that fails, for example because the storage has not answered for ``limit`` seconds, the attribute ``error`` is
    set to the :class:`UserError` that says why; before that it is None. Then the event that was passed to
    :meth:`on_failure` is set too.

    ``say`` is a function that shows a line to the user. ``anew`` says whether a new run or sweep begins in ``folder``,
    so that nothing is downloaded from ``uri``.
    """

    def __init__(self, uri: str, folder: Path, limit: float, say: Callable[[str], None], anew: bool) -> None:
        self.folder, self.limit, self.say, self.anew = folder, limit, say, anew
        self.storage = Storage(uri)
        self.owner = Owner(self.storage)
        self.error: UserError | None = None
        self._contact, self._aside = self.storage.contact, aside_of(folder)
        self._manifest: Manifest | None = None
        self._stamps: dict[str, Stamp] = {}
        self._sent = self._to_send = 0
        self._busy, self._removed, self._ready, self._ending, self._ended = (threading.Event() for _ in range(5))
        self._failure: threading.Event | None = None

    def on_failure(self, event: threading.Event) -> None:
        """Lets the mirror set ``event`` if the files can't be kept at the URI any more, so that the run can end. If
        this has already happened, the event is set at once."""
        self._failure = event
        if self.error is not None:
            event.set()

    def begin(self) -> None:
        """Starts the mirror: reserves the URI for this process, downloads what is there into ``folder`` unless
        ``folder`` is as new or newer, and starts the threads. Returns when the run can begin.

        Raises :class:`UserError` if the storage can't be used, or another run is writing there.
        """
        self._busy.set()
        self._contact.heard()
        self._start(self._run)
        self._start(self._watch)
        self._wait(self._ready, lambda: f"still reading {self.storage.shown} ...")

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), name="mirror", daemon=True).start()

    def end(self) -> None:
        """Waits until all files in ``folder`` are at the URI, ends the threads, and allows other runs to write to the
        URI. Raises :class:`UserError` if the files could not be sent."""
        self._ending.set()
        where = self.storage.shown
        self._wait(self._ended, lambda: f"bringing {where} up to date: {self._sent} of {self._to_send} files sent ...")

    def _wait(self, until: threading.Event, line: Callable[[], str]) -> None:
        """Waits for the event ``until``, and shows ``line()`` to the user every few seconds. Raises the mirror's error,
        if it has one."""
        while not until.wait(SILENCE):
            # about a storage that does not answer the thread that watches it has lines of its own
            if time.monotonic() - self._contact.answered < SILENCE:
                self.say(line())
        if self.error is not None:
            raise self.error

    def _fail(self, reason: str) -> None:
        kept = f"; what has been made is in {self.folder}, and the same command goes on" if self.folder.exists() else ""
        self.error = self.error or OutputLost(f"{reason}{kept}")
        self._contact.give_up()
        if self._failure is not None:
            self._failure.set()
        self._ready.set()
        self._ended.set()

    def _watch(self) -> None:
        """Tells the user if the storage does not answer, and lets the mirror fail after ``limit`` seconds."""
        said = 0.0
        while not self._ended.wait(0.5):
            now = time.monotonic()
            silent = now - self._contact.answered if self._busy.is_set() else 0.0
            why = f" ({self._contact.reason})" if self._contact.reason else ""
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
            if silent > self.limit:
                self._fail(f"{self.storage.shown} has not answered since {since}, for {silent:.0f} s{why}")
            elif silent > SILENCE and now - said > SILENCE:
                said = now
                line = f"{WARNING}no answer from {self.storage.shown} since {since}{why}"
                self.say(f"{line}; trying for {self.limit:g} s in all")

    def _guarded(self, work: Callable[[], None]) -> None:
        """Calls ``work()`` in a thread of the mirror. If it raises an error, the mirror fails."""
        try:
            work()
        except GivenUp:
            pass
        except OSError as error:
            self._fail(f"{self.storage.shown} can't be used: {reason_of(error)}")
        except UserError as error:
            self._fail(str(error))
        except BaseException as error:
            self._fail(f"{self.storage.shown} can't be kept up to date: {type(error).__name__}: {first_line(error)}")
            raise

    def _run(self) -> None:
        """Reserves the remote folder, and then sends what has changed in ``folder``, again and again until the end."""
        self._take()
        self._ready.set()
        self._start(self._keep)
        while not self._ending.is_set():
            took = self._pass()
            self._ending.wait(max(PAUSE, took / SHARE))
        self._pass()
        self.owner.release()
        shutil.rmtree(self._aside, ignore_errors=True)
        self._ended.set()

    def _keep(self) -> None:
        """Shows other runs every few seconds that this one still runs."""
        while not self._ended.wait(PAUSE):
            if not self.owner.keep():
                self._removed.set()

    def _take(self) -> None:
        """Reserves the remote folder, and downloads its state if it is newer than that of ``folder``."""
        self.owner.claim(self.say)
        self._contact.patience = self.limit
        try:
            self._aside.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"can't write to {self._aside.parent}: {error.strerror}") from None
        self._manifest, local, where = read_manifest(self.storage), commits_of(self.folder), self.storage.shown
        if self._manifest is not None:
            self._manifest.settle(self.storage)
        if self.anew or self._visible() in local:
            return
        if self._manifest is None:
            self.say(f"there is nothing at {where} any more: {self.folder} is now {set_aside(self.folder)}")
            return
        has_gone_on = was_mirrored(self.folder)
        if not has_gone_on and scan(self.folder):
            self.say(f"{where} has another state: {self.folder} is now {set_aside(self.folder)}")
        self.say(f"{'another machine has gone on: ' if has_gone_on else ''}fetching {where} ...")
        fetch(self.storage, self.folder)

    def _visible(self) -> str:
        """Returns the name of the state of the files that the URI shows."""
        return EMPTY if self._manifest is None else self._manifest.commit

    def _pass(self) -> float:
        """Sends what has changed in the folder, and returns how many seconds that took."""
        began = time.monotonic()
        self._contact.answered = began
        self._busy.set()
        if self._removed.is_set():
            self._removed.clear()
            self._manifest, self._stamps = None, {}
        found = scan(self.folder)
        is_of_before = self.anew and was_mirrored(self.folder)
        if found and found != self._stamps and not is_of_before:
            self._send(found)
            self.anew = False
        self._busy.clear()
        return time.monotonic() - began

    def _send(self, found: dict[str, Stamp]) -> None:
        """Sends the files ``found``, stamps by name, so that they become the state that the URI shows."""
        if self.anew and self._manifest is not None:
            self._set_remote_aside()
        before = self._manifest.files if self._manifest is not None else {}
        changed = [name for name, stamp in found.items() if self._stamps.get(name) != stamp]
        frozen = {name: self._aside / "frozen" / str(number) for number, name in enumerate(changed)}
        shutil.rmtree(self._aside / "frozen", ignore_errors=True)
        (self._aside / "frozen").mkdir()
        try:
            found |= {name: freeze(self.folder / name, path) for name, path in frozen.items()}
        except FileNotFoundError:
            # an old checkpoint was removed just now; the next look finds the new one
            return
        commit = uuid.uuid4().hex
        files, staged = {name: before[name] for name in found if name not in frozen}, set[str]()
        self._sent, self._to_send = 0, len(frozen)

        def send(name: str) -> None:
            source, size, old = frozen[name], found[name].size, before.get(name)
            if old is None or old.size != size or old.sha256 != sha256_of_file(source):
                place = name
                if old is not None or not self.storage.replaces_whole:
                    staged.add(name)
                    place = staging(commit, name)
                old = File(size, self.storage.upload(source, size, place))
            files[name] = old
            self._sent += 1

        in_parallel(send, frozen)
        self._stamps = found
        if files == before and not staged:
            return
        self.owner.keep()
        known = self._visible()
        self._manifest = Manifest(commit, files, frozenset(staged))
        # both, because nobody knows which of them is visible if the storage does not answer now
        note_commits(self.folder, known, commit)
        self._manifest.write(self.storage)
        note_commits(self.folder, commit)
        self._manifest.settle(self.storage)
        in_parallel(self.storage.delete, before.keys() - files.keys())

    def _set_remote_aside(self) -> None:
        """Moves the remote files to a folder with a name such as NAME.bak-1, because ``folder`` holds a new run in
        their place."""
        names = [name for name in self.storage.names() if name != OWNER]
        self.say(f"what was at {self.storage.shown} is now in {self.storage.copy_aside(names)}, beside it")
        # the manifest first, so that the old place never shows half of a state
        self.storage.delete(NAME)
        in_parallel(self.storage.delete, names)
        self._manifest, self._stamps = None, {}


@contextlib.contextmanager
def mirrored(uri: str, folder: Path, limit: float, say: Callable[[str], None], anew: bool = False) -> Iterator[Mirror]:
    """A context for a run or sweep that works in ``folder``: it keeps the files at ``uri`` equal to those in
    ``folder``, and yields the :class:`Mirror` that does this.

    At the beginning the files at ``uri`` are downloaded into ``folder``, unless those in ``folder`` are as new. Before
    that ``folder`` is renamed if its files were never at ``uri``. At the end, also after an error, everything that was
    written is at ``uri``.

    Args:
        uri: the URI of a folder, such as ``s3://bucket/runs/fedavg-mnist``.
        folder: the folder on this machine.
        limit: how many seconds the storage may take to answer.
        say: a function that shows a line to the user.
        anew: whether a new run or sweep begins. Then nothing is downloaded, and older files at ``uri`` are moved to a
            folder beside it as soon as ``folder`` has new ones.

    Raises:
        UserError: at once if the storage can't be used or another run writes there, and at the end if it has not
            answered for ``limit`` seconds. Nothing in ``folder`` is lost then.
    """
    mirror = Mirror(uri, folder, limit, say, anew)
    mirror.begin()
    try:
        yield mirror
    except BaseException:
        try:
            mirror.end()
        except UserError as error:
            # the error to show is the one that ended the run
            say(f"{WARNING}{error}")
        raise
    mirror.end()
    say(f"{mirror.storage.shown} is up to date")
