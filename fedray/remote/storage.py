"""Reads and writes the files below a URI, such as ``s3://bucket/runs``. Requests have time limits, and are made again
after an error."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from fedray.errors import UserError
from fedray.util.files import replacement_of
from fedray.util.uris import problem_of_uri, shown

BLOCK = 8 << 20
"""The bytes of a file that are sent or received at a time."""

CONNECT, ANSWER = 5.0, 8.0
"""The seconds after which a request is given up: until there is a connection, and without an answer on it. A program
that ends waits for its requests, so they are short."""

ATTEMPTS = 3
"""How often a request is made at least."""

LONGEST_PAUSE = 5.0
"""The longest pause between two attempts, in seconds. The first pause is half a second, and each is twice the one
before."""

THREADS = 8
"""The number of files that are sent or received at the same time, because each waits for its answers."""

REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The environment variables that say where the buckets of S3 are. pyarrow reads the first two only. Without any of them
Amazon is asked."""

REREADINGS = 10
"""How often a small file is read if it is not whole."""

T = TypeVar("T")


class GivenUp(Exception):
    """Raised in a thread that waits for a storage after :meth:`Contact.give_up`, so that the thread ends."""


class Contact:
    """Makes requests to a storage, repeats those that fail, and knows when the storage last answered.

    ``patience`` says how long a failing request is repeated: for this number of seconds after its first failure, but at
    least until it was made :data:`ATTEMPTS` times. With None it is made :data:`ATTEMPTS` times.

    ``answered`` is the time of the last answer, as ``time.monotonic()`` gives it. ``reason`` says why the last request
    failed; it is empty if the last request was answered.
    """

    def __init__(self) -> None:
        self.patience: float | None = None
        self.answered, self.reason = time.monotonic(), ""
        self._over = threading.Event()

    def give_up(self) -> None:
        self._over.set()

    def heard(self) -> None:
        """Records that the storage has answered just now."""
        self.answered, self.reason = time.monotonic(), ""

    def attempt(self, request: Callable[[], T]) -> T:
        """Calls ``request()`` and returns its result. After an OSError it is called again, as often as ``patience``
        allows, and the last error is raised if all attempts fail.

        FileNotFoundError is raised at once, because it is an answer of the storage. Raises :class:`GivenUp` after
        :meth:`give_up`.
        """
        pause, first_failure = 0.5, None
        for number in itertools.count(1):
            if self._over.is_set():
                raise GivenUp
            try:
                found = request()
                self.heard()
                return found
            except FileNotFoundError:
                self.heard()
                raise
            except OSError as error:
                self.reason, now = reason_of(error), time.monotonic()
                first_failure = first_failure or now
                # other requests may be answered all the while, as those for other files
                has_waited = self.patience is None or now - first_failure > self.patience
                if number >= ATTEMPTS and has_waited:
                    raise
            self._over.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError


REASONS = (
    r"operation: (?:curlCode: \d+, )?(.+?)(?: \(Request ID.*|; Details.*)?$",
    r"CURL error \[\d+\]=(.+?) error_info",
    r"google::cloud::Status\((.+?) error_info",
    r"\[Errno \d+\] (.+?)(?:\. Detail.*)?$",
)
"""Where the reason stands in the messages of pyarrow's file systems."""


def reason_of(error: Exception) -> str:
    """Returns a few words from the message of ``error``, an exception of pyarrow, that say why a request to a storage
    failed."""
    text = " ".join(str(error).split())
    if code := re.search(r"AWS Error (.+?) during \w+ operation: No response body", text):
        return code[1].replace("_", " ").lower()
    found = next((match[1] for pattern in REASONS if (match := re.search(pattern, text))), text)
    return found[:200].rstrip(". ") or type(error).__name__


