"""The papers' experiments in analysis/experiments: what each file compares and varies, and its partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedray.algorithms import find_algorithm
from fedray.config import Config, check, flat, load
from fedray.data.federated import FederatedData, federate
from fedray.data.sources.source import SOURCES, Source
from fedray.models import find_model

FOLDER = Path(__file__).parents[2] / "analysis" / "experiments"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.yaml"))

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
COUNTS = {
    "mnist": MNIST, "fashion_mnist": [6000] * 10, "emnist": [2400] * 47, "cifar10": [5000] * 10,
    "cifar100": [500] * 100, "tiny_imagenet": [500] * 200, "har": [1226, 1073, 986, 1286, 1374, 1407],
    "fire": [88, 431],
}  # fmt: skip
"""The published numbers of training samples of each class."""


def varied(file: str) -> Iterator[Config]:
    """Yields the configurations of a file, with each of the values that its figure varies."""
    written = yaml.safe_load((FOLDER / file).read_text())
    for keys in written.get("x-vary", [{}]):
        yield load(FOLDER / file, [f"{key}={_text(value)}" for key, value in flat(keys).items()])


def _text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def spread(config: Config, seed: int = 0) -> FederatedData:
    """Returns the partition of a configuration, of labels with the published counts."""
    counts = COUNTS[config.data.source]
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    x = np.zeros((len(y), 1), np.uint8)
    source = Source(config.data.source, x, y, x[:100], y[:100], len(counts), task="classification")
    public = config.data.public_samples
    return federate(source, config.data, seed, 0 if public == "auto" else public)


def classes_of(data: FederatedData) -> list[set[int]]:
    return [set(data.y[data.client(client)].tolist()) for client in range(data.clients)]


@pytest.mark.parametrize("file", FILES)
def test_each_file_is_an_experiment(file):
    """It says what it compares, writes into a folder of its own, and has a comment about what it is."""
    assert (FOLDER / file).read_text().startswith("# ")
    for config in varied(file):
        assert config.run.output == f"runs/{file.removesuffix('.yaml')}"
        assert config.data.source in SOURCES
        assert config.algorithm.name in config.for_algorithm
        assert config.data.public_samples != "auto" or "pfedmo" not in config.for_algorithm
        find_model(config.model.name)
    compared = load(FOLDER / file).for_algorithm
    assert {"fedavg", "fedprox"} <= compared.keys()
    for name in compared:
        config = load(FOLDER / file, [f"algorithm.name={name}"])
        check(find_algorithm(name).Hyper, config.algorithm.model_extra or {}, prefix="algorithm.")


def iid(data: FederatedData, config: Config) -> None:
    """All training samples but the public ones, dealt out evenly, with the same classes for all."""
    sizes = data.sizes()
    assert sizes.max() - sizes.min() <= 1
    everyone = config.data.samples_per_client is None
    held_out = 0 if config.data.public_overlap else len(data.public)
    assert not everyone or sizes.sum() == len(data.y) - held_out
    shares = [np.bincount(data.y[data.client(i)], minlength=data.classes) / sizes[i] for i in range(data.clients)]
    whole = np.bincount(data.y, minlength=data.classes) / len(data.y)
    assert max(0.5 * np.abs(share - whole).sum() for share in shares) < 0.5 * (data.classes / sizes.min()) ** 0.5 + 0.05


def skewed(data: FederatedData, config: Config) -> None:
    """Equally many samples, of exactly as many classes as the figure says, and no sample twice."""
    assert len(set(data.sizes().tolist())) == 1
    assert {len(own) for own in classes_of(data)} == {config.data.partition.classes_per_client}


def of_sizes(data: FederatedData, config: Config) -> None:
    """The sizes of Figure 5 without the public tenth, and all ten classes in the proportions of the whole set."""
    assert data.sizes().tolist() == [4500, 11250, 15750, 22500]
    for client in range(4):
        counts = np.bincount(data.y[data.client(client)])
        np.testing.assert_allclose(counts / counts.sum(), np.array(MNIST) / 60000, atol=0.01)


def cut_by_class(data: FederatedData, config: Config) -> None:
    assert data.sizes().sum() == len(data.y) - len(data.public)
    least = config.data.partition.min_samples or 1
    assert data.sizes().min() >= least
    if config.data.partition.capped:
        # a client that is full gets no more, so it can have at most one class too much
        assert data.sizes().max() <= len(data.y) / data.clients + max(COUNTS[config.data.source])


def per_client(data: FederatedData, config: Config) -> None:
    """FedTrip: exactly so many samples each, none twice in a client, some in several clients; a smaller alpha gives
    fewer classes."""
    assert set(data.sizes().tolist()) == {config.data.samples_per_client}
    assert all(len(set(data.client(i).tolist())) == config.data.samples_per_client for i in range(data.clients))
    largest = [np.bincount(data.y[data.client(i)]).max() / config.data.samples_per_client for i in range(data.clients)]
    expected = (
        {0.1: (0.45, 0.95), 0.5: (0.25, 0.65)}[config.data.partition.alpha] if data.classes == 10 else (0.05, 0.4)
    )
    assert expected[0] < np.mean(largest) < expected[1]


def clustered(data: FederatedData, config: Config) -> None:
    """The classes in blocks, one for each cluster; clients of the same cluster have the same, others have no common
    one."""
    clusters = config.data.partition.clusters
    blocks = [set(block.tolist()) for block in np.array_split(np.arange(data.classes), clusters)]
    assert set(data.sizes().tolist()) == {config.data.samples_per_client}
    assert classes_of(data) == [blocks[client % clusters] for client in range(data.clients)]


def one_shard(data: FederatedData, config: Config) -> None:
    """GHBM's alpha = 0: 500 samples of a single class, which no other client has."""
    assert set(data.sizes().tolist()) == {500}
    assert {len(own) for own in classes_of(data)} == {1}
    assert len(set(data.indices.tolist())) == 50_000


