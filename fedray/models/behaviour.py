"""Finds out by trial forward passes what a module does besides computing outputs: what it changes, what random numbers
it draws, and whether it keeps state that torch does not know about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.norms import TRACKING_NORMS, is_frozen, single_value_norms
from fedray.core.places import Places, same_bits
from fedray.core.seeds import Purpose, drawn_by, every_rng
from fedray.core.structure import call, call_on_copies, leaves, map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.errors import UserError, first_sentence
from fedray.gradients.known_code import may_write, unknown_layer
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.passes import predicting_head, taken_elsewhere
from fedray.gradients.watching import Watching, written
from fedray.usercode.importing import as_user_error

NAMED = 3
"""The largest number of names of layers, buffers and the like that a message lists."""

CLOSE = 1e-5
"""The largest difference of two gradients, relative to their length, that counts as rounding."""


def first_of(names: Sequence[str]) -> str:
    """Joins ``names`` into text for a message, which lists at most three of them: ``a, b, c and 2 more``."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@dataclass(frozen=True)
class Behaviour:
    """What the forward passes of a module do besides computing outputs, as observed in trial passes before the first
    round.

    Args:
        changing: The names of the buffers, and of the frozen (untrained) parameters, that forward passes change.
        written: The names of the trained parameters that forward passes change.
        writes: Whether forward passes may write into parameters: because a trial pass did, or because the module has
            layers that may do so in other passes, such as embeddings with ``max_norm``, user-defined code and hooks.
        draws: The global generators from which forward passes draw random numbers: ``torch``, ``python``, ``numpy``.
        overwrites: Whether forward passes may write into their inputs: because a trial pass did.
        elsewhere: The name of a trained parameter that forward passes take not from its layer, but from another
            attribute, such as a list. None if there is no such parameter.
    """

    changing: frozenset[str] = frozenset()
    written: tuple[str, ...] = ()
    writes: bool = False
    draws: frozenset[str] = frozenset()
    overwrites: bool = False
    elsewhere: str | None = None


