"""Computes the epsilon of private runs, with the library dp-accounting."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedray.errors import UserError

INTERVALS = (1e-3, 1e-4)
"""How finely privacy losses are told apart: an epsilon that is less than 100 times the first is computed with the
second, which takes ten times as long. With little noise losses are large, and told apart more coarsely."""

MUCH_NOISE = 0.5
"""The noise multiplier from which on losses are told apart as :data:`INTERVALS` say."""


@dataclass(frozen=True)
class Accountant:
    """Computes the epsilon of a run in which each client takes part in a round with the probability ``rate``, and the
    sum of the updates gets noise of ``noise`` (z) times the length to which they are clipped. ``delta`` is the
    probability with which epsilon may be exceeded, and ``kind`` is ``pld`` or ``rdp``.

    Neighbours are runs with and without one client. M. Abadi et al.: Deep Learning with Differential Privacy. CCS 2016.
    Privacy loss distributions: V. Doroshenko, B. Ghazi, P. Kamath, R. Kumar, P. Manurangsi: Connect the Dots. PoPETs
    2022. Rényi divergences: I. Mironov, K. Talwar, L. Zhang: Rényi Differential Privacy of the Sampled Gaussian
    Mechanism. 2019.
    """

    noise: float
    rate: float
    delta: float
    kind: str

    def epsilon(self, rounds: int) -> float:
        """Returns epsilon after ``rounds`` rounds: 0 before the first, and infinity with less noise than
        :data:`LEAST_NOISE`."""
        if not rounds:
            return 0.0
        if self.noise < LEAST_NOISE:
            return math.inf
        with _quiet():
            if self.kind == "pld":
                epsilon = 0.0
                coarser = max(1.0, (MUCH_NOISE / self.noise) ** 2)
                for interval in (coarser * each for each in INTERVALS):
                    composed = _loss_of_a_round(self.noise, self.rate, interval).self_compose(rounds)
                    epsilon = float(composed.get_epsilon_for_delta(self.delta))
                    if epsilon >= 100 * interval:
                        break
                return epsilon
            library = _library()
            event = library.GaussianDpEvent(self.noise)
            event = library.PoissonSampledDpEvent(self.rate, event) if self.rate < 1 else event
            accountant = library.rdp.RdpAccountant().compose(library.SelfComposedDpEvent(event, rounds))
            return float(accountant.get_epsilon(self.delta))


LEAST_NOISE = 1e-2
"""The least noise multiplier for which epsilon is computed. With less it is in the thousands."""


@lru_cache
def noise_for(epsilon: float, rate: float, delta: float, kind: str, rounds: int) -> float:
    """Returns the least noise multiplier z of four digits with which ``rounds`` rounds have at most ``epsilon``. The
    other arguments are those of :class:`Accountant`."""
    from scipy import optimize

    def excess(z: float, kind: str = kind) -> float:
        return Accountant(z, rate, delta, kind).epsilon(rounds) - epsilon

    most = 1.0
    while excess(most, "rdp") > 0:
        most *= 2
    # the divergences overestimate epsilon, so what is enough by them is enough by the losses
    least = most / 2
    while excess(least) <= 0:
        most, least = least, least / 2
        if least < LEAST_NOISE:
            raise UserError(
                f"privacy.epsilon={epsilon:g} with privacy.delta={delta:g} needs no noise worth the name, so that "
                "nothing would be private: give smaller ones"
            )
    if excess(most) > 0:
        raise UserError(f"privacy.delta={delta:g}: it is too small for the noise of epsilon={epsilon:g} to be computed")
    z = _rounded_up(optimize.brentq(excess, least, most, xtol=1e-5 * most, rtol=1e-5))
    while excess(z) > 0:
        z = _rounded_up(z * 1.0001)
    return z


def _rounded_up(value: float) -> float:
    """Returns the least number of four digits that is at least ``value``, so that all machines find the same."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return round(math.ceil(value / unit) * unit, 12)


@lru_cache
def _loss_of_a_round(noise: float, rate: float, interval: float) -> Any:
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what the library says of Rényi orders that it leaves out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise UserError(
            "privacy needs the library dp-accounting, which computes epsilon: pip install 'fedray[privacy]'"
        ) from None
    return dp_accounting
