"""Outputs that are not folders of this machine but URIs, such as ``s3://bucket/runs``, and where they are worked on."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

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


def is_uri(output: str) -> bool:
    """Returns whether ``output`` is a URI, and not a folder of this machine."""
    return re.match(r"[A-Za-z][\w+.-]*://", output) is not None


def problem_of_uri(uri: str) -> str | None:
    """Returns what is wrong with the form of ``uri``, as the end of a message that begins with a key's name, or None if
    nothing is. The storage is not asked."""
    parts = urlsplit(uri)
    if parts.scheme not in OPTIONS:
        return f"names an unknown storage, {parts.scheme}://{near_miss(parts.scheme, OPTIONS)}"
    if "@" in parts.netloc and parts.scheme in ("s3", "gs"):
        return (
            "must not hold a password, because it is recorded: name keys by AWS_ACCESS_KEY_ID, a file of "
            "credentials, or whatever else the storage's own tools read"
        )
    if parts.scheme == "file" and parts.netloc:
        return f"names a host, {parts.netloc}: a folder is file:///FOLDER, with three slashes"
    if parts.scheme != "file" and not parts.netloc:
        return f"names no bucket or host: {parts.scheme}://NAME/FOLDER"
    if parts.fragment or any(part in (".", "..") for part in parts.path.split("/")):
        return "must be a plain path, without '#', '.' and '..'"
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in OPTIONS[parts.scheme]:
            return f"has an unknown option, {name}{near_miss(name, OPTIONS[parts.scheme])}"
    return None


def shown(uri: str) -> str:
    """Returns ``uri`` as messages show it, without options."""
    return uri.partition("?")[0]


def below(uri: str, *names: str) -> str:
    """Returns the URI of what lies below ``uri`` under ``names``; options after a ``?`` stay at the end."""
    parts = urlsplit(uri)
    path = "/".join([parts.path.rstrip("/"), *names])
    return parts._replace(path=path).geturl()


def above(uri: str) -> str:
    """Returns the URI of the folder that holds what is at ``uri``."""
    parts = urlsplit(uri)
    return parts._replace(path=parts.path.rstrip("/").rpartition("/")[0]).geturl()


def local_folder(output: str, working_copy: str | None = None) -> Path:
    """Returns the folder on this machine that stands for ``output``: itself, or, if it is a URI, the folder
    ``working_copy``, which is in the user's cache unless given."""
    if not is_uri(output):
        return Path(output)
    return Path(working_copy) if working_copy else cache_folder() / "working" / cache_name(output)


def is_folder(uri: str, folder: Path) -> bool:
    """Returns whether ``uri`` is that of ``folder`` on this machine."""
    parts = urlsplit(uri)
    return parts.scheme == "file" and Path(unquote(parts.path)).resolve() == folder.resolve()


def cache_name(uri: str) -> Path:
    """Returns the relative path under which the user's cache keeps what lies at ``uri``."""
    parts = urlsplit(uri)
    # the same bucket behind another address is another bucket
    place = parts.scheme + ("-" + hashlib.sha256(parts.query.encode()).hexdigest()[:8] if parts.query else "")
    return Path(place, parts.netloc, parts.path.strip("/"))
