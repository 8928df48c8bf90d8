"""Which samples a client takes in each local step: section 7 of the design, by brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedray.client.local_data import LocalData
from fedray.core.batches import Batch, aligned, has_single, schedule, steps_of
from fedray.core.local_training import LocalTraining
from fedray.core.samples import ReadSamples, Samples
from fedray.core.seeds import Purpose, stream

SAMPLES, SIZE, COUNT = st.integers(1, 40), st.integers(1, 50), st.integers(1, 12)
SEED, ROUND, CLIENT = 3, 5, 17


def permutation(number: int, samples: int) -> list[int]:
    return stream(SEED, Purpose.BATCHES, ROUND, CLIENT, number).permutation(samples).tolist()


@given(SAMPLES, SIZE, COUNT)
def test_local_steps_are_slices_of_an_endless_stream_of_permutations(samples, batch_size, steps):
    plan = schedule(SEED, Purpose.BATCHES, ROUND, CLIENT, samples, batch_size, steps)
    size = min(batch_size, samples)
    assert plan.order.shape == (steps, size)
    assert plan.counts == [size] * steps
    if size == samples:
        assert [sorted(row) for row in plan.order.tolist()] == [list(range(samples))] * steps
        return
    endless = [sample for number in range(steps * size // samples + 1) for sample in permutation(number, samples)]
    assert plan.order.reshape(-1).tolist() == endless[: steps * size]


@given(SAMPLES, SIZE, st.integers(2, 200))
def test_every_pass_uses_each_sample_once(samples, batch_size, steps):
    used = schedule(0, Purpose.BATCHES, 1, 2, samples, batch_size, steps).order.reshape(-1)
    for start in range(0, len(used) - samples + 1, samples):
        assert sorted(used[start : start + samples]) == list(range(samples))


@given(SAMPLES, SIZE, st.integers(1, 5))
def test_local_epochs_are_fresh_permutations_with_a_ragged_end(samples, batch_size, epochs):
    plan = schedule(SEED, Purpose.BATCHES, ROUND, CLIENT, samples, batch_size, None, epochs)
    per_epoch = math.ceil(samples / batch_size)
    assert len(plan.order) == epochs * per_epoch == steps_of(samples, batch_size, None, epochs)
    batches = [row[:count].tolist() for row, count in zip(plan.order, plan.counts, strict=True)]
    assert [len(batch) for batch in batches[:per_epoch]] == [
        min(batch_size, samples - start) for start in range(0, samples, batch_size)
    ]
    for epoch in range(epochs):
        taken = [sample for batch in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for sample in batch]
        expected = list(range(samples)) if batch_size >= samples else permutation(epoch, samples)
        assert taken == expected
    if 1 < batch_size < samples and samples > 10 and epochs > 1:
        assert batches[:per_epoch] != batches[per_epoch : 2 * per_epoch]


@pytest.mark.parametrize(("steps", "epochs"), [(4, None), (None, 4)])
def test_a_full_batch_is_all_samples_every_step_in_one_order(steps, epochs):
    plan = schedule(SEED, Purpose.BATCHES, ROUND, CLIENT, 6, None, steps, epochs)
    assert plan.order.tolist() == [list(range(6))] * 4
    assert plan.counts == [6] * 4


@pytest.mark.parametrize(
    ("samples", "batch_size", "local_steps", "local_epochs", "expected"),
    [
        (10, 64, 7, None, 7),
        (1, None, 7, None, 7),
        (10, 3, None, 2, 8),
        (9, 3, None, 2, 6),
        (10, 64, None, 5, 5),
        (10, None, None, 5, 5),
    ],
)
def test_steps(samples, batch_size, local_steps, local_epochs, expected):
    """J_i = local_steps for everybody, or E * ceil(n_i / B)."""
    assert steps_of(samples, batch_size, local_steps, local_epochs) == expected


@pytest.mark.parametrize("change", [{"seed": 4}, {"round": 6}, {"client": 18}, {"purpose": Purpose.REPRESENTATION}])
def test_seed_round_client_and_purpose_matter(change):
    arguments = {"seed": SEED, "purpose": Purpose.BATCHES, "round": ROUND, "client": CLIENT}
    rest = {"samples": 30, "batch_size": 10, "local_steps": 2}
    assert (schedule(**arguments, **rest).order != schedule(**{**arguments, **change}, **rest).order).any()


def taken(sizes: list[int], ids: list[int], training: LocalTraining) -> dict[int, list[list[int]]]:
    """The samples that each client of a stack really takes in each of its steps: each input is its own number."""
    starts = np.cumsum([0, *sizes])
    x = torch.arange(int(starts[-1]), dtype=torch.float32)[:, None]
    steps = [steps_of(sizes[i], training.batch_size, training.local_steps, training.local_epochs) for i in ids]
    indices = [np.arange(starts[i], starts[i + 1]) for i in ids]
    data = LocalData(Samples(x, torch.arange(len(x))), training, ids, indices, steps, round=2)
    found: dict[int, list[list[int]]] = {i: [] for i in ids}
    for j, batch in enumerate(data.batches()):
        assert batch.step == j
        assert torch.equal(batch.x[..., 0].long(), batch.y)
        for row, i in enumerate(ids):
            width = batch.y.shape[1] if batch.counts is None else batch.counts[row]
            if j < steps[row]:
                found[i].append(batch.y[row, :width].tolist())
    return found


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(1, batch_size=4, local_steps=5),
        LocalTraining(1, batch_size=4, local_steps=None, local_epochs=2),
        LocalTraining(1, batch_size=None, local_steps=3),
        LocalTraining(1, batch_size=None, local_steps=None, local_epochs=2),
    ],
    ids=["steps", "epochs", "full steps", "full epochs"],
)
def test_chunk_mates_change_nothing(training, monkeypatch):
    sizes = [7, 1, 12, 4, 9]
    together = taken(sizes, [0, 1, 2, 3, 4], training)
    alone = {i: taken(sizes, [i], training)[i] for i in range(5)}
    pairs = taken(sizes, [0, 2], training) | taken(sizes, [1, 3], training) | taken(sizes, [4], training)
    assert together == alone == pairs
    starts = np.cumsum([0, *sizes])
    for i, batches in together.items():
        assert all(starts[i] <= sample < starts[i + 1] for batch in batches for sample in batch)
    # nor does it matter how far ahead samples are gathered
    monkeypatch.setattr("fedray.client.local_data.GATHERED_BYTES", {"cpu": 1})
    assert taken(sizes, [0, 1, 2, 3, 4], training) == together


def test_samples_lie_where_fresh_memory_would_be():
    memory = torch.arange(64.0)
    assert aligned(memory) is memory
    assert aligned(memory[1:]).data_ptr() % 64 == 0
    assert torch.equal(aligned(memory[1:]), memory[1:])


@pytest.mark.parametrize(
    ("samples", "batch_size", "local_epochs", "expected"),
    [
        (1, None, None, True), (2, None, None, False), (5, 1, None, True), (5, 4, None, False), (5, 4, 1, True),
        (6, 4, 1, False), (1, 4, 2, True), (5, None, 3, False), (3, 2, 2, True),
    ],
)  # fmt: skip
def test_mini_batches_of_one_sample(samples, batch_size, local_epochs, expected):
    assert has_single(samples, batch_size, local_epochs) is expected
    steps = 3 if local_epochs is None else None
    counts = schedule(0, Purpose.BATCHES, 1, 0, samples, batch_size, steps, local_epochs).counts
    assert (1 in counts) is expected


def test_the_samples_of_a_client_are_without_padding():
    x, y = torch.arange(24.0).view(2, 3, 4), torch.arange(6).view(2, 3)
    whole, padded = Batch(x, y, 0), Batch(x, y, 0, [2, 0])
    assert [len(whole.client_samples(row)[1]) for row in range(2)] == [3, 3]
    # a client that has made all its steps has one sample of padding
    assert [padded.client_samples(row)[1].tolist() for row in range(2)] == [[0, 1], [3]]
    assert [padded.rests(row) for row in range(2)] == [False, True]
    assert not whole.rests(0)


class Drawn:
    """Items each of which is the random number that is drawn when it is read."""

    first = np.zeros((1, 1), np.float32)

    def read(self, i: int) -> np.ndarray:
        return np.full((1, 1), random.random(), np.float32)


def test_random_transforms_do_not_depend_on_the_clients_beside() -> None:
    """Client 1 has fewer samples than a mini-batch has, and client 0 of the same stack does not."""
    training = LocalTraining(SEED, batch_size=8, local_steps=3, local_epochs=None)
    samples = ReadSamples(Drawn(), torch.arange(55))
    indices = [np.arange(50), np.arange(50, 55)]

    def inputs(ids: list[int]) -> list[torch.Tensor]:
        data = LocalData(samples, training, ids, [indices[i] for i in ids], [3] * len(ids), round=2)
        return [batch.x[ids.index(1), :5] for batch in data.batches()]

    beside, alone = inputs([0, 1]), inputs([1])
    assert all(map(torch.equal, beside, alone))
    assert len({float(number) for step in alone for number in step.flatten()}) == 15
