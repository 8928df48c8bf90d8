"""The summation tree, how a cohort is cut for it, and the weights of its clients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedray.client.phase import stacks
from fedray.core import tree as tree_module
from fedray.core.tree import LeafSum, TreeSum, reduce_rows, subtree, subtrees
from fedray.engine.cutting import cut_into_tasks
from fedray.experiment.cohorts import weights_of

SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**32)


def leaves_of(members: int, seed: int, width: int = 3) -> torch.Tensor:
    """Numbers of very different size and both signs, whose sum depends on the order of addition."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(members, width)) * 10.0 ** rng.integers(-8, 9, (members, width)))


def recursive(leaves: torch.Tensor, start: int, size: int) -> torch.Tensor | None:
    """The definition: a node over ``size`` (a power of two) positions is the sum of its halves, if there are two."""
    if start >= len(leaves):
        return None
    if size == 1:
        return leaves[start]
    left, right = recursive(leaves, start, size // 2), recursive(leaves, start + size // 2, size // 2)
    assert left is not None
    return left if right is None else left + right


def root(leaves: torch.Tensor) -> torch.Tensor:
    total = recursive(leaves, 0, 1 << (len(leaves) - 1).bit_length())
    assert total is not None
    return total


def cut_at_random(members: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(start, size) of complete aligned subtrees that together cover all positions."""

    def cut(start: int, size: int) -> list[tuple[int, int]]:
        if start >= members:
            return []
        if size == 1 or rng.random() < 0.4:
            return [(start, min(size, members - start))]
        return cut(start, size // 2) + cut(start + size // 2, size // 2)

    return cut(0, 1 << (members - 1).bit_length())


@given(SIZES, SEEDS)
def test_any_cut_in_any_order_gives_the_same_bits(members, seed):
    leaves, rng = leaves_of(members, seed), np.random.default_rng(seed)
    blocks = cut_at_random(members, rng)
    tree = TreeSum(members)
    for position in rng.permutation(len(blocks)):
        start, size = blocks[position]
        tree.add(subtree(start, size), reduce_rows(leaves[start : start + size].clone()).clone())
    assert torch.equal(tree.total(), root(leaves))


@given(SIZES, SEEDS)
@example(2, 0)
def test_read_only_terms_stay_as_they_are(members, seed):
    """As arrays from Ray's store must, which other processes see."""
    leaves, rng = leaves_of(members, seed), np.random.default_rng(seed)
    terms, kept = list(leaves.clone()), rng.random(members) < 0.7
    tree = TreeSum(members)
    for position in rng.permutation(members):
        tree.add((0, int(position)), terms[position], read_only=bool(kept[position]))
    assert torch.equal(tree.total(), root(leaves))
    for term, leaf, read_only in zip(terms, leaves, kept, strict=True):
        assert not read_only or torch.equal(term, leaf)


def test_only_what_may_be_overwritten_is_taken():
    tree = TreeSum(3)
    tree.add((0, 0), torch.ones(1), read_only=True)
    tree.add((0, 2), torch.ones(1))
    assert tree.take((0, 0)) is None
    # the last leaf has no sibling, and is the node above as well
    taken = tree.take((1, 1))
    assert taken is not None
    assert (1, 1) not in tree.nodes
    assert (0, 0) in tree.nodes


@given(SIZES, SEEDS, st.integers(1, 70), st.booleans(), st.booleans())
@example(5, 0, 1, True, True)
@example(100, 0, 64, False, False)
def test_weighted_rows_are_added_as_their_leaves_are(members, seed, chunk, counted, in_order):
    """Rows of float32 and counts, in stacks of at most ``chunk``, held back or not, in small pieces and in one."""
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(members, 8)) * 10.0 ** rng.integers(-8, 9, (members, 8))).float()
    weights = torch.from_numpy(rng.random((members, 1)))
    counts = [slice(2, 4), slice(7, 8)] if counted else []
    leaves = rows.double() * weights
    for each in counts:
        leaves[:, each] = 0
        leaves[0, each] = rows[0, each].double()
    blocks = stacks(members, chunk)
    for cached, held in ((3, 1 << 16), (20, 150), (1 << 17, 0)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tree_module, "CACHED", cached)
            patched.setattr(tree_module, "HELD_BYTES", held)
            sums = LeafSum(TreeSum(members), counts)
            for start, stop in blocks if in_order else rng.permutation(blocks).tolist():
                own = slice(start, stop)
                sums.add(start, rows[own], weights[own])
            sums.finish()
        assert torch.equal(sums.tree.total(), root(leaves))


