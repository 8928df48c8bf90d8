"""Random numbers that depend only on (seed, purpose, coordinates), and not on who draws them or in which order.

They come from Philox (Salmon et al., SC 2011), a keyed function of a 256-bit counter. The key is (seed, purpose). The
upper three of the counter's four words are the coordinates, for example (round, client, pass). A stream advances only
the lowest word, so streams with different coordinates do not overlap for 2**64 blocks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

SERVER = 2**63
"""A number that stands for the server where random numbers depend on a client's number. All clients' numbers are
smaller."""


_generators = threading.RLock()
"""The lock of the process's global generators. A thread holds it while it has seeded them, because another thread may
read items during dropout."""


_own = threading.local()
"""A generator of each thread, for :func:`permutation`."""


def are_held() -> bool:
    """Returns whether this thread is in a context that seeds the global generators, so that no other thread can be in
    one."""
    return bool(_generators._is_owned())  # type: ignore[attr-defined]


class Purpose(IntEnum):
    """What random numbers are drawn for. Each purpose has its own random numbers (:func:`stream`). All results depend
    on these values, so new ones may be added, but existing ones must not change."""

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
    """Which clients are evaluated, and which test samples a client is scored on if several clients may have the same
    ones."""
    FINETUNE = 12
    ITEM = 13
    """The random transforms of items that are read when they are used."""
    TRANSFORM = 14
    """The transform of mini-batches (:mod:`fedray.core.transform`)."""
    UPLOAD = 15
    """The steps that uploads pass (:mod:`fedray.core.upload`)."""
    DEVICE = 16
    """How fast a client's device and network are, and at which hours it can be reached (``system``)."""
    ANSWER = 17
    """Whether a client answers in a round (``system.dropout``)."""
    FURTHER = 18
    """The mini-batches of local steps that an algorithm makes besides those of local training."""
    ATTACK = 19
    """Which clients are Byzantine, and the noise that they send (``attack``)."""
    PRIVACY = 20
    """The noise of differential privacy (``privacy``)."""
    ALGORITHM = 21
    """What the rules of user-defined algorithms draw."""


class _Unseeded(ISeedSequence):
    """A seed for a generator whose state is set right afterwards. It keeps numpy from collecting the system's entropy,
    which would take longer than everything else."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.zeros(n_words, dtype)


def stream(seed: int, purpose: Purpose, *coordinates: int) -> np.random.Generator:
    """Returns a NumPy generator of random numbers that depend only on (seed, purpose, coordinates). So every process
    draws the same numbers, in whatever order the generators are made.

    For example, ``stream(seed, Purpose.COHORT, round).permutation(clients)``. Making a generator takes about 4
    microseconds.

    Args:
        seed: in [0, 2**64).
        purpose: what is drawn. Different purposes have different numbers, also in the same round.
        *coordinates: up to three whole numbers in [0, 2**64), such as round and client; missing ones are 0.

    Raises:
        ValueError: there are more than three coordinates, or a number is out of range.
    """
    philox = np.random.Philox(_Unseeded())  # type: ignore[arg-type]
    philox.state = _beginning(seed, purpose, coordinates)
    return np.random.Generator(philox)


def permutation(count: int, seed: int, purpose: Purpose, *coordinates: int) -> NDArray[np.int64]:
    """Returns the permutation of ``range(count)`` that ``stream(seed, purpose, *coordinates)`` draws first. It takes
    half the time, because no generator is made for it; every client needs one in each epoch."""
    try:
        generator = _own.generator
    except AttributeError:
        generator = _own.generator = stream(seed, purpose)
    generator.bit_generator.state = _beginning(seed, purpose, coordinates)
    drawn: NDArray[np.int64] = generator.permutation(count)
    return drawn


def _beginning(seed: int, purpose: Purpose, coordinates: tuple[int, ...]) -> Any:
    """Returns the state of a Philox generator at the beginning of the stream of :func:`stream`'s arguments."""
    if len(coordinates) > 3:
        raise ValueError(f"a stream has three coordinates at most, not {len(coordinates)}")
    words = (seed, int(purpose), 0, *coordinates)
    if min(words) < 0 or max(words) >= 2**64:
        raise ValueError(f"seed and coordinates of a stream must be in [0, 2**64), not {words}")
    place = {"key": words[:2], "counter": (*words[2:], 0, 0, 0)[:4]}
    return {
        "bit_generator": "Philox", "state": place, "has_uint32": 0, "uinteger": 0, "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
    }  # fmt: skip