def behaviour_of(module: nn.Module, x: Any, name: str = "it") -> Behaviour:
    """Finds out what the forward passes of ``module`` do besides computing outputs: which buffers and parameters they
    change, and from which random generators they draw. For this it runs the module on the inputs ``x [b, ...]``, in
    training and in evaluation mode. The module's tensors are left as they were. ``name`` is the module's name in error
    messages.

    Raises :class:`UserError` if a pass fails, or if train() or eval() of the module writes into its tensors. Such a
    module can't be trained, because fedray switches its mode while it loads many clients' models into it.
    """
    places = Places(module)
    tensors = _strided(module)
    trained = {key: parameter for key, parameter in places.parameters.items() if parameter.requires_grad}
    values = {key: tensors[key].detach().clone() for key in places.buffers if key in tensors}
    data = {key: parameter.data_ptr() for key, parameter in places.parameters.items()}
    watch, draws = Watching(written), set[str]()
    given: list[Any] = []

    def run() -> None:
        given.append(map_leaves(lambda leaf: leaf.clone(), x))
        with as_user_error(f"model {name} failed"):
            outputs = call(module, given[-1])
        floats = [each for each in leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
        if floats:
            with as_user_error(f"the gradient of model {name} can't be computed"):
                total = sum(each.abs().sum() for each in floats)
                torch.autograd.grad(total, list(trained.values()), allow_unused=True)  # type: ignore[arg-type]

    with without_traces(module):
        for training in (True, False, True):
            _switch(module, training, tensors, name)
            with torch.set_grad_enabled(training), watch:
                draws |= drawn_by(run)
        into = {key for key, tensor in tensors.items() if watch.has_met(tensor)}
        moved = {key for key, parameter in places.parameters.items() if parameter.data_ptr() != data[key]}
        changed = {key for key, value in values.items() if not _is_still(places.now(key), value)}
        _require_types(name, values, {key: places.now(key) for key in changed})
    frozen = (into | moved) & (places.parameters.keys() - trained.keys())
    changing = (into & places.buffers.keys()) | changed | frozen
    return Behaviour(
        frozenset(_with_similar(module, changing)),
        tuple(key for key in trained if key in into | moved),
        may_write(module) or bool(into & places.parameters.keys()),
        frozenset(draws),
        any(watch.has_met(leaf) for each in given for leaf in leaves(each)),
        _elsewhere(module, places, x) if unknown_layer(module) else None,
    )


def _elsewhere(module: nn.Module, places: Places, x: Any) -> str | None:
    """Returns the name of a trained parameter of ``module`` that a forward pass takes not from its layer, which
    ``places`` knows, but from another attribute. ``x`` are some inputs."""
    trained = {key: each for key, each in places.parameters.items() if each.requires_grad}
    others = {key: each.detach().clone().requires_grad_() for key, each in trained.items()}
    outputs: Any = None
    # a pass that writes may fail with other tensors; such modules are found out otherwise
    with without_traces(module), torch.enable_grad(), contextlib.suppress(Exception), places.holding(others):
        outputs = call_on_copies(module, x)
    tensors = [each for each in leaves(outputs) if isinstance(each, Tensor)]
    return next((name for each in tensors if (name := taken_elsewhere(each, trained))), None)


def _switch(module: nn.Module, training: bool, tensors: Mapping[str, Tensor], name: str) -> None:
    """Puts ``module`` into training or evaluation mode. Raises :class:`UserError` if that writes into one of its
    ``tensors`` (by name), because fedray loads the models of other clients between two such switches. ``name`` is the
    module's name in messages."""
    watch = Watching(written)
    with watch:
        module.train(training)
        for layer in module.modules() if training else ():
            # as in the local steps, where such layers keep their statistics
            if isinstance(layer, TRACKING_NORMS) and is_frozen(layer):
                layer.eval()
    if met := [key for key, tensor in tensors.items() if watch.has_met(tensor)]:
        raise UserError(
            f"model {name}: its train() or eval() writes into {met[0]}, but fedray loads the models of many "
            "clients in between: let only forward passes write into tensors (of LoRA layers: merge_weights=False)"
        )


def _with_similar(module: nn.Module, changing: set[str]) -> set[str]:
    """Returns the names ``changing`` of buffers that trial passes have changed, together with the names of buffers that
    may have stayed the same only by chance. These are running statistics (a head's predictor is not always run), and
    buffers with the shape and type of a changed buffer of the same layer."""
    found = set(changing)
    for prefix, layer in module.named_modules():
        buffers = {f"{prefix}.{key}".lstrip("."): b for key, b in layer.named_buffers(recurse=False)}
        if isinstance(layer, TRACKING_NORMS) and not is_frozen(layer):
            found |= buffers.keys()
        forms = {(b.shape, b.dtype) for name, b in buffers.items() if name in changing}
        found |= {name for name, b in buffers.items() if (b.shape, b.dtype) in forms}
    return found


def _require_types(name: str, before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Checks that forward passes of the model ``name`` leave the types of its buffers, because clients' buffers are
    averaged. Raises :class:`UserError` if not."""
    for key, now in after.items():
        was = before[key].dtype
        if isinstance(now, Tensor) and now.dtype is not was:
            raise UserError(
                f"model {name}: its forward pass changes the type of its buffer {key} from {was} to {now.dtype}: "
                "register it with the type that it will have"
            )


def _is_still(now: Any, value: Tensor) -> bool:
    return isinstance(now, Tensor) and same_bits(now, value)


def require_repeatable(make: Callable[[], nn.Module], module: nn.Module) -> None:
    """Checks that a user's function makes the same model whenever it is called, which each process does. ``make``
    calls it, and ``module`` is what it has made before. Raises :class:`UserError` if not."""
    other = make()
    if other is module:
        raise UserError(
            "the model's function returns the same module each time, and runs would train on with its weights: pass "
            "the module itself, of which each run has a copy, or make a new one in the function"
        )
    ours, theirs = _strided(module), _strided(other)
    # a buffer that is not saved may be memory that a forward pass writes before it reads it
    saved = ours.keys() - Places(module).not_saved
    changed = [name for name in ours if name in saved and not (name in theirs and same_bits(ours[name], theirs[name]))]
    if changed:
        raise UserError(
            f"the model's function makes another {changed[0]} each time: it must draw from the global generators of "
            "torch, NumPy or Python, which run.seed seeds, and not from one of its own"
        )


def _strided(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in Places(module).tensors.items() if tensor.layout is torch.strided}


def require_no_hidden_state(
    make: Callable[[], nn.Module], task: Task, x: Any, y: Tensor, found: Behaviour, name: str, who: str
) -> None:
    """Checks that a module and a loss keep nothing from one client to the next, except in the module's parameters and
    buffers. A process runs the models of many clients through one module, so any other state would mix the clients.

    Args:
        make: A function without arguments that makes the module.
        task: The task, whose loss is used for gradients.
        x: Inputs ``[b, ...]`` of some samples of the data.
        y: Their targets ``[b, ...]``.
        found: What trial forward passes have shown about the module.
        name: The model's name in error messages.
        who: Who may keep something, in error messages: the model, the loss, or either.

    Raises:
        UserError: The gradient can't be computed, or the results for a model change after another model was run through
            the module.
    """
    used, fresh = (
        LoopNetwork(make(), task, changing=found.changing, writes=found.writes, overwrites=True) for _ in range(2)
    )
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    initial = used.loaded()
    other = initial.with_parameters(initial.parameters * 1.05 + 0.01)
    with as_user_error(f"the gradient of model {name} can't be computed"):
        once, after, again = (_computed(used, model, batch) for model in (initial, other, initial))
        alone = _computed(fresh, other, batch)
    for one, two in ((once, again), (alone, after)):
        if one.isfinite().all() and two.isfinite().all() and (one - two).norm() > CLOSE * one.norm():
            raise UserError(
                f"{who} does not compute the same from the same numbers after another client's model was run: "
                "it keeps something from one forward pass to the next, or draws from a random generator of its own; "
                "what is kept must be a buffer (self.register_buffer(...)), and random numbers must be drawn from the "
                "global generators of torch, NumPy or Python"
            )


def drawn_by_loss(module: nn.Module, task: Task, x: Any, y: Tensor) -> set[str]:
    """Returns the global generators from which the loss of ``task`` draws random numbers, for the outputs of ``module``
    and the targets ``y [b, ...]`` of some samples ``x [b, ...]``."""
    with without_traces(module):
        outputs = call_on_copies(module, x)
        return drawn_by(lambda: task.training_losses(outputs, y))


def _computed(network: LoopNetwork, model: Model, batch: Batch) -> Tensor:
    """Returns what ``network`` computes for ``model`` and ``batch``, as one vector for comparisons: the gradient, the
    loss, the new buffers, and the outputs of a forward pass in evaluation mode after that."""
    at = model.clone()
    stack = Model(at.row[None], at.width)
    with every_rng(0, Purpose.DROPOUT):
        found = network.gradients(stack, batch)
        outputs = leaves(network.forward(stack, batch.x).logits)
    floats = [each.flatten() for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
    return torch.cat([found.value.flatten(), found.task_loss, at.buffers, *floats])


class AsMade(NamedTuple):
    """A record of which tensors a module has before its first forward pass. ``AsMade.of(module)`` makes the record, and
    :meth:`late_buffers` later finds the buffers that the module has made since.

    ``tensors`` are the names of the module's parameters and buffers, and ``trained`` the names of its trained
    parameters.
    """

    tensors: frozenset[str]
    trained: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> AsMade:
        places = Places(module)
        trained = (name for name, parameter in places.parameters.items() if parameter.requires_grad)
        return cls(frozenset(places.tensors), frozenset(trained))

    def late_buffers(
        self, module: nn.Module, make: Callable[[], nn.Module], x: Any, found: Behaviour, name: str
    ) -> tuple[str, ...]:
        """Returns the names of the buffers that ``module`` has made in its first forward pass, and not in its
        constructor. Also checks that other processes would make the same buffers.

        Args:
            module: The module of which this record was made, after a forward pass.
            make: A function without arguments that makes another such module, for comparison.
            x: Inputs ``[b, ...]`` of the data. The other module is run on inputs of the same shape.
            found: What trial forward passes of the module have shown.
            name: The model's name in error messages.

        Raises:
            UserError: Such a buffer depends on more than the shape of the inputs, or a parameter has become trained or
                frozen since this record was made.
        """
        if switched := sorted(self.trained ^ AsMade.of(module).trained):
            raise UserError(
                f"model {name}: its train(), eval() or forward pass sets requires_grad of {switched[0]}; set it once, "
                "in __init__"
            )
        late = [key for key in Places(module).buffers if key not in self.tensors]
        if not late:
            return ()
        # inputs with other numbers, but the same shapes
        x = map_leaves(lambda leaf: leaf.flip(0) * 0.5 if leaf.is_floating_point() else leaf.flip(0), x)
        other = make()
        with every_rng(0, Purpose.DROPOUT), torch.no_grad():
            call_on_copies(other, x)
        of_other = Places(other).buffers
        for key in late:
            same = key in of_other and same_bits(of_other[key], Places(module).buffers[key])
            if key in found.changing or not same:
                raise UserError(
                    f"model {name} makes its buffer {key} in a forward pass, so that no other process knows of it: "
                    "make it in __init__ (self.register_buffer(...))"
                )
        return tuple(late)


def notes_on_single_samples(module: nn.Module, x: Any, clients: Sequence[int]) -> list[str]:
    """Checks that ``module`` can be trained on mini-batches of one sample, which some clients have. Layers such as
    BatchNorm can't normalise a single value per channel, and use their running statistics for such mini-batches
    instead. If there are such layers, the result is a list with one line that warns the user; otherwise it is an empty
    list.

    Args:
        module: The model.
        x: Inputs ``[1, ...]``, an example of a mini-batch of one sample.
        clients: The numbers (ids) of all clients that have mini-batches of one sample.

    Raises:
        UserError: The module can't be trained on mini-batches of one sample.
    """
    if not clients:
        return []
    names = {layer: f"{name} ({type(layer).__name__})" for name, layer in module.named_modules()}
    head = predicting_head(module)

    def run() -> None:
        call_on_copies(module, x)
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
        f"value per channel in {first_of([names[each] for each in resting])}: there running statistics are used"
    ]


@contextlib.contextmanager
def without_traces(module: nn.Module) -> Iterator[None]:
    """A context for trial forward passes of ``module`` that are repeatable and leave no trace: at its end, the module's
    parameters and buffers and the global random generators are as they were at its beginning.

    Within the context gradients are turned off. The random generators draw the same numbers in each such context,
    because some models skip layers at random.
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
                # an expanded tensor can't be written into
                if name in values and not (tensor.layout is torch.strided and same_bits(tensor, values[name])):
                    tensor.copy_(values[name])
