"""Says before the first round how much memory the server needs for uploads that it gets one by one.

Which uploads these are, and how large, only an algorithm's own methods know. So one client goes through a round without
any local step, from the broadcast to its uploads, on copies of the algorithm and of the server's models and vectors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from fedray.algorithms import Algorithm, Broadcast, ServerState, Upload
from fedray.algorithms.messages import MEANS
from fedray.client.phase import ClientPhase, Stack
from fedray.core.seeds import global_generators
from fedray.core.stopwatch import Stopwatch
from fedray.core.upload import BYTES_PER_NUMBER
from fedray.core.vectors import Layout, Model, Vector, row_of
from fedray.engine.clients import Clients
from fedray.engine.cohorts import cohort_of
from fedray.engine.server_rules import server_rule
from fedray.engine.state.run import RunState
from fedray.experiment.experiment import Experiment
from fedray.gradients.known_code import is_of_known
from fedray.util.named import Named

SMALL = 100_000_000
"""So many bytes of gathered uploads at the server need no line."""

FOR_RULE = ", and needs up to six times as much while train.aggregation computes"


def lines_on_memory(experiment: Experiment, state: RunState, clients: Clients) -> list[str]:
    """Returns a line for the user about each upload of which the server gets large rows of all clients, because the
    algorithm asks for them (``Upload.gather``), or for a robust rule or an attack, and one about clients' models that
    it gets to evaluate them (``run.eval_local_models``). ``state`` is that before the first
    round, and ``clients`` are the server's own.

    If an algorithm's methods fail, the line has the size of a model. Their errors will be raised again in the first
    round, unless they only come from having made no step.
    """
    found: dict[str, tuple[int, str]] = {}
    members, model = experiment.cohort_size, BYTES_PER_NUMBER * clients.network.layout.row_width
    if experiment.evaluates_local_models(experiment.rounds):
        found["run.eval_local_models: every process gathers the models"] = model, ""
    try:
        if experiment.robust is not None or may_gather(experiment.algorithm):
            found |= _gathered(experiment, state, clients)
    except Exception:
        found["the server may gather models or vectors"] = model, " for each with as many numbers as the model"
    sizes = {what: (members * each, more) for what, (each, more) in found.items() if members * each > SMALL}
    return [f"{what} of {members} clients, {size / 1e9:.3g} GB{more}" for what, (size, more) in sizes.items()]


def _gathered(experiment: Experiment, state: RunState, clients: Clients) -> dict[str, tuple[int, str]]:
    """Returns of each upload that the server gets one by one the bytes of one client, and what else a line says."""
    found: dict[str, tuple[int, str]] = {}
    with global_generators():
        for phase, name, upload in _uploads(experiment, state, clients):
            for_rule = experiment.robust is not None and upload.weights in MEANS
            if for_rule or upload.weights == "gather":
                found[f"{phase}: the server gathers {name}"] = row_of(upload.value)[0].nbytes, FOR_RULE * for_rule
    return found


def may_gather(algorithm: Algorithm) -> bool:
    """Returns whether ``algorithm`` may ask for all uploads of a kind: whether something in its class is called
    ``gather``, or in another class or function of the file. None of those that come with fedray do."""
    classes = [cls for cls in type(algorithm).__mro__ if not is_of_known(cls)]
    modules = [vars(sys.modules[cls.__module__]) for cls in classes if cls.__module__ in sys.modules]
    things = [*classes, *(thing for names in modules for thing in names.values())]
    return any("gather" in code.co_names for thing in things for code in _codes(thing))


def _codes(thing: Any) -> Iterator[CodeType]:
    """Yields the code of a function, of a class's methods, and of the functions within them. Other objects have
    none."""
    if isinstance(thing, type) and not is_of_known(thing):
        for value in vars(thing).values():
            yield from _codes(value) if not isinstance(value, type) else ()
    elif isinstance(thing, (staticmethod, classmethod)):
        yield from _codes(thing.__func__)
    elif isinstance(thing, FunctionType) and not is_of_known(thing):
        yield from _codes(thing.__code__)
        yield from _codes(vars(thing).get("__wrapped__"))
    elif isinstance(thing, CodeType):
        yield thing
        for each in thing.co_consts:
            yield from _codes(each)


def _uploads(experiment: Experiment, state: RunState, clients: Clients) -> Iterator[tuple[str, str, Upload]]:
    """Yields the uploads of a client that makes no local step, each with the names of its phase and its own. Raises an
    exception if a method of the algorithm does, or if a phase needs what the server trains."""
    # a user's algorithm may note in an attribute how often it was called
    algorithm, sizes = deepcopy(experiment.algorithm), state.sizes
    client = int(np.flatnonzero(sizes == sizes[sizes > 0].min())[0])
    server = replace(
        state.server, vectors={name: value.clone() for name, value in state.server.vectors.items()},
        table=deepcopy(state.server.table), client_scalars={}, round=1,
        cohort=replace(cohort_of(np.array([client]), state, experiment, 1), steps=[0]),
    )  # fmt: skip
    server.lr, server.server_lr = experiment.rates(1)
    kept: dict[str, Vector] = {}
    for phase in algorithm.phases:
        if phase == algorithm.server_training_before:
            raise NotImplementedError("what the server trains is not known yet")
        with server_rule(algorithm, "broadcast", server, phase):
            broadcast = algorithm.broadcast(server, phase)
        result = getattr(algorithm, phase)(_client(client, server, broadcast, kept, experiment, clients))
        yield from ((phase, name, upload) for name, upload in result.uploads.items())
        if phase != algorithm.phases[-1]:
            kept |= result.kept
            layout = clients.network.layout
            sums = Named((name, _total(upload, layout)) for name, upload in result.uploads.items())
            scalars = {name: values.reshape(-1).tolist() for name, values in result.scalars.items()}
            with server_rule(algorithm, "server_update", server, phase):
                algorithm.server_update(server, phase, sums, scalars)


def _client(
    client: int,
    server: ServerState,
    broadcast: Broadcast,
    kept: dict[str, Vector],
    experiment: Experiment,
    clients: Clients,
) -> ClientPhase:
    """Returns ``client`` (its number) as it gets ``broadcast`` for a phase without local steps. It has ``kept`` this of
    the phases before."""
    stack = Stack([client], [clients.data.client(client)], [0], [1.0], [0], scalars=broadcast.scalars)
    none = [None] if experiment.keeps_states else []
    return clients.phase_of(
        stack, replace(experiment.training, local_steps=None, local_epochs=0), round=server.round, lr=server.lr,
        shared=broadcast.shared, kept=kept, stopwatch=Stopwatch(),
        received=clients.received([None]) if experiment.algorithm.needs_received else None,
        kept_momentum=clients.momentum(none) if experiment.training.momentum_reset == "never" else None,
        **clients.remembered(none, server.round),
    )  # fmt: skip


def _total(upload: Upload, layout: Layout) -> Vector:
    """Returns what the server gets of ``upload`` if nobody else takes part."""
    if upload.weights == "gather":
        return upload.value
    row = row_of(upload.value)[0]
    return layout.model(row) if isinstance(upload.value, Model) else row
