"""The files in cluster/ that no test here can run: what can be known of them without a cloud or Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

FOLDER = Path(__file__).parents[2] / "cluster"
RUNS, JOB, CLUSTER = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
CONFIGS = ("config.yaml", "aws.yaml", "gcp.yaml")


@pytest.mark.parametrize("name", CONFIGS)
def test_ray_takes_the_configuration(name: str) -> None:
    config = yaml.safe_load((FOLDER / name).read_text())
    validate_config(prepare_config(config))
    # the launcher stops where a file that shall travel is not there
    assert all((FOLDER.parent / source).exists() for source in config["file_mounts"].values())


def test_clouds_set_their_nodes_up_in_the_same_way() -> None:
    """Checks the files against each other: they differ in machines, credentials and the cloud's library."""
    aws, gcp = (yaml.safe_load((FOLDER / name).read_text()) for name in ("aws.yaml", "gcp.yaml"))
    differ = {name for name in aws | gcp if aws.get(name) != gcp.get(name)}
    assert differ == {"provider", "available_node_types", "head_setup_commands"}


def test_versions_are_the_same_everywhere() -> None:
    texts = [path.read_text() for path in FOLDER.iterdir() if path.suffix != ".md"]
    assert len({each for text in texts for each in re.findall(r"\]==([\d.]+)|rayVersion: ([\d.]+)", text)}) == 2
    assert {version for text in texts for version in re.findall(r"(?:\]==|rayVersion: )([\d.]+)", text)} == {"2.60.0"}


def pods() -> list[dict[str, Any]]:
    spec = CLUSTER["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_kubernetes_takes_the_pods_and_the_volume() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    made = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fedray"}, **pod} for pod in pods()]
    # it raises an error for what Kubernetes would not take, and returns the version of the schema
    assert [validate(each, "1.30", strict=True) for each in (RUNS, *made)] == ["1.30"] * 3


def test_kuberay_takes_the_rest() -> None:
    """Checks the kinds of KubeRay by their structure, as read from its definitions."""
    assert {each["apiVersion"] for each in (JOB, CLUSTER)} == {"ray.io/v1"}
    assert [each["kind"] for each in (JOB, CLUSTER)] == ["RayJob", "RayCluster"]
    spec = CLUSTER["spec"]
    assert JOB["spec"].pop("rayClusterSpec") == spec
    assert set(JOB["spec"]) == {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
    assert set(spec) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert spec["authOptions"] == {"mode": "token"}
    assert set(spec["headGroupSpec"]) == {"rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        assert set(group) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    # the volume that the head mounts is the one that is made
    assert spec["headGroupSpec"]["template"]["spec"]["volumes"] == [
        {"name": "runs", "persistentVolumeClaim": {"claimName": RUNS["metadata"]["name"]}}
    ]
    # what `kubectl apply -l` selects
    assert [each["metadata"]["labels"] for each in (RUNS, JOB, CLUSTER)] == [
        {"fedray": "runs"}, {"fedray": "job"}, {"fedray": "cluster"},
    ]  # fmt: skip