@given(SIZES, SEEDS)
def test_the_sum_is_right(members, seed):
    leaves = leaves_of(members, seed)
    exact = [math.fsum(column) for column in leaves.T.tolist()]
    size = leaves.abs().sum(0).numpy()
    assert (np.abs(root(leaves).numpy() - exact) <= 1e-12 * size).all()
    assert torch.equal(reduce_rows(leaves.clone()), root(leaves))


def test_numbers_are_rows_too():
    """An upload may be one number of each client, ``[C]``."""
    found = LeafSum(TreeSum(3), ())
    found.add(0, torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, 1, dtype=torch.float64))
    found.finish()
    assert float(found.tree.total()) == 7


def test_the_order_of_addition_would_matter():
    """Else the tests above could not fail."""
    leaves = leaves_of(37, 1)
    assert not torch.equal(root(leaves), leaves.sum(0))
    backwards = torch.zeros(3, dtype=torch.float64)
    for leaf in leaves.flip(0):
        backwards += leaf
    assert not torch.equal(root(leaves), backwards)


@pytest.mark.parametrize("members", [1, 2, 5, 64, 100])
def test_leaves_in_order_need_a_vector_per_level(members):
    tree = TreeSum(members)
    for position, leaf in enumerate(leaves_of(members, 0)):
        tree.add((0, position), leaf.clone())
        assert len(tree.nodes) <= max(1, members.bit_length())
    assert len(tree.nodes) == 1


def test_an_incomplete_sum_is_refused():
    tree = TreeSum(3)
    tree.add((0, 0), torch.zeros(1, dtype=torch.float64))
    tree.add((0, 2), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="unpack"):
        tree.total()


