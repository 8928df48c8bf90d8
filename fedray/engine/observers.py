"""What observes the rounds of a run: none of these knows of another."""

from __future__ import annotations

from collections.abc import Callable

from fedray.engine import checkpoint as checkpoints
from fedray.engine.pool import Pool
from fedray.engine.profile import Profile
from fedray.engine.round import RoundResult
from fedray.engine.run_state import RunState
from fedray.experiment import Experiment
from fedray.tracking.costs import bytes_per_client, flops_of_round
from fedray.tracking.recorder import Recorder


class Observer:
    """Sees each round twice: when it is trained, and when it is evaluated too, which may be while the next one is
    trained."""

    def trained(self, result: RoundResult) -> None:
        """The run's state is that after the round."""

    def evaluated(self, result: RoundResult) -> None:
        """``result.metrics`` is complete. The state is that after the round if :meth:`needs_state_after` said so."""

    def needs_state_after(self, number: int) -> bool:
        """Whether :meth:`evaluated` must come before the next round begins."""
        return False


class Costs(Observer):
    """Adds up what the rounds cost the clients, in bytes and FLOPs."""

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        self.state, self.experiment = state, experiment

    def trained(self, result: RoundResult) -> None:
        experiment, cohort, costs = self.experiment, result.cohort, self.state.costs
        down, up = bytes_per_client(experiment.algorithm.traffic, experiment.facts)
        costs["iterations"] += max(cohort.steps)
        costs["bytes_down"] += down * len(cohort.ids)
        costs["bytes_up"] += up * len(cohort.ids)
        costs["flops"] += flops_of_round(experiment.algorithm, self.state.server, experiment.facts, result.samples)
        result.metrics |= costs


class Records(Observer):
    """Writes each round to the run folder. ``wall_seconds`` gives the seconds of the run so far."""

    def __init__(self, recorder: Recorder, wall_seconds: Callable[[], float]) -> None:
        self.recorder, self.wall_seconds = recorder, wall_seconds

    def evaluated(self, result: RoundResult) -> None:
        result.metrics["wall_seconds"] = self.wall_seconds()
        if result.scores is not None:
            self.recorder.scores(result.scores)
        self.recorder.round(result.metrics, result.log)
        self.recorder.profile(result.number, result.profile)


class Checkpoints(Observer):
    """Writes a checkpoint every ``run.checkpoint_every`` rounds, and when it is asked to at the end."""

    def __init__(
        self,
        state: RunState,
        pool: Pool,
        recorder: Recorder,
        experiment: Experiment,
        profile: Profile,
        wall_seconds: Callable[[], float],
    ) -> None:
        self.state, self.pool, self.recorder, self.experiment = state, pool, recorder, experiment
        self.profile, self.wall_seconds = profile, wall_seconds
        self.saved_round = state.server.round

    def needs_state_after(self, number: int) -> bool:
        every = self.experiment.config.run.checkpoint_every
        return bool(every) and number % every == 0 and number < self.experiment.rounds

    def evaluated(self, result: RoundResult) -> None:
        if self.needs_state_after(result.number) and not result.diverged:
            with self.profile.of("checkpoint"):
                self.save()

    def save(self) -> None:
        """Write a checkpoint, after everything that was recorded up to it; nothing if the round has one already."""
        state, number = self.state, self.state.server.round
        if self.saved_round == number:
            return
        self.recorder.sync()
        earlier = {seen: f"model-{seen}" for seen in state.earlier.handles}
        handles = {file.name: file for file in state.clients.values()}
        handles |= {name: state.earlier.handles[seen] for seen, name in earlier.items()}
        checkpoints.save(
            self.recorder.folder.checkpoints,
            number,
            state.vectors(),
            {**state.record(), "wall_seconds": self.wall_seconds()},
            states={client: state.clients[client].name for client in sorted(state.clients)},
            past=earlier,
            store=lambda name, path: self.pool.store(handles[name], path),
            keep=self.experiment.config.run.keep_checkpoints,
        )
        self.saved_round = number
