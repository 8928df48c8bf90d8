"""How a cohort is divided between hosts, and what its sums are then: the same bits, in few nodes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedray.client.phase import stacks
from fedray.core.tree import TreeSum
from fedray.engine.cutting import cut_into_tasks, split_by_work
from fedray.engine.ray.node_actor import added_up

WORK = st.lists(st.integers(1, 500), min_size=1, max_size=300)
CHUNKS = st.none() | st.integers(1, 70)
SHARES = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(WORK, SHARES, CHUNKS)
def test_regions_have_neighbours_and_work_by_their_speed(work, shares, chunk):
    whole = None if chunk is None else list(stacks(len(work), chunk))
    ranges = split_by_work(work, shares, whole)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == len(work)
    step = max(1, len(work) // (8 * len(shares)))
    largest = max(sum(work[slice(*block)]) for block in whole or [(i, i + step) for i in range(0, len(work), step)])
    for (start, stop), share in zip(ranges, shares, strict=True):
        assert abs(sum(work[start:stop]) - sum(work) * share / sum(shares)) <= 2 * largest
        tasks = cut_into_tasks(work, 3, undivided=whole, within=(start, stop))
        blocks = sorted(block for task in tasks for block in task)
        assert [position for block in blocks for position in range(*block)] == list(range(start, stop))


@given(WORK, SHARES, st.randoms(use_true_random=False))
def test_the_sum_of_a_region_has_few_nodes_and_the_bits_of_the_whole(work, shares, order):
    """In whatever order its tasks are added up, and whichever of them another region does in the end."""
    members = len(work)
    leaves = torch.randn(members, dtype=torch.float64, generator=torch.Generator().manual_seed(members))
    expected = TreeSum(members)
    for position in range(members):
        expected.add((0, position), leaves[position : position + 1].clone())
    total = TreeSum(members)
    for start, stop in split_by_work(work, shares):
        tasks = cut_into_tasks(work, 3, within=(start, stop))
        order.shuffle(tasks)
        parts = [{"x": {(0, i): leaves[i : i + 1].numpy() for block in task for i in range(*block)}} for task in tasks]
        here = added_up(members, [added_up(members, parts[::2]), *parts[1::2]]) or {"x": {}}
        assert len(here["x"]) <= 2 * members.bit_length()
        for node, value in here["x"].items():
            total.add(node, torch.from_numpy(value.copy()))
    assert total.total().numpy().tobytes() == expected.total().numpy().tobytes()