@given(st.integers(0, 6), st.integers(0, 9), st.data())
def test_a_subtree_covers_its_positions(level, index, data):
    size = data.draw(st.integers(2**level // 2 + 1, 2**level))
    start = index << level
    assert subtree(start, size) == (level, index)


@given(st.integers(1, 300), st.data())
def test_a_range_consists_of_the_fewest_subtrees(members, data):
    start = data.draw(st.integers(0, members - 1))
    stop = data.draw(st.integers(start + 1, members))
    parts = list(subtrees(start, stop, members))
    assert [begin for begin, _ in parts] == [start, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == stop
    nodes = [subtree(begin, end - begin) for begin, end in parts]
    # added up as far as they can be, they stay as they are
    tree = TreeSum(members)
    for node in nodes:
        tree.add(node, torch.zeros(1, dtype=torch.float64))
    assert len(tree.nodes) == len(nodes)
    for (level, index), (begin, end) in zip(nodes, parts, strict=True):
        assert (begin, end) == (index << level, min(index + 1 << level, members))


@given(st.integers(1, 3000), st.integers(1, 200))
def test_stacks_are_equally_large(members, chunk):
    found = stacks(members, chunk)
    assert [position for block in found for position in range(*block)] == list(range(members))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) <= chunk
    assert max(sizes) - min(sizes) <= 1
    # half as many would be too large
    assert chunk >= members or -(-members // (len(found) // 2)) > chunk or len(found) == members


@pytest.mark.parametrize(
    ("members", "chunk", "sizes"),
    [(100, 64, [50, 50]), (10, 5, [5, 5]), (64, 64, [64]), (130, 64, [32, 33, 32, 33]), (3, 1, [1, 1, 1])],
)
def test_sizes_of_stacks(members, chunk, sizes):
    assert [stop - start for start, stop in stacks(members, chunk)] == sizes


WORK = st.lists(st.integers(1, 1000), min_size=1, max_size=300) | st.integers(1, 3000).map(lambda m: [7] * m)


CHUNKS = st.none() | st.integers(1, 70)
AT_ONCE = st.floats(0.05, 1.0)


def blocks_of(given: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return sorted(block for blocks in given for block in blocks)


def undivided(members: int, chunk: int | None) -> list[tuple[int, int]] | None:
    return None if chunk is None else list(stacks(members, chunk))


def worth(work: list[int], blocks: list[tuple[int, int]]) -> int:
    return sum(sum(work[start:stop]) for start, stop in blocks)


@given(WORK, st.integers(1, 64), AT_ONCE, st.integers(0, 5000))
def test_shares_are_aligned_powers_of_two_and_hold_everybody_once(work, slots, task_fraction, least):
    members, blocks = len(work), blocks_of(cut_into_tasks(work, slots, task_fraction, least=least))
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == members
    for start, stop in blocks:
        length = stop - start
        power = 1 << (length - 1).bit_length()
        assert start % power == 0
        # only a cohort's end may be ragged
        assert length == power or stop == members


@given(WORK, st.integers(1, 64), AT_ONCE, st.integers(1, 70), st.integers(0, 5000))
def test_stacks_are_not_divided(work, slots, task_fraction, chunk, least):
    whole = stacks(len(work), chunk)
    assert blocks_of(cut_into_tasks(work, slots, task_fraction, whole, least=least)) == whole


@given(WORK, st.integers(1, 64), AT_ONCE)
def test_shares_keep_every_slot_busy_to_the_end(work, slots, task_fraction):
    """None is worth more than its part of what was left as its turn began, but for rounding and single clients."""
    left = sum(work)
    for number, blocks in enumerate(cut_into_tasks(work, slots, task_fraction)):
        if number % slots == 0:
            most = left * task_fraction / slots
        share = worth(work, blocks)
        clients = [work[position] for block in blocks for position in range(*block)]
        assert len(clients) == 1 or share <= most * 17 / 16 + max(clients) / 2
        left -= share
    assert left == 0


@given(WORK, st.integers(1, 64), st.integers(0, 20000))
def test_little_work_is_not_divided(work, slots, least):
    given = cut_into_tasks(work, slots, least=least)
    if sum(work) <= least / 5:
        assert len(given) == 1
    assert len(given) <= len(cut_into_tasks(work, slots)) + slots


@given(WORK, st.integers(1, 64), AT_ONCE, st.integers(1, 20000))
def test_no_share_is_longer_than_may_be(work, slots, task_fraction, longest):
    for blocks in cut_into_tasks(work, slots, task_fraction, longest=longest):
        clients = [work[position] for block in blocks for position in range(*block)]
        assert len(clients) == 1 or sum(clients) <= longest * 17 / 16 + max(clients) / 2


@given(st.integers(1, 3000), st.integers(1, 64))
def test_of_equal_clients_there_are_few_shares_of_few_nodes(members, slots):
    given = cut_into_tasks([7] * members, slots)
    assert len(given) <= 4 * slots * (1 + math.log2(max(members, 2)))
    nodes = 0
    for blocks in given:
        tree = TreeSum(members)
        for start, stop in blocks:
            tree.add(subtree(start, stop - start), torch.zeros(1, dtype=torch.float64))
        nodes += len(tree.nodes)
    assert nodes <= 5 * len(given)


@given(WORK, st.integers(1, 64), AT_ONCE, CHUNKS, st.integers(1, 20), st.integers(0, 5000))
# a task's last block is dealt first here, and two small ones come before it when they are added up
@example([7] * 193, 1, 0.5, None, 7, 595)
def test_a_share_takes_no_more_memory_than_may_be(work, slots, task_fraction, chunk, nodes, least):
    """Whatever is added up: clients of any work, cut in any way."""
    members = len(work)
    given = cut_into_tasks(work, slots, task_fraction, undivided(members, chunk), nodes, least)
    assert [position for block in blocks_of(given) for position in range(*block)] == list(range(members))
    for blocks in given:
        tree, most = TreeSum(members), 0
        for start, stop in blocks:
            # a stack is added up at once
            leaves = [(at, at + 1) for at in range(start, stop)] if chunk is None else subtrees(start, stop, members)
            for begin, end in leaves:
                tree.add(subtree(begin, end - begin), torch.zeros(1, dtype=torch.float64))
                most = max(most, len(tree.nodes))
        assert most <= nodes or (chunk is not None and len(blocks) == 1)


@given(WORK, st.integers(1, 64), st.integers(1, 70))
def test_what_costs_most_comes_first(work, slots, chunk):
    whole = stacks(len(work), chunk)
    heaviest = [
        max(worth(work, [block]) for block in blocks) for blocks in cut_into_tasks(work, slots, undivided=whole)
    ]
    # larger blocks by powers of two
    assert all(later < (2 if chunk > 1 else 1.001) * earlier for earlier, later in itertools.pairwise(heaviest))


@given(WORK, st.integers(2, 64), st.data())
def test_a_client_that_would_keep_the_others_waiting_comes_first(work, slots, data):
    slow = data.draw(st.integers(0, len(work) - 1))
    work[slow] = 3 * sum(work)
    first = cut_into_tasks(work, slots)[0]
    assert any(start <= slow < stop for start, stop in first)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_weights(sizes):
    total = sum(sizes)
    assert weights_of(np.array(sizes), "samples") == [size / total for size in sizes]
    assert weights_of(np.array(sizes), "uniform") == [1 / len(sizes)] * len(sizes)
    assert math.isclose(math.fsum(weights_of(np.array(sizes), "samples")), 1, rel_tol=1e-14)