def balanced(data: FederatedData, config: Config) -> None:
    """As GHBM's code: equally many samples for all, and more classes with a larger alpha."""
    assert set(data.sizes().tolist()) == {500}
    assert len(set(data.indices.tolist())) == 50_000
    mean = np.mean([len(own) for own in classes_of(data)])
    low, high = {0.1: (4, 8.5), 0.3: (6, 9.5), 0.6: (7.5, 10)}[config.data.partition.alpha]
    assert low < mean < high


CHECKS: dict[str, Callable[[FederatedData, Config], None]] = {
    "iid": iid, "label_skew": skewed, "quantity_skew": of_sizes, "dirichlet": cut_by_class, "shards": one_shard,
    "dirichlet_fixed": per_client, "orthogonal": clustered, "rebalanced": balanced,
}  # fmt: skip
CLIENTS = {"fig3a": {50}, "fig3b": {100}, "fig3c": {4, 8, 12, 16}, "fig8a": {16}, "fig8b": {16}}


@pytest.mark.parametrize("file", [file for file in FILES if load(FOLDER / file).data.source in COUNTS])
def test_partitions_are_those_of_the_papers(file):
    paper, stem = file.removesuffix(".yaml").split("/")
    clients = {"pfedmo": CLIENTS.get(stem, {4}), "ghbm": {100}, "fedsiam_da": {10}, "fedtrip": {10}}[paper]
    clients = {50} if "table6" in stem else clients
    found = set()
    for config in varied(file):
        data, kind = spread(config), config.data.partition.kind
        found.add(data.clients)
        CHECKS["rebalanced" if config.data.partition.rebalanced else kind](data, config)
        overlap = config.data.partition.overlap
        assert overlap == (paper == "fedtrip")
        assert overlap or len(set(data.indices.tolist())) == len(data.indices)
        cohort = config.train.cohort_size or data.clients
        assert cohort == {"pfedmo": data.clients, "ghbm": 10, "fedsiam_da": 10, "fedtrip": 4}[paper]
    assert found == clients


@pytest.mark.parametrize("file", [file for file in FILES if load(FOLDER / file).data.source not in COUNTS])
def test_clients_of_the_data_themselves(file):
    """Users of many sizes, drawn as the file says."""
    for config in varied(file):
        sizes = np.random.default_rng(2).integers(1, 3000, 150)
        owners = np.repeat(np.arange(150), sizes)
        x, y = np.zeros((len(owners), 1), np.uint8), np.arange(len(owners)) % 80
        source = Source("users", x, y, x[:10], y[:10], 80, client_train=owners, task="classification")
        data, options = federate(source, config.data, 0, 0), config.data.partition
        if options.kind == "iid":
            assert set(data.sizes().tolist()) == {config.data.samples_per_client}
            continue
        assert options.kind == "natural"
        assert data.clients == min(150, options.max_clients or 150)
        expected = np.minimum(sizes[data.ids], options.max_samples or 3000)
        assert data.sizes().tolist() == expected.tolist()
        assert all((owners[data.client(i)] == data.ids[i]).all() for i in range(data.clients))
