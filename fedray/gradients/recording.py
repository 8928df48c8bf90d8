"""Records the operations of a gradient once for each shape of mini-batches, and replays them from then on.

Without recording, a small model's local step spends much of its time in Python: in the module, in autograd, in
torch.func. A replay runs the same operations in the same order, so the bits are the same. A forward pass that looks at
values or writes into its inputs can't be recorded. A module with state that torch does not see would be replayed
wrongly. So by default only known code is replayed (:mod:`fedray.gradients.known_code`), and the results of replays are
compared with those of the module, less and less often.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fedray.core.places import same_bits
from fedray.core.structure import leaves, outline
from fedray.errors import UserError, first_line
from fedray.gradients.watching import Mode, address_of, written

FIRST = 30
"""The number of mini-batches of one shape that are computed in the ordinary way before their gradient is recorded.
Recording takes as long as about 30 gradients, and does not pay in a process that computes few of them."""

TRIED = 3
"""The number of mini-batches for which a new recording is on trial: its results are only compared, and the recording is
given up if they are wrong."""

MOST = 16
"""The largest number of shapes of mini-batches for which a gradient is recorded."""

CHANGED = (
    "the model does not compute the same from the same numbers as some steps before; if its forward pass is meant to "
    "depend on something else than tensors, use engine.replay=false, which runs its Python code in every step"
)

Function = Callable[..., tuple[Tensor, ...]]

Eager = Callable[[], tuple[Tensor, ...]]
"""The type of functions that compute the result of a recorded function in the ordinary way, without the recording."""

_aten = torch.ops.aten
_SAME = (_aten.alias.default, _aten.detach.default)
"""Operations whose result is their argument."""
_REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""The tags of operations that can't be recorded, because they look at values or change the shape of a tensor that
others use too. Operations that draw random numbers can't be recorded either."""


class Unrecordable(Exception):
    """Raised if a function has an operation that can't be recorded and replayed. The message says which."""


@dataclass
class Known:
    """What a :class:`Recorded` function knows about mini-batches of one shape: how many of them there were so far, and
    the recording of the function for this shape, if there is one.

    Args:
        steps: The number of mini-batches of this shape so far. The count begins anew when the function is recorded.
        replay: A function that runs the recorded operations; None if there is no recording.
        hopeless: Whether recording was given up for this shape, so that it is not tried any more.
        new: How many mini-batches the last call of :meth:`Recorded.known` added to ``steps``.
        said: A function that is called when recording is given up. It gets the reason as text.
    """

    steps: int = 0
    replay: Function | None = None
    hopeless: bool = False
    new: int = 0
    said: Callable[[str], None] = lambda why: None

    @property
    def is_new(self) -> bool:
        """Whether the recording of a function is still on trial: its results are only compared with those of the
        function's Python code, and not yet used."""
        return self.steps - self.new < TRIED

    @property
    def is_due(self) -> bool:
        """Whether the results of the recording have to be compared with those of the function's Python code now. They
        are compared as long as the recording is on trial (:attr:`is_new`), and then whenever ``steps``, the number of
        mini-batches since the recording, reaches a power of two."""
        return self.is_new or self.steps.bit_length() > (self.steps - self.new).bit_length()

    def give_up(self, why: str) -> None:
        self.replay, self.hopeless = None, True
        self.said(why)


