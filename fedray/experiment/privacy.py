"""Makes what ``privacy`` asks for: the noise that follows from epsilon, and the accountant."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.errors import UserError
from fedray.experiment.named import selection_name
from fedray.experiment.permissions import allows, require
from fedray.experiment.stage import Stage
from fedray.privacy import Accountant, Mechanism
from fedray.privacy.accountant import noise_for
from fedray.privacy.mechanism import FIRST_CLIP
from fedray.selection import Selection

COSTLY = 1.25
"""If adapting the length of clipping makes the noise of updates larger by more than this factor, a line says so."""


@dataclass(frozen=True, kw_only=True)
class Privacy(Stage):
    """How the server's mean of updates is made private: by ``mechanism``; ``accountant`` says what that promises.
    ``participation`` is the probability with which each client takes part in a round, None if cohorts have one size."""

    mechanism: Mechanism
    accountant: Accountant
    participation: float | None


def privacy_of(
    config: Config, algorithm: Algorithm, selection: Selection, statistics: Collection[str], cohort: int, active: int,
    rounds: int,
) -> Privacy | None:  # fmt: skip
    """Returns what ``privacy`` asks for, or None if it asks for nothing.

    Args:
        config: The configuration.
        algorithm: The algorithm of the run.
        selection: What chooses the clients of a round.
        statistics: The names of the model's buffers that change as it is trained and leave clients.
        cohort: The size of a cohort, or its mean.
        active: How many clients have samples.
        rounds: The rounds of the run.

    Raises:
        UserError: Something in the configuration would break the promise, or the noise for epsilon is too large.
    """
    asked = config.privacy
    if not asked.is_on:
        return None
    _check(config, algorithm, selection)
    if statistics:
        raise UserError(
            f"privacy: running statistics of {min(statistics).rpartition('.')[0] or 'it'} would leave clients without "
            "noise: use another norm (model.norm=group), or keep the norms at the clients (model.private=[norm])"
        )
    counted, clients = asked.cohort or cohort, asked.clients or active
    if counted > clients:
        key = "privacy.cohort" if asked.cohort else "train.cohort_size"
        raise UserError(f"{key}: {counted} clients in a round are more than {clients} altogether (privacy.clients)")
    rate = counted / clients
    noise = asked.noise
    if asked.epsilon is not None:
        needed = noise_for(asked.epsilon, rate, asked.delta, asked.accountant, rounds)
        if noise not in (None, needed):
            raise UserError(
                f"privacy.epsilon={asked.epsilon:g} needs noise z={needed:g} in {rounds} rounds, and privacy.noise is "
                f"{noise:g}: leave one of the two open (privacy.noise=null)"
            )
        noise = needed
    assert noise is not None
    adaptive = asked.clip is None if asked.adaptive is None else asked.adaptive
    mechanism = Mechanism(noise, asked.clip or FIRST_CLIP, adaptive, cohort, counted, config.run.seed)
    small = adaptive and counted < mechanism.least_cohort
    why = (
        f"with noise z={noise:.4g} the length of clipping can only be adaptive in cohorts of at least "
        f"{mechanism.least_cohort} clients, and there are {counted}"
    )
    if small and asked.adaptive:
        raise UserError(f"privacy: {why}: set privacy.clip, or more clients or a larger privacy.epsilon")
    if small:
        adaptive, mechanism = False, replace(mechanism, adaptive=False)
    accountant = Accountant(noise, rate, asked.delta, asked.accountant)
    notes = _notes(config, mechanism, accountant, rounds, counted, clients, (cohort, active))
    if small:
        notes.append(f"warning: privacy: {why}; it stays at {FIRST_CLIP:g}, and privacy.clip sets another one")
    poisson = asked.participation == "poisson"
    return Privacy(
        mechanism=mechanism,
        accountant=accountant,
        participation=cohort / active if poisson else None,
        # a longer run has other noise for the same epsilon, and must not be taken for the same
        settings={"privacy.noise": noise, "privacy.clip": mechanism.clip, "privacy.adaptive": adaptive},
        notes=tuple(notes),
    )


def _notes(
    config: Config, mechanism: Mechanism, accountant: Accountant, rounds: int, counted: int, clients: int,
    simulated: tuple[int, int],
) -> list[str]:  # fmt: skip
    """Returns what the user should know before the run."""
    asked, noise = config.privacy, mechanism.noise
    each = f"each of {clients} clients in a round with probability {accountant.rate:.4g}"
    epsilon = f"epsilon {accountant.epsilon(rounds):.4g} at delta {asked.delta:g}" if noise else "no noise"
    lines = [f"privacy: {epsilon} after {rounds} round{'' if rounds == 1 else 's'}, {each}; noise z={noise:.4g}"]
    if mechanism.of_updates > COSTLY * noise:
        lines.append(
            f"warning: privacy: the noise of updates is z={mechanism.of_updates:.4g}, as a part of it is spent on "
            f"adapting the length of clipping in cohorts of {counted} clients; a fixed privacy.clip spends none"
        )
    if (counted, clients) != simulated:
        lines.append(
            f"warning: privacy: {simulated[0]} of {simulated[1]} clients are simulated, with the noise and epsilon of "
            f"{counted} of {clients} (privacy.cohort, privacy.clients)"
        )
    if asked.participation == "fixed" and accountant.rate < 1:
        lines.append(
            "warning: privacy.participation=fixed: epsilon is that of clients who take part independently of each "
            "other; in cohorts of one size a client takes the place of another, which changes the sum by up to twice "
            "as much. participation=poisson is right"
        )
    if asked.delta > 1 / clients:
        lines.append(f"warning: privacy.delta={asked.delta:g} should be less than one in {clients} clients")
    return lines


def _check(config: Config, algorithm: Algorithm, selection: Selection) -> None:
    """Raises :class:`UserError` if the server would learn more of clients than the noisy mean of their updates, or
    clients would not take part as the accountant assumes."""
    train, system = config.train, config.system
    what = "its server's rule uses nothing of clients but a mean of models"
    require(algorithm, config.algorithm.name, "allows_aggregation", "privacy", what)
    kind = selection_name(train.sampling)
    problems = [
        (train.weighting == "samples", "train.weighting=samples: a client with many samples would change the sum more"),
        (not allows(type(selection), "uniform"), f"train.sampling={kind}: epsilon is that of clients drawn uniformly"),
        (
            train.aggregation.kind != "mean" or config.attack.kind is not None,
            "train.aggregation and attack: the server gets a sum of updates alone",
        ),
        (system.mode == "buffered", "system.mode=buffered: who is fast would take part more often"),
        (system.over_select != 1, f"system.over_select={system.over_select:g}: who is fast would take part more often"),
        (
            system.deadline_seconds is not None and system.server_mbps is not None,
            "system.deadline_seconds beside system.server_mbps: who answers in time would depend on the others",
        ),
        (system.availability is not None, "system.availability: when a round begins would depend on earlier clients"),
        (len(algorithm.phases) > 1, "several phases: the noise is that of one sum in each round"),
        (bool(config.run.diagnostics), "run.diagnostics: it compares clients with the mean of their updates"),
    ]
    for holds, problem in problems:
        if holds:
            raise UserError(f"privacy does not go with {problem}")
