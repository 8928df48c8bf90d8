"""Counter-based streams: pure, disjoint, cheap, and harmless to global generators."""

import subprocess
import sys
import timeit

import numpy as np
import pytest

from fedray.core.seeds import SERVER, Purpose, permutation, stream, torch_rng, torch_seed


def test_the_same_arguments_give_the_same_draws():
    assert (stream(3, Purpose.BATCHES, 1, 2).random(5) == stream(3, Purpose.BATCHES, 1, 2).random(5)).all()


def test_every_argument_matters():
    base = (0, Purpose.BATCHES, 1, 2, 3)
    others = [
        (1, *base[1:]),
        (0, Purpose.DROPOUT, 1, 2, 3),
        (0, Purpose.BATCHES, 2, 1, 3),
        (0, Purpose.BATCHES, 1, 2, 4),
    ]
    draws = {stream(*arguments).bit_generator.random_raw() for arguments in [base, *others]}
    assert len(draws) == 5


def test_left_out_coordinates_are_zero():
    assert torch_seed(5, Purpose.COHORT, 7) == torch_seed(5, Purpose.COHORT, 7, 0, 0)


def test_coordinates_are_the_upper_counter_words():
    state = stream(2**63, Purpose.PROBE, 4, SERVER, 2**64 - 1).bit_generator.state["state"]
    assert state["counter"].tolist() == [0, 4, SERVER, 2**64 - 1]
    assert state["key"].tolist() == [2**63, Purpose.PROBE]


def test_a_long_stream_stays_out_of_its_neighbour():
    rng = stream(0, Purpose.BATCHES, 1)
    rng.random(100_000)
    assert rng.bit_generator.state["state"]["counter"].tolist()[1:] == [1, 0, 0]


@pytest.mark.parametrize("arguments", [(-1,), (2**64,), (0, -1), (0, 1, 2**64), (0, 1, 2, 3, 4)])
def test_arguments_out_of_range_are_refused(arguments):
    seed, *coordinates = arguments
    with pytest.raises(ValueError, match="stream"):
        stream(seed, Purpose.INIT, *coordinates)


def test_purposes_are_numbered_for_ever():
    numbers = dict(INIT=0, PARTITION=1, COHORT=2, BATCHES=3, AUGMENTATION=4, DROPOUT=5)
    numbers |= dict(REPRESENTATION=6, PUBLIC=7, PROBE=8, CLIENT_INIT=9)
    assert numbers.items() <= {purpose.name: purpose.value for purpose in Purpose}.items()


def test_known_values():
    """Golden numbers: they hold in every process, on every machine and with every numpy."""
    assert torch_seed(0, Purpose.INIT) == 106500010600983629
    assert torch_seed(2**63 - 1, Purpose.BATCHES, 3, SERVER, 2) == 180186903326278337


def test_a_stream_costs_microseconds():
    seconds = min(timeit.repeat(lambda: stream(1, Purpose.BATCHES, 2, 3, 4), number=200, repeat=5)) / 200
    assert seconds < 100e-6


def test_torch_rng_seeds_and_restores():
    import torch

    torch.random.manual_seed(1)
    before = torch.random.get_rng_state()
    with torch_rng(4, Purpose.INIT, 2):
        first = torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch_rng(4, Purpose.INIT, 2):
        assert torch.equal(torch.rand(3), first)
    with torch_rng(4, Purpose.INIT, 3):
        assert not torch.equal(torch.rand(3), first)


def test_torch_rng_restores_after_an_error():
    import torch

    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError), torch_rng(0, Purpose.DROPOUT):
        raise RuntimeError
    assert torch.equal(torch.random.get_rng_state(), before)


def test_numpys_global_generator_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    stream(0, Purpose.COHORT, 1).permutation(10)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_data_and_seeds_import_neither_torch_nor_ray():
    code = (
        "import sys, fedray.core.seeds, fedray.data.federated, fedray.data.sources.idx, fedray.data.sources.npz;"
        "import fedray.data.partitions.plot;"
        "sys.exit(str({'torch', 'ray'} & set(sys.modules)) if {'torch', 'ray'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [0, 1, 2, 60, 1000])
def test_a_permutation_is_the_first_of_its_stream(count):
    """Whatever the thread's generator has drawn before, also from streams of other coordinates."""
    for seed, *coordinates in [(1, 3, 5), (2**64 - 1, 0, 2**63, 7), (1, 3, 5)]:
        drawn = stream(seed, Purpose.BATCHES, *coordinates).permutation(count)
        assert np.array_equal(permutation(count, seed, Purpose.BATCHES, *coordinates), drawn)
    with pytest.raises(ValueError, match="three coordinates"):
        permutation(count, 1, Purpose.BATCHES, 1, 2, 3, 4)
