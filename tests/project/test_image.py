"""The image of cluster/Dockerfile, built and run where buildah is."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedray

ROOT = Path(__file__).parents[2]
TAG = "localhost/fedray-test"

FURTHER = shlex.split(os.environ.get("FEDRAY_BUILDAH", ""))
"""Words for `buildah build` where the Dockerfile's image or PyPI can't be reached as they are:
`--build-arg BASE=... --volume ...`."""

pytestmark = [
    pytest.mark.slow,
    # torch with CUDA is 3 GB
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("buildah") is None, reason="there is no buildah"),
]


def buildah(*words: str) -> str:
    """Runs buildah and returns what it prints. The text of a failure has the end of its messages."""
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    file = ["-f", str(ROOT / "cluster" / "Dockerfile")]
    buildah("build", "--isolation", "chroot", *file, "-t", TAG, *FURTHER, str(ROOT))
    name = buildah("from", "--pull-never", TAG)
    yield name
    buildah("rm", name)
    buildah("rmi", TAG)


def test_it_makes_a_run_as_another_user(container: str) -> None:
    def inside(*words: str) -> str:
        return buildah("run", "--isolation", "chroot", container, "--", *words)

    assert inside("id", "-un") == "fedray"
    assert f"fedray {fedray.__version__}" in inside("fedray", "--version")
    run = ["algorithm.name=fedavg", "model.name=logistic", "data.clients=4", "run.rounds=2", "engine.kind=local"]
    assert "completed after 2 rounds" in inside("fedray", "run", *run)
    assert "summary.json" in inside("ls", "runs/fedavg-sample")
    # what KubeRay asks its containers with
    assert "Wget" in inside("wget", "--version")