class Recorded:
    """A pure function, such as a gradient, that is made faster: its torch operations are recorded once for each shape
    of mini-batches, and then replayed without running its Python code.

    Args:
        function: Takes tensors, or tuples and dicts of tensors, and returns a tuple of tensors.
        changing: Tensors whose values change between calls, such as a module's parameters. The function must get them
            as inputs: if it uses one of them in another way, it can't be recorded, and its Python code is run instead.
    """

    @property
    def first(self) -> int:
        """The number of mini-batches of one shape that are computed by the function's Python code before its operations
        are recorded."""
        return FIRST

    def __init__(self, function: Function, changing: Iterable[Tensor] = ()) -> None:
        self.function = function
        self._changing = list(changing)
        self._shapes: dict[Any, Known] = {}

    def __call__(self, inputs: Sequence[Any], eager: Eager) -> tuple[Tensor, ...]:
        """Returns ``function(*inputs)``, by replaying its recorded operations or, as long as that is not possible, by
        calling ``eager()``, which computes the same by running Python code, and may overwrite ``inputs``.

        Raises :class:`UserError` if ``eager()`` no longer gives what the recorded operations give.
        """
        found = self.known(shape_of(inputs), inputs)
        replayed = None if found.replay is None else replay(found, found.replay, leaves_of(inputs))
        if replayed is None:
            return eager()
        if not found.is_due:
            return replayed
        expected = eager()
        if not same(expected, replayed):
            refuse(found)
        return expected

    def known(self, key: Any, inputs: Sequence[Any], count: int = 1) -> Known:
        """Counts ``count`` more mini-batches, and records the function with ``inputs`` once enough of them were
        counted. Returns what is known about mini-batches of this shape, such as a recording that can be replayed.
        ``key`` is the shape of the inputs (:func:`shape_of`)."""
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = Known(hopeless=len(self._shapes) >= MOST, said=self.gave_up)
        found.steps, found.new = found.steps + count, count
        if found.replay is None and not found.hopeless and found.steps > self.first:
            try:
                with torch.no_grad():
                    found.replay = record(self.function, inputs, self._changing)
            except Exception as error:
                # if something is wrong with the mini-batch, the ordinary way will report it
                found.give_up(first_line(error))
            found.steps = count
        return found

    def gave_up(self, why: str) -> None:
        """Called with the reason ``why`` when the gradient for some shape of mini-batches can't be recorded or
        replayed. It does nothing here; subclasses may tell the user."""


