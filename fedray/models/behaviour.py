"""Finds out by trial passes what a module's forward pass does beside computing outputs: what it changes, what it draws,
and whether it keeps something of which torch does not know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.known_code import may_write, unknown_layer
from fedray.core.loop_network import LoopNetwork
from fedray.core.network import predicting_head
from fedray.core.norms import is_frozen, single_value_norms
from fedray.core.places import Places, same_bits
from fedray.core.recording import written
from fedray.core.seeds import Purpose, drawn_by, every_rng
from fedray.core.structure import arguments, map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.errors import UserError, first_sentence
from fedray.importing import as_user_error

NAMED = 3
"""The most layers that a message names."""

CLOSE = 1e-5
"""The largest difference of two gradients, relative to their length, that counts as rounding."""


@dataclass(frozen=True)
class Behaviour:
    """What a forward pass does, in training or in evaluation mode: the names of the buffers that it changes
    (``changing``), those of the parameters into which it writes (``written``), and the global generators from which it
    draws (``draws``): ``torch``, ``python`` and ``numpy``. ``writes`` says whether it may write into parameters, also
    if it did not when it was tried."""

    changing: frozenset[str] = frozenset()
    written: tuple[str, ...] = ()
    writes: bool = False
    draws: frozenset[str] = frozenset()


def behaviour_of(module: nn.Module, x: Any) -> Behaviour:
    """Returns what the forward passes of ``module`` on the inputs ``x [b, ...]`` do. The module is left as it was."""
    args, named = arguments(x)
    places = Places(module)
    tensors = places.tensors
    values = {name: tensor.detach().clone() for name, tensor in places.buffers.items()}
    data = {name: parameter.data_ptr() for name, parameter in places.parameters.items()}
    watch, draws = _Writes(), set[str]()
    with without_traces(module):
        for training in (True, False):
            module.train(training)
            with torch.set_grad_enabled(training), watch:
                draws |= drawn_by(lambda: module(*args, **named))
        into = {name for name, tensor in tensors.items() if _storage(tensor) in watch.storages}
        moved = {name for name, parameter in places.parameters.items() if parameter.data_ptr() != data[name]}
        changed = {name for name, value in values.items() if not _is_still(places.now(name), value)}
    changing = (into & places.buffers.keys()) | changed
    return Behaviour(
        frozenset(_with_kin(module, changing)),
        tuple(name for name in places.parameters if name in into | moved),
        may_write(module) or bool(into & places.parameters.keys()),
        frozenset(draws),
    )


def _with_kin(module: nn.Module, changing: set[str]) -> set[str]:
    """Returns the ``changing`` buffers, and those that a trial may not have changed by chance: running statistics, also
    those of a head's predictor, which is not always run; and buffers with the shape and type of one of the same layer
    that has changed."""
    found = set(changing)
    for prefix, layer in module.named_modules():
        own = {f"{prefix}.{key}" if prefix else key: b for key, b in layer._buffers.items() if b is not None}
        if isinstance(layer, _NormBase) and not is_frozen(layer):
            found |= own.keys()
        alike = {(b.shape, b.dtype) for name, b in own.items() if name in changing}
        found |= {name for name, b in own.items() if (b.shape, b.dtype) in alike}
    return found


def _is_still(now: Any, value: Tensor) -> bool:
    return isinstance(now, Tensor) and same_bits(now, value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Writes(TorchDispatchMode):
    """A context that collects the memory into which operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        # memory that is freed may be given to other tensors
        self._alive: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch loads its compiler here, which takes a second and 150 MB
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in written(func, args, kwargs or {}):
            self.storages.add(_storage(tensor))
            self._alive.append(tensor)
        return func(*args, **(kwargs or {}))


def require_no_hidden_state(module: nn.Module, task: Task, x: Any, y: Tensor, found: Behaviour, name: str) -> None:
    """Raises :class:`UserError` if ``module``, called ``name``, computes something else from the same numbers after
    another model was run through it. A process runs the models of many clients through one module.

    Known code does not. ``x [b, ...]`` and ``y [b, ...]`` are samples of the data, and ``found`` is what is known of
    the module.
    """
    if unknown_layer(module) is None:
        return
    network = LoopNetwork(copied(module), task, changing=found.changing, writes=found.writes)
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    initial = network.loaded()
    other = initial.with_parameters(initial.parameters * 1.05 + 0.01)
    with as_user_error(f"the gradient of model {name} can't be computed"):
        once, _, again = (_gradient(network, model, batch) for model in (initial, other, initial))
    if not (once.isfinite().all() and again.isfinite().all()):
        return
    if (once - again).norm() > CLOSE * once.norm():
        raise UserError(
            f"model {name} does not compute the same from the same numbers after another client's model was run: it "
            "keeps something from one forward pass to the next, or draws from a random generator of its own; what is "
            "kept must be a buffer (self.register_buffer(...)), and random numbers must be drawn from the global "
            "generators of torch, NumPy or Python"
        )


def notes_on_single_samples(module: nn.Module, x: Any, clients: Sequence[int]) -> list[str]:
    """Returns a line for the user if ``clients`` have mini-batches of one sample, such as ``x [1, ...]``, in which some
    layers of ``module`` can't normalise.

    Raises :class:`UserError` if the module can't be trained on such mini-batches.
    """
    if not clients:
        return []
    args, named = arguments(x)
    names = {layer: f"{name} ({type(layer).__name__})" for name, layer in module.named_modules()}
    head = predicting_head(module)

    def run() -> None:
        module(*args, **named)
        if head is not None:
            head.predictor(torch.zeros(1, head.classifier.in_features))

    more = f" and {len(clients) - 1} more" if len(clients) > 1 else ""
    who, have = f"client {clients[0]}{more}", "have" if more else "has"
    with without_traces(module):
        resting = single_value_norms(module, run)
        module.train()
        for layer in resting:
            layer.eval()
        try:
            run()
        except Exception as error:
            raise UserError(
                f"the model can't be trained on a mini-batch of one sample, such as {who} {have} "
                f"({first_sentence(error)}): let no client have one, by data.partition.min_samples or train.batch_size"
            ) from None
    if not resting:
        return []
    return [
        f"warning: {who} {have} mini-batches of one sample, where torch can't normalise the only "
        f"value per channel in {', '.join(names[each] for each in resting[:NAMED])}: there running statistics are used"
    ]


def _gradient(network: LoopNetwork, model: Model, batch: Batch) -> Tensor:
    """Returns the gradient, the loss and the new buffers at ``model`` as one vector."""
    at = model.clone()
    with every_rng(0, Purpose.DROPOUT):
        found = network.gradients(Model(at.row[None], at.width), batch)
    return torch.cat([found.value.flatten(), found.task_loss, at.buffers])


@contextlib.contextmanager
def without_traces(module: nn.Module) -> Iterator[None]:
    """A context in which trial passes are repeatable, and after which they have left no trace.

    In it no gradients are taken, and the global generators always draw the same, because some models skip layers at
    random. After it the module's tensors and the generators are as they were.
    """
    places = Places(module)
    kept = places.tensors if may_write(module) else places.buffers
    data = {name: tensor.data for name, tensor in places.tensors.items()}
    values = {name: tensor.detach().clone() for name, tensor in kept.items()}
    with every_rng(0, Purpose.DROPOUT), torch.no_grad():
        try:
            yield
        finally:
            for name, tensor in places.tensors.items():
                places.put(name, tensor)
                tensor.data = data[name]
                if name in values:
                    tensor.copy_(values[name])
