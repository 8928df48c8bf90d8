"""Handles outputs that are URIs, such as ``s3://bucket/runs``, and finds the folders of this machine that stand for
them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from fedray.errors import near_miss
from fedray.util.cache import cache_folder

OPTIONS = {
    "s3": ("region", "endpoint_override", "scheme"),
    "gs": ("endpoint_override", "scheme", "project_id", "anonymous"),
    "abfs": (),
    "hdfs": ("user", "replication"),
    "file": (),
}
"""The kinds of storage by the scheme of their URIs, each with the options that may follow a ``?``."""


WORKING = "working"
"""The folder in the user's cache in which runs and sweeps at URIs work."""


def is_uri(output: str) -> bool:
    """Returns whether ``output``, the place of results, is a URI such as ``s3://bucket/runs`` and not a folder of this
    machine. ``s3:/bucket/runs`` counts as one too, a wrong one."""
    return re.match(rf"[A-Za-z][\w+.-]*://|({'|'.join(OPTIONS)}):/", output) is not None


def problem_of_uri(uri: str) -> str | None:
    """Checks the form of ``uri``, the place of results, without contacting the storage. Returns what is wrong with it,
    as a text that follows a key's name in a message (``names no bucket or host: s3://NAME/FOLDER``), or None if nothing
    is wrong."""
    parts = urlsplit(uri)
    if parts.scheme not in OPTIONS:
        return f"names an unknown storage, {parts.scheme}://{near_miss(parts.scheme, OPTIONS)}"
    if "@" in parts.netloc and parts.scheme in ("s3", "gs"):
        return (
            "must not hold a password, because it is recorded: name keys by AWS_ACCESS_KEY_ID, a file of "
            "credentials, or whatever else the storage's own tools read"
        )
    if parts.scheme == "file" and (parts.netloc or not uri.startswith("file:///")):
        host = f"names a host, {parts.netloc}" if parts.netloc else "lacks slashes"
        return f"{host}: a folder is file:///FOLDER, with three slashes"
    if parts.scheme != "file" and not parts.netloc:
        return f"names no bucket or host: {parts.scheme}://NAME/FOLDER"
    if parts.fragment or any(part in (".", "..") for part in unquote(parts.path).split("/")):
        return "must be a plain path, without '#', '.' and '..'"
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in OPTIONS[parts.scheme]:
            return f"has an unknown option, {name}{near_miss(name, OPTIONS[parts.scheme])}"
    return None


def shown(uri: str) -> str:
    """Returns ``uri`` without the options that may follow a ``?``, for messages to the user."""
    return uri.partition("?")[0]


def below(uri: str, *names: str) -> str:
    """Returns the URI of a file or folder below ``uri``. ``names`` are the parts of its path: with ``"a", "b"``,
    ``s3://bucket/runs?region=x`` becomes ``s3://bucket/runs/a/b?region=x``."""
    parts = urlsplit(uri)
    path = "/".join([parts.path.rstrip("/"), *(quote(name, safe="/=,+:@~()'!") for name in names)])
    return parts._replace(path=path).geturl()


def above(uri: str) -> str:
    """Returns the URI of the folder that contains the file or folder at ``uri``. Options after a ``?`` stay at the
    end."""
    parts = urlsplit(uri)
    return parts._replace(path=parts.path.rstrip("/").rpartition("/")[0]).geturl()


def local_folder(output: str, working_copy: str | None = None) -> Path:
    """Returns the folder of this machine in which results for ``output`` are written. This is ``output`` itself, unless
    it is a URI. For a URI it is ``working_copy``, or a folder in the user's cache if ``working_copy`` is None."""
    if not is_uri(output):
        return Path(output)
    return Path(working_copy) if working_copy else cache_folder() / WORKING / cache_name(output)


def is_folder(uri: str, folder: Path) -> bool:
    """Returns whether ``uri`` is a ``file:///`` URI of the folder ``folder`` on this machine."""
    parts = urlsplit(uri)
    return parts.scheme == "file" and Path(unquote(parts.path)).resolve() == folder.resolve()


def cache_name(uri: str) -> Path:
    """Returns the relative path under which a copy of what is at ``uri`` is kept on this machine, in a folder that the
    caller chooses. URIs with different options after the ``?`` have different paths, because they may mean different
    storages."""
    parts = urlsplit(uri)
    # the same bucket behind another address is another bucket
    place = parts.scheme + ("-" + hashlib.sha256(parts.query.encode()).hexdigest()[:8] if parts.query else "")
    return Path(place, parts.netloc, unquote(parts.path).strip("/"))