def replay(found: Known, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Runs recorded operations: returns ``run(*inputs)``, computed without autograd. If that fails, the recording,
    which ``found`` describes, is given up and the result is None; the caller must then run the function's Python code.
    """
    try:
        # autograd has nothing to do here, and its part of each operation takes time
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # the ordinary way reports more clearly what is wrong with a mini-batch
        found.give_up(first_line(error))
        return None


def refuse(found: Known) -> None:
    """Gives up the recording that ``found`` describes, because its result differed from that of the function's Python
    code.

    Raises :class:`UserError` if earlier results of the recording were already used, that is, if it is no longer on
    trial (:attr:`Known.is_new`).
    """
    if not found.is_new:
        raise UserError(CHANGED)
    found.give_up("its results were others")


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Returns whether two results of a function, each a sequence of tensors, have the same shapes, types and values. A
    NaN equals any other NaN."""
    return all(map(same_bits, one, other))


def record(function: Function, inputs: Sequence[Any], changing: Sequence[Tensor] = ()) -> Function:
    """Records the torch operations of ``function(*inputs)``. Returns a function that runs the same operations for other
    inputs of the same shapes, faster than ``function``. The returned function takes the tensors in these inputs one by
    one, in the order of :func:`leaves_of`.

    Raises :class:`Unrecordable` if an operation can't be recorded or uses one of the tensors ``changing``. Exceptions
    of ``function`` are passed on.
    """
    recorder = _Recorder(leaves_of(inputs), changing)
    with recorder:
        outputs = function(*inputs)
    return recorder.replay(outputs)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the torch operation ``func(*args, **kwargs)`` draws random numbers. Attention with a dropout of 0
    does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" not in names or values.get("dropout_p", 0) != 0


class _Recorder(Mode):
    """A context that records the torch operations that compute something from ``inputs``.

    torch's ``make_fx`` does the same, but imports torch's compiler, which takes two seconds and 160 MB in each process.
    """

    def __init__(self, inputs: Sequence[Tensor], changing: Sequence[Tensor]) -> None:
        super().__init__()
        self._changing = set(map(id, changing))
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}
        self._constants: dict[str, Tensor] = {}
        # addresses of the memory of all known tensors, and of inputs and constants, which must not be changed
        self._known: set[int | None] = set()
        self._foreign = set(map(address_of, inputs))
        # tensors are kept alive, because a new tensor may get the id and address of a freed one
        self._alive: list[Tensor] = []
        for place, tensor in enumerate(inputs):
            self._add(tensor, self._graph.placeholder(f"input_{place}"))

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(tag in func.tags for tag in _REFUSED) or _draws(func, args, kwargs):
            raise Unrecordable(f"{func} draws random numbers, looks at values or changes a tensor's shape")
        if any(id(each) not in self._nodes or self._is_foreign(each) for each in written(func, args, kwargs)):
            raise Unrecordable(f"{func} changes a tensor that the recorded operations have not made")
        result = super().run(func, args, kwargs)
        # a tensor made from Python numbers must be created again in each replay
        target = _aten.clone.default if func is _aten.lift_fresh.default else func
        node = self._graph.call_function(
            target, map_aggregate(tuple(args), self._node), map_aggregate(dict(kwargs), self._node)
        )
        if isinstance(result, Tensor):
            self._add(result, node)
        else:
            for place, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._add(part, self._graph.call_function(operator.getitem, (node, place)))
        return result

    def _add(self, tensor: Tensor, node: Node) -> None:
        if tensor.layout is not torch.strided:
            raise Unrecordable("it has sparse tensors")
        self._nodes[id(tensor)] = node
        self._known.add(address_of(tensor))
        self._alive.append(tensor)

    def _is_foreign(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and address_of(tensor) in self._foreign

    def _node(self, value: Any) -> Any:
        """Returns the node of the graph that stands for a tensor, and any other value unchanged. A tensor that no
        recorded operation has made becomes a constant of the graph."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            address = address_of(value)
            if id(value) in self._changing:
                raise Unrecordable("it uses a parameter or buffer of the module, and not the input for it")
            if address is not None and address in self._known:
                raise Unrecordable("it is unknown which operation a tensor comes from")
            name = f"constant_{len(self._constants)}"
            self._constants[name] = value
            self._foreign.add(address)
            self._add(value, self._graph.get_attr(name))
        return self._nodes[id(value)]

    def replay(self, outputs: Sequence[Tensor]) -> Function:
        """Ends the recording and returns a function that replays it. That function takes as many tensors as the
        recorder has ``inputs``, runs the recorded operations on them, and returns a tuple of tensors that correspond to
        ``outputs``, the tensors that the recorded function returned."""
        self._graph.output(tuple(self._nodes[id(tensor)] for tensor in outputs))
        self._alive.clear()
        for node in list(self._graph.nodes):
            _shorten(node)
        function: Function = GraphModule(self._constants, self._graph).forward
        return function


def _shorten(node: Node) -> None:
    """Removes the operation ``node`` from its graph if its result is that of an earlier operation, as for ``detach`` or
    a double transposition."""
    same = node.args[0] if node.target in _SAME else None
    if node.target is _aten.t.default and isinstance(node.args[0], Node) and node.args[0].target is _aten.t.default:
        same = node.args[0].args[0]
    if isinstance(same, Node):
        node.replace_all_uses_with(same)
        node.graph.erase_node(node)


def leaves_of(inputs: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors in a function's ``inputs``, which are tensors or nested tuples and dicts of tensors, as one
    list."""
    return [leaf for each in inputs for leaf in leaves(each)]


def shape_of(inputs: Sequence[Any]) -> Any:
    """Returns a hashable key for the shapes, strides and types of the tensors in a function's ``inputs``. If the keys
    of two calls' inputs are equal, both calls can use the same recording of the function."""
    return tuple(map(_shape, inputs))


def _shape(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return outline(tree), tuple(map(_shape, leaves(tree)))