class Storage:
    """Reads and writes the files below ``uri``. Their names are paths relative to it, with slashes.

    ``shown`` is the URI in messages. ``replaces_whole`` says whether others see either the old or the new content of a
    file while it is being replaced, and never a mixture, as in object storages such as S3. In other storages a file
    must be written under another name and then renamed.
    """

    def __init__(self, uri: str) -> None:
        self.shown, self.contact = shown(uri), Contact()
        self._files, self._base = _file_system(uri)
        self.replaces_whole = self._files.type_name in ("s3", "gcs", "abfs")

    def below(self, *names: str) -> Storage:
        """Returns the storage for a folder below this one, over the same connection. ``names`` are the parts of the
        folder's path."""
        found = copy.copy(self)
        found.shown, found._base = "/".join([self.shown, *names]), "/".join([self._base, *names])
        return found

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def read(self, name: str) -> bytes | None:
        """Returns the content of the file ``name``, or None if there is no such file."""

        def request() -> bytes:
            with self._files.open_input_stream(self._path(name)) as file:
                content: bytes = file.read()
                return content

        try:
            return self.contact.attempt(request)
        except FileNotFoundError:
            return None

    def read_object(self, name: str) -> dict[str, Any] | None:
        """Returns the content of the JSON file ``name``, a dict, or None if there is no such file. Raises
        :class:`UserError` if the file is damaged."""
        for _ in range(REREADINGS):
            content = self.read(name)
            if content is None:
                return None
            with contextlib.suppress(ValueError):
                found = json.loads(content)
                if isinstance(found, dict):
                    return found
            # it may have been replaced while it was read: then it was cut off at the size of the old one
            time.sleep(0.1)
        raise UserError(f"{self.shown}/{name} is damaged")

    def write(self, name: str, content: bytes) -> None:
        """Writes ``content`` to the file ``name``, and replaces an older file of this name."""
        target = name if self.replaces_whole else f"{name}.new"
        self._send(target, lambda put: put(content))
        if target != name:
            self.move(target, name)

    def _send(self, name: str, feed: Callable[[Callable[[bytes], None]], None]) -> None:
        def request() -> None:
            self._make_room(self._path(name))
            file = self._files.open_output_stream(self._path(name))

            def put(block: bytes) -> None:
                file.write(block)
                self.contact.heard()

            try:
                feed(put)
            except BaseException:
                # otherwise pyarrow prints what it finds when the file is destroyed
                with contextlib.suppress(OSError):
                    file.close()
                raise
            file.close()

        self.contact.attempt(request)

    def upload(self, source: Path, size: int, name: str) -> str:
        """Copies the first ``size`` bytes of ``source``, a file on this machine, to the file ``name`` in the storage.
        Returns their sha256 as hexadecimal digits."""
        digest = hashlib.sha256()

        def feed(put: Callable[[bytes], None]) -> None:
            nonlocal digest
            digest, left = hashlib.sha256(), size
            with source.open("rb") as file:
                while left and (block := file.read(min(BLOCK, left))):
                    digest.update(block)
                    put(block)
                    left -= len(block)

        self._send(name, feed)
        return digest.hexdigest()

    def download(self, name: str, target: Path, sha256: str) -> bool:
        """Copies the file ``name`` in the storage to ``target``, a path on this machine, if the file's content has the
        digest ``sha256``. Returns whether it was copied. If it was not, or does not exist, ``target`` is left as it is.
        """

        def request() -> bool:
            digest = hashlib.sha256()
            with replacement_of(target) as staging:
                with self._files.open_input_stream(self._path(name)) as file, staging.open("wb") as copy:
                    while block := file.read(BLOCK):
                        digest.update(block)
                        copy.write(block)
                        self.contact.heard()
                if digest.hexdigest() != sha256:
                    raise FileNotFoundError
            return True

        try:
            return self.contact.attempt(request)
        except FileNotFoundError:
            return False

    def move(self, source: str, target: str) -> None:
        """Renames the file ``source`` to ``target``, and replaces an older file of that name. Does nothing if
        ``source`` does not exist."""

        def request() -> None:
            if self.exists(source):
                self._make_room(self._path(target))
                self._files.move(self._path(source), self._path(target))
                self._prune(self._path(source))

        self.contact.attempt(request)

    def _make_room(self, path: str) -> None:
        if not self.replaces_whole:
            self._files.create_dir(path.rpartition("/")[0], recursive=True)

    def _prune(self, path: str) -> None:
        """Removes those folders above ``path`` that have become empty. Object storages have no folders."""
        from pyarrow.fs import FileSelector

        above = path.rpartition("/")[0]
        # another thread may have removed one of them just now
        with contextlib.suppress(OSError):
            while not (self.replaces_whole or above == self._base or self._files.get_file_info(FileSelector(above))):
                self._files.delete_dir(above)
                above = above.rpartition("/")[0]

    def exists(self, name: str) -> bool:
        from pyarrow.fs import FileType

        return bool(self._files.get_file_info(self._path(name)).type == FileType.File)

    def delete(self, name: str) -> None:
        """Removes the file ``name``, if it exists."""

        def request() -> None:
            if self.exists(name):
                self._files.delete_file(self._path(name))
                self._prune(self._path(name))

        self.contact.attempt(request)

    def names(self) -> list[str]:
        """Returns the names of all files below the URI, as paths relative to it."""
        from pyarrow.fs import FileSelector, FileType

        def request() -> list[str]:
            found = self._files.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
            return [each.path.removeprefix(self._base).lstrip("/") for each in found if each.type == FileType.File]

        return self.contact.attempt(request)

    def copy_aside(self, names: Iterable[str]) -> str:
        """Copies the files ``names`` into a new folder beside this one, such as NAME.bak-1, and returns the name of the
        new folder."""
        number = next(n for n in itertools.count(1) if not self._is_there(f"{self._base}.bak-{n}"))
        aside = f"{self._base}.bak-{number}"

        def copy(name: str) -> None:
            target = f"{aside}/{name}"

            def request() -> None:
                self._make_room(target)
                self._files.copy_file(self._path(name), target)

            self.contact.attempt(request)

        in_parallel(copy, names)
        return aside.rpartition("/")[2]

    def _is_there(self, path: str) -> bool:
        from pyarrow.fs import FileSelector

        return bool(self.contact.attempt(lambda: self._files.get_file_info(FileSelector(path, allow_not_found=True))))


