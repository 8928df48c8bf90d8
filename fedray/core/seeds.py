"""Counter-based randomness: every draw is a function of (seed, purpose, coordinates), in whichever order and process.

Philox (Salmon et al., SC 2011) is a keyed function of a 256-bit counter. The key is (seed, purpose). Of the counter's
four words the upper three are the coordinates, for example (round, client, pass); a stream advances only the lowest,
so distinct coordinates give disjoint streams of 2**64 blocks each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

SERVER = 2**63
"""The client coordinate of the server: coordinates can't be negative, and clients have ids below it."""


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every result: add to them, never renumber."""

    INIT = 0
    PARTITION = 1
    COHORT = 2
    BATCHES = 3
    AUGMENTATION = 4
    DROPOUT = 5
    REPRESENTATION = 6
    PUBLIC = 7
    PROBE = 8
    CLIENT_INIT = 9
    HEAD_INIT = 10
    EVALUATION = 11
    """Which clients are evaluated, and which test samples they share with others."""
    FINETUNE = 12


class _Unseeded(ISeedSequence):
    """Saves a generator whose state is set anyway from being seeded with entropy of the system's, which takes longer
    than all the rest."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.zeros(n_words, dtype)


def stream(seed: int, purpose: Purpose, *coordinates: int) -> np.random.Generator:
    """The generator of (seed, purpose, coordinates): a pure function, some 4 microseconds.

    Seed and coordinates (three at most, 0 where left out) are in [0, 2**64); ValueError otherwise.
    """
    if len(coordinates) > 3:
        raise ValueError(f"a stream has three coordinates at most, not {len(coordinates)}")
    words = (seed, int(purpose), 0, *coordinates)
    if min(words) < 0 or max(words) >= 2**64:
        raise ValueError(f"seed and coordinates of a stream must be in [0, 2**64), not {words}")
    place = {"key": words[:2], "counter": (*words[2:], 0, 0, 0)[:4]}
    philox = np.random.Philox(_Unseeded())  # type: ignore[arg-type]
    state: Any = {"bit_generator": "Philox", "state": place, "has_uint32": 0, "uinteger": 0}
    philox.state = state | {"buffer": (0, 0, 0, 0), "buffer_pos": 4}
    return np.random.Generator(philox)


def torch_seed(seed: int, purpose: Purpose, *coordinates: int) -> int:
    """A seed in [0, 2**63) for a torch generator, drawn from the stream of the same arguments."""
    # the raw word, as numpy may change how `integers` uses it
    return int(stream(seed, purpose, *coordinates).bit_generator.random_raw()) >> 1


@contextmanager
def torch_rng(seed: int, purpose: Purpose, *coordinates: int) -> Iterator[None]:
    """Within it torch's global generators draw from (seed, purpose, coordinates); afterwards they are as before.

    For model construction and dropout, which know no other generator. CUDA's are included once CUDA is in use.
    """
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also leave a seed behind for CUDA's first use, and takes ten times as long
        drawn = torch_seed(seed, purpose, *coordinates)
        torch.random.default_generator.manual_seed(drawn)
        if devices:
            torch.cuda.manual_seed_all(drawn)
        yield


@contextmanager
def global_generators(seed: int | None = None) -> Iterator[None]:
    """Within it the user's own code may draw from the global generators of Python, numpy and torch; afterwards they are
    as before. ``seed`` sets them first."""
    import torch

    # numpy's old generator is named because users' transforms draw from it
    before_python, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)  # noqa: NPY002
                torch.random.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before_python)
        np.random.set_state(before_numpy)  # noqa: NPY002