def torch_seed(seed: int, purpose: Purpose, *coordinates: int) -> int:
    """Returns a seed in [0, 2**63) for a torch generator, which depends only on (seed, purpose, coordinates), like the
    numbers of :func:`stream`. Example: ``torch.Generator().manual_seed(torch_seed(seed, Purpose.UPLOAD, round,
    client))``."""
    # the raw word is used, as numpy may change how `integers` makes numbers of it
    return int(stream(seed, purpose, *coordinates).bit_generator.random_raw()) >> 1


def _cuda_devices() -> range:
    """Returns the numbers of the GPUs whose random generators are in use: all of them, or none before this process
    first uses CUDA."""
    import torch

    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


@contextmanager
def torch_rng(seed: int, purpose: Purpose, *coordinates: int) -> Iterator[None]:
    """A context in which torch's global generators draw numbers that depend only on (seed, purpose, coordinates), as in
    :func:`stream`. After it the generators are in the same state as before.

    It is meant for constructing models and for dropout, to which no generator can be passed. The generators of GPUs are
    included if CUDA is already in use.
    """
    import torch

    devices = _cuda_devices()
    with _generators, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also leave a seed behind for CUDA's first use, and takes ten times as long
        drawn = torch_seed(seed, purpose, *coordinates)
        torch.default_generator.manual_seed(drawn)
        if devices:
            torch.cuda.manual_seed_all(drawn)
        yield


def every_rng(seed: int, purpose: Purpose, *coordinates: int) -> AbstractContextManager[None]:
    """Returns a context in which the global generators of torch, Python and numpy draw numbers that depend only on
    (seed, purpose, coordinates), as in :func:`stream`. It is for models that draw from several generators; torch draws
    the same numbers as in :func:`torch_rng`. After the context the generators are in the same state as before."""
    return global_generators(torch_seed(seed, purpose, *coordinates))


def drawn_by(run: Callable[[], Any]) -> set[str]:
    """Finds out whether a model draws random numbers: calls ``run()``, for example a forward pass, and returns the
    global generators from which the call has drawn, as a set of the names ``torch``, ``python`` and ``numpy``. Draws in
    a context of this module that seeds them do not count. The generators of GPUs are not looked at."""
    before = generator_states()
    run()
    return {name for name, state in generator_states().items() if state != before[name]}


def generator_states() -> dict[str, Any]:
    """Returns the states of the global generators ``torch``, ``python`` and ``numpy``, for comparisons."""
    import torch

    # another thread may be in a context that seeds them
    with _generators:
        kind, key, *rest = np.random.get_state()  # noqa: NPY002
        of_torch = torch.random.get_rng_state().numpy().tobytes()
        return {"torch": of_torch, "python": random.getstate(), "numpy": (kind, np.asarray(key).tobytes(), *rest)}


@contextmanager
def global_generators(seed: int | None = None) -> Iterator[None]:
    """A context in which user-defined code may draw from the global generators of Python, numpy and torch. After the
    context the generators are in the same state as before, so that later random numbers do not depend on what was drawn
    in it.

    If ``seed`` is not None, the generators are seeded with it at the beginning of the context.
    """
    import torch

    with _generators:
        # numpy's old generator is included because users' transforms draw from it
        before_python, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        devices = _cuda_devices()
        try:
            with torch.random.fork_rng(devices=devices):
                if seed is not None:
                    random.seed(seed)
                    np.random.seed(seed % 2**32)  # noqa: NPY002
                    torch.default_generator.manual_seed(seed)
                    if devices:
                        torch.cuda.manual_seed_all(seed)
                yield
        finally:
            random.setstate(before_python)
            np.random.set_state(before_numpy)  # noqa: NPY002
