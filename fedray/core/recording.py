"""Gradients that are written down once, and replayed from then on.

A large part of a small model's local step is spent in Python: in the module, in autograd, in torch.func. All of this
decides only which operations run on which tensors, and the answer is the same for each mini-batch of one shape. So the
operations of one gradient are recorded, and for later mini-batches these operations run alone. They are the same
operations in the same order, so a replayed gradient has the same bits as any other.

A forward pass that looks at values, such as one with a branch that depends on them, can't be recorded, nor can one that
writes into its inputs. Its Python code runs in every step. A module that keeps state of its own, unseen by torch, would
be replayed wrongly, so by default only known code is replayed (:mod:`fedray.core.known_code`). Replayed gradients are
compared with those that are computed in the ordinary way, again and again, at steps which become rarer.

On a GPU the recorded operations are captured as CUDA graphs (:mod:`fedray.core.lanes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from fedray.core.lanes import Lanes
from fedray.core.structure import leaves, map_leaves, outline
from fedray.errors import UserError

FIRST = 30
"""The number of mini-batches of one shape after which their gradient is recorded. Recording takes as long as about 30
gradients, and is not worth it in a process that computes few of them."""

FIRST_ON_GPU = 4
"""The same on a GPU, where a graph is 3 to 10 times as fast as the ordinary way."""

TRIED = 3
"""The number of mini-batches for which a new recording is on trial: its results are not used yet, and it is given up if
they are not the right ones."""

MOST = 16
"""The largest number of shapes of mini-batches for which a gradient is recorded."""

CHANGED = (
    "the model does not compute the same from the same numbers as some steps before; if its forward pass is meant to "
    "depend on something else than tensors, use engine.replay=false, which runs its Python code in every step"
)

Function = Callable[..., tuple[Tensor, ...]]

_aten = torch.ops.aten
_SAME = (_aten.alias.default, _aten.detach.default)
"""Operations whose result is their argument."""
_REFUSED = (
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
)  # fmt: skip
"""What marks the operations that can't be recorded, because they look at values, draw random numbers, or change the
shape of a tensor that others use too."""


class Unrecordable(Exception):
    """The operations can't be recorded."""


@dataclass
class _Shape:
    """What is known about mini-batches of one shape: how many have been there since ``replay`` was found, or, as long
    as there is none, at all. ``graphs`` are its captures, by lane. ``steady`` is false if the ordinary
    way itself does not give the same each time, so that there is nothing to compare with."""

    steps: int = 0
    replay: Function | None = None
    hopeless: bool = False
    graphs: dict[int, Function] = field(default_factory=dict)
    steady: bool = True

    def give_up(self) -> None:
        self.replay, self.hopeless = None, True
        self.graphs.clear()


