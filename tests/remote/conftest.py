from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import KEYS, S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    pytest.importorskip("moto")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        with s3_server() as server:
            yield server


@pytest.fixture(params=["s3", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of a folder that does not exist yet: in a bucket, and on a disk that several machines share."""
    if request.param == "file":
        return f"file://{tmp_path}/shared/run"
    server: S3Server = request.getfixturevalue("s3")
    return server.uri(f"{tmp_path.name}/run")
