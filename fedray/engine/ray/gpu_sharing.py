"""Determines how many client actors fit on a GPU. Before the client actors start, a single one is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from fedray.core.batches import Batch
from fedray.core.structure import map_leaves
from fedray.engine.clients import Clients
from fedray.engine.environment import runtime_env
from fedray.engine.memory import Footprint, footprint, is_out_of_memory, processes_per_gpu, too_large
from fedray.engine.process import computing_process, require_device
from fedray.engine.ray.cluster import in_trial_group, resources, shortage
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.states import StateFolder
from fedray.errors import UserError, first_line
from fedray.experiment.experiment import Experiment

MOST_PER_GPU = 4
"""The most actors on one GPU under ``engine.actors_per_gpu: auto``. This is a guess: it has not been measured."""


class Probe:
    """A Ray actor that is set up like a client actor, to measure how much memory of a GPU a client actor takes."""

    def measure(self, experiment: Experiment, data: StoredData) -> Footprint:
        """Returns the GPU memory that a client actor of ``experiment`` takes while it trains. ``data`` is the data set
        in Ray's object store. Raises :class:`UserError` if training does not fit on the GPU."""
        engine = experiment.config.engine
        with computing_process(engine.threads, engine.portable_bits, experiment.precision):
            require_device(experiment.device, experiment.precision)
            clients = Clients(experiment, data.get(), StateFolder.of_run(experiment.config), experiment.device)
            return footprint_of(clients)


def footprint_of(clients: Clients) -> Footprint:
    """Measures and returns the GPU memory that this process takes while it trains clients, as many together as in the
    run. All of them are copies of the client with the most samples. ``clients`` has the network, the data and the
    configuration, which says how many clients are trained together.

    Raises :class:`UserError`, which shows the calculation, if these clients do not fit on the GPU together.
    """
    experiment, width = clients.experiment, clients.state_width()
    size = (experiment.chunk or 1) if experiment.vectorize else clients.lanes
    x, y = clients.first_batch(clients.largest, copies=size)
    try:
        return footprint(clients.network, Batch(x, y, 0), width)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        one = map_leaves(lambda each: each[0], x)
        line = too_large(clients.network, size, one, width, first_line(error))
        raise UserError(f"{line}, and engine.device=cpu does without a GPU") from None


def shared_gpus(experiment: Experiment, data: StoredData, say: Callable[[str], None]) -> Experiment:
    """Decides, before client actors start, how many of them share a GPU, and returns an experiment with this number.

    With ``engine.actors_per_gpu=auto`` the memory of one actor is measured, and the result has the number that fits
    (:func:`fitting`) in place of ``auto``. If the user has set a number, ``experiment`` is returned unchanged. But the
    memory is measured too, and if so many actors do not fit, :class:`UserError` is raised, which shows the calculation.
    In a trial of a sweep, without a GPU, or with one actor on a GPU, nothing is measured, and ``experiment`` is
    returned unchanged.

    ``data`` is the data set in Ray's object store; ``say(line)`` shows a line to the user.
    """
    engine = experiment.config.engine
    asked: Any = engine.actors_per_gpu or round(1 / (engine.gpus_per_actor or 1))
    # nothing is measured in a trial, whose placement group has no whole GPU
    if experiment.device != "cuda" or asked == 1 or in_trial_group():
        return experiment
    if asked == "auto":
        chosen = fitting(experiment, data, MOST_PER_GPU, "a client actor", say)
        engine = engine.model_copy(update={"actors_per_gpu": chosen})
        return replace(experiment, config=experiment.config.model_copy(update={"engine": engine}))
    found = _announced(experiment, data, "a client actor", say)
    if asked > found.fits:
        raise UserError(
            f"engine.actors_per_gpu={asked} does not fit: {found.arithmetic(asked)}; "
            + (f"engine.actors_per_gpu={found.fits} does" if found.fits else "a smaller engine.chunk may")
        )
    return experiment


def fitting(experiment: Experiment, data: StoredData, most: int, what: str, say: Callable[[str], None]) -> int:
    """Returns how many processes that train clients of ``experiment`` can share a GPU: as many as fit into its memory,
    but at most ``most``, and no more than there are CPUs for. The memory of one such process is measured for this.
    ``data`` is the data set in Ray's object store. ``say(line)`` shows lines to the user, in which such a process is
    called ``what``, for example "a client actor"."""
    engine, total = experiment.config.engine, resources()
    found = _announced(experiment, data, what, say)
    cpus = total.get("CPU", 0) / max(total.get("GPU", 1), 1)
    chosen = processes_per_gpu(found, cpus / engine.cpus_per_actor if engine.cpus_per_actor else cpus, most)
    say(f"engine.actors_per_gpu={chosen}: {found.arithmetic(chosen)}")
    return chosen


def _announced(experiment: Experiment, data: StoredData, what: str, say: Callable[[str], None]) -> Footprint:
    say(f"measuring what {what} takes of a GPU ...")
    found = _measured(experiment, data)
    if warning := found.warning():
        say(warning)
    return found


def _measured(experiment: Experiment, data: StoredData) -> Footprint:
    engine = experiment.config.engine
    share = {"num_cpus": engine.cpus_per_actor, "num_gpus": 1.0}
    variables = runtime_env(engine.threads, engine.portable_bits)
    probe: Any = ray.remote(Probe).options(**share, runtime_env=variables).remote()
    try:
        found: Footprint = ray.get(probe.measure.remote(experiment, data), timeout=engine.start_timeout)
        return found
    except GetTimeoutError:
        line = f"{shortage(1, share)}: it did not start in {engine.start_timeout:g} s; engine.device=cpu needs no GPU"
        raise UserError(line) from None
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None
    finally:
        ray.kill(probe)