class Recorded:
    """Replays a pure ``function`` of tensors, or of tuples and dicts of them, whose result is a tuple of tensors.

    A function can't be replayed if it uses one of the tensors ``changing`` without having it as an input. With
    ``lanes`` the replays are CUDA graphs.
    """

    def __init__(self, function: Function, changing: Iterable[Tensor] = (), lanes: Lanes | None = None) -> None:
        self._function = function
        self._changing = list(changing)
        self._lanes = lanes
        self._first = FIRST if lanes is None else FIRST_ON_GPU
        self._shapes: dict[Any, _Shape] = {}

    def __call__(
        self, inputs: Sequence[Any], eager: Callable[[], tuple[Tensor, ...]], row: int = 0
    ) -> tuple[Tensor, ...]:
        """Returns ``function(*inputs)``, replayed or as ``eager()`` computes it, which may overwrite ``inputs``. They
        are those of the client in ``row`` of a stack.

        Raises :class:`UserError` if ``eager`` no longer does what it did when ``function`` was recorded.
        """
        key = tuple(map(_shape, inputs))
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = _Shape(hopeless=len(self._shapes) >= MOST)
        found.steps += 1
        if found.replay is None and not found.hopeless and found.steps > self._first:
            self._record(found, inputs)
        replayed = None if found.replay is None else self._run(found, inputs, row)
        if replayed is None:
            return eager()
        if (found.steps > TRIED and found.steps & (found.steps - 1) != 0) or not found.steady:
            return replayed
        return self._compared(found, inputs, eager, replayed)

    def _compared(
        self, found: _Shape, inputs: Sequence[Any], eager: Callable[[], tuple[Tensor, ...]], replayed: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns what ``eager()`` computes. If that is not what was ``replayed``, the recording is given up."""
        again: list[Any] = []
        if self._lanes is not None:
            self._lanes.join()
            again = [map_leaves(torch.clone, each) for each in inputs]
        expected = eager()
        if all(map(_equal, expected, replayed)):
            return expected
        if self._lanes is not None and not all(map(_equal, self._function(*again), self._function(*again))):
            found.steady = False
        elif found.steps > TRIED:
            raise UserError(CHANGED)
        else:
            found.give_up()
        return expected

    def _record(self, found: _Shape, inputs: Sequence[Any]) -> None:
        try:
            with torch.no_grad():
                found.replay = record(self._function, inputs, self._changing)
        except Exception:
            # if something is wrong with the mini-batch, the ordinary way will find out
            found.give_up()
        found.steps = 1

    def _run(self, found: _Shape, inputs: Sequence[Any], row: int) -> tuple[Tensor, ...] | None:
        replay, flat = found.replay, _leaves(inputs)
        assert replay is not None
        try:
            # autograd has nothing to do here, and its part of each operation takes time
            with torch._C._AutoDispatchBelowAutograd():
                if self._lanes is None:
                    return replay(*flat)
                lane = self._lanes.of(row)
                if lane not in found.graphs:
                    found.graphs[lane] = self._lanes.capture(replay, flat, lane)
                return found.graphs[lane](*flat)
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            # the ordinary way says better what is wrong with a mini-batch
            found.give_up()
            return None


def record(function: Function, inputs: Sequence[Any], changing: Sequence[Tensor] = ()) -> Function:
    """Returns a function that runs the operations of ``function(*inputs)`` on the leaves of other inputs of the same
    shapes.

    Raises :class:`Unrecordable` if there is an operation that can't be recorded, or that uses one of the tensors
    ``changing``, and whatever ``function`` raises.
    """
    recorder = _Recorder(_leaves(inputs), changing)
    with recorder:
        outputs = function(*inputs)
    return recorder.replay(outputs)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the arguments into which the operation ``func(*args, **kwargs)`` writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if each is not None:
                    yield each


class _Recorder(TorchDispatchMode):
    """A context that writes down the operations of torch, below autograd, that compute something from ``inputs``."""

    def __init__(self, inputs: Sequence[Tensor], changing: Sequence[Tensor]) -> None:
        super().__init__()
        self._changing = set(map(id, changing))
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}
        self._storages: set[int] = set()
        self._constants: dict[str, Tensor] = {}
        # the memory of inputs and constants, which must stay as it is
        self._foreign = {tensor.untyped_storage()._cdata for tensor in inputs}
        # a tensor's id is its own only while it lives
        self._alive: list[Tensor] = []
        for place, tensor in enumerate(inputs):
            self._add(tensor, self._graph.placeholder(f"input_{place}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch loads its compiler here, which takes a second and 150 MB
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(tag in func.tags for tag in _REFUSED):
            raise Unrecordable(str(func))
        kwargs = kwargs or {}
        if not all(map(self._is_own, written(func, args, kwargs))):
            raise Unrecordable(f"{func} changes a tensor that is not its own")
        result = func(*args, **kwargs)
        # a tensor made from Python's numbers must be new in each replay
        target = _aten.clone.default if func is _aten.lift_fresh.default else func
        node = self._graph.call_function(
            target, map_aggregate(tuple(args), self._node), map_aggregate(dict(kwargs), self._node)
        )
        if isinstance(result, Tensor):
            self._add(result, node)
        else:
            for place, part in enumerate(result):
                self._add(part, self._graph.call_function(operator.getitem, (node, place)))
        return result

    def _add(self, tensor: Any, node: Node) -> None:
        if isinstance(tensor, Tensor):
            self._nodes[id(tensor)] = node
            self._storages.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    def _is_own(self, value: Any) -> bool:
        """Returns whether a tensor lies in memory that the recorded operations have made."""
        return id(value) in self._nodes and value.untyped_storage()._cdata not in self._foreign

    def _node(self, value: Any) -> Any:
        """Returns the node of a tensor, and anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            if id(value) in self._changing:
                raise Unrecordable("it uses a parameter or buffer of the module, and not the input for it")
            if value.untyped_storage()._cdata in self._storages:
                raise Unrecordable("it is unknown which operation a tensor comes from")
            name = f"constant_{len(self._constants)}"
            self._constants[name] = value
            self._foreign.add(value.untyped_storage()._cdata)
            self._add(value, self._graph.get_attr(name))
        return self._nodes[id(value)]

    def replay(self, outputs: Sequence[Tensor]) -> Function:
        """Returns the function that runs what was recorded, and returns ``outputs``."""
        self._graph.output(tuple(self._nodes[id(tensor)] for tensor in outputs))
        self._alive.clear()
        for node in list(self._graph.nodes):
            _shorten(node)
        function: Function = GraphModule(self._constants, self._graph).forward
        return function


def _shorten(node: Node) -> None:
    """Takes an operation that only hands on what an earlier one has made out of its graph."""
    same = node.args[0] if node.target in _SAME else None
    if node.target is _aten.t.default and isinstance(node.args[0], Node) and node.args[0].target is _aten.t.default:
        same = node.args[0].args[0]
    if isinstance(same, Node):
        node.replace_all_uses_with(same)
        node.graph.erase_node(node)


def _leaves(inputs: Sequence[Any]) -> list[Tensor]:
    return [leaf for each in inputs for leaf in leaves(each)]


def _shape(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return outline(tree), tuple(map(_shape, leaves(tree)))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