def _file_system(uri: str) -> tuple[Any, str]:
    """Returns two things: pyarrow's file system for ``uri``, and the path in it, without a slash at the end."""
    from pyarrow import fs

    if problem := problem_of_uri(uri):
        raise UserError(f"{shown(uri)} {problem}")
    parts = urlsplit(uri)
    path = f"{parts.netloc}{unquote(parts.path)}".rstrip("/")
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    try:
        if parts.scheme == "s3":
            # written in the foreground, because otherwise a storage that does not answer fills the memory
            limits = {"connect_timeout": CONNECT, "request_timeout": ANSWER, "background_writes": False}
            if endpoint := next(filter(None, map(os.environ.get, ENDPOINT)), None):
                options.setdefault("endpoint_override", endpoint)
            if not (options.keys() & {"region", "endpoint_override"} or any(map(os.environ.get, REGION))):
                options["region"] = fs.resolve_s3_region(parts.netloc)
            limits["retry_strategy"] = fs.AwsStandardS3RetryStrategy(max_attempts=1)
            return fs.S3FileSystem(**options, **limits), path
        if parts.scheme == "gs":
            options["anonymous"] = options.get("anonymous") == "true"
            return fs.GcsFileSystem(**options, retry_time_limit=timedelta(seconds=ANSWER)), path
        found, path = fs.FileSystem.from_uri(uri)
        return found, path.rstrip("/")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{shown(uri)} can't be opened: {reason_of(error)}") from None


def in_parallel(do: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls ``do(item)`` for each of ``items``, several at a time in threads, and waits for all. After an error no more
    calls begin, and the first error is raised.

    The threads are daemons, which those of a ThreadPoolExecutor are not: a storage that does not answer must not keep
    the program from ending.
    """
    left, lock, errors = iter(items), threading.Lock(), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                with lock:
                    item = next(left)
            except StopIteration:
                return
            try:
                do(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="storage", daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
