"""Tries a model before training: which inputs it takes, and whether its outputs are what a kind of task needs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from fedray.core.structure import call_on_copies, leaves, map_leaves
from fedray.core.task import Task
from fedray.data.sources.targets import QUANTITIES
from fedray.errors import UserError
from fedray.models.behaviour import without_traces
from fedray.usercode.importing import error_line


def first_outputs(module: nn.Module, x: Any, name: str) -> Any:
    """Returns the outputs of ``module`` for the inputs ``x [b, ...]`` in evaluation mode. Raises :class:`UserError` if
    it does not take them; the message says what would be right if it takes inputs of another type."""
    try:
        return outputs_of(module, x, training=False)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"model {name} can't take inputs of {_shapes(x)}: {error_line(error)}"
        raise UserError(f"{problem}{_other_type(module, x)}") from error


def _other_type(module: nn.Module, x: Any) -> str:
    """Returns the end of a message about inputs ``x`` that ``module`` does not take: which type it takes, or an empty
    text. It is tried with whole numbers in place of floats, and the other way round."""
    are_floats = all(leaf.is_floating_point() for leaf in leaves(x))
    other = torch.int64 if are_floats else torch.float32
    with contextlib.suppress(Exception):
        outputs_of(module, map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=other), x), training=False)
        if are_floats:
            return "; it takes whole numbers: give tokens as int64, since bytes (uint8) are scaled to 0..1 as images"
        return "; it takes floats: give images as bytes (uint8), which are scaled to 0..1, or inputs as float32"
    return ""


def outputs_of(module: nn.Module, x: Any, training: bool) -> Any:
    """Returns the outputs of ``module`` for the inputs ``x [b, ...]``, from a forward pass in training mode or, if
    ``training`` is false, in evaluation mode. The module's tensors are left as they were.

    Raises :class:`UserError` if the forward pass makes new parameters.
    """
    before = {name for name, _ in module.named_parameters()}
    with without_traces(module):
        module.train(training)
        outputs = call_on_copies(module, x)
    if new := [name for name, _ in module.named_parameters() if name not in before]:
        raise UserError(
            f"the model makes its parameter {new[0]} in its first forward pass, so that copies lack it: "
            "make it in __init__, or use a lazy layer (nn.LazyLinear)"
        )
    return outputs


def misfit(kind: str, outputs: Any, y: Tensor, classes: int) -> str | None:
    """Checks whether a model's ``outputs`` have the shape that a task of this ``kind`` needs for the targets
    ``y [b, ...]``. Returns None if they have, and otherwise text for a message that begins with the model's name, such
    as ``must give logits [b, 10], not [b, 5]``."""
    if kind == "other":
        return None
    wanted = {
        "classification": [(len(y), classes)],
        "tokens": [(*y.shape, classes), (len(y), classes, *y.shape[1:])],
        "multilabel": [tuple(y.shape)],
        "regression": [tuple(y.shape)] + ([(len(y), 1)] if y.dim() == 1 else []),
    }[kind]
    needs = " or ".join(_shape(shape, len(y)) for shape in wanted)
    what = "give predictions" if kind == "regression" else "give logits"
    if not isinstance(outputs, Tensor):
        return f"must {what} {needs}, a tensor, not {type(outputs).__name__}"
    # a language model knows more tokens than the targets have
    is_larger = kind == "tokens" and outputs.shape[:-1] == y.shape and outputs.shape[-1] > classes
    if tuple(outputs.shape) not in wanted and not is_larger:
        return f"must {what} {needs}, not {_shape(tuple(outputs.shape), len(y))}{_hint(kind, outputs, y, classes)}"
    return None


def _hint(kind: str, outputs: Tensor, y: Tensor, classes: int) -> str:
    """Returns the end of a message about ``outputs`` that do not fit the targets ``y [b, ...]``: how targets that were
    misread are given, or an empty text."""
    if kind == "classification" and classes > 2 and outputs.numel() == len(y):
        return f" ({QUANTITIES})"
    if kind == "tokens" and outputs.dim() == y.dim() + 1:
        return (
            f" (labels must have no gaps; if {classes - 1} marks tokens that do not count, give "
            f"task.ignore_index={classes - 1})"
        )
    return ""


def class_axis(kind: str, outputs: Any, y: Tensor) -> int:
    """Returns which axis of the logits has the classes in a task of kind ``tokens``: 1 or the last one (-1)."""
    return 1 if kind == "tokens" and outputs.shape[:-1] != y.shape else -1


def _shape(shape: tuple[int, ...], samples: int) -> str:
    """Returns the shape of a batch of ``samples`` samples as text, with b for their number: ``[b, 10]``."""
    first = ["b"] if shape[:1] == (samples,) else [f"{size} for b = {samples}" for size in shape[:1]]
    return f"[{', '.join([*first, *map(str, shape[1:])])}]"


def _shapes(x: Any) -> str:
    shapes = [str(list(leaf.shape[1:])) for leaf in leaves(x)]
    return f"shape {shapes[0]}" if len(shapes) == 1 else f"shapes {', '.join(shapes)}"


def note_on_probabilities(task: Task, outputs: Any, name: str) -> list[str]:
    """Returns a list with a warning if the ``outputs`` of the model ``name`` are probabilities of classes, which the
    cross-entropy of ``task`` would take for logits, or else an empty list."""
    if task.kind not in ("classification", "tokens"):
        return []
    sums = outputs.float().sum(task.class_axis)
    if not (((outputs >= 0) & (outputs <= 1)).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        return []
    return [
        f"warning: the outputs of model {name} are probabilities, which lie between 0 and 1 and add up to 1, but "
        "cross-entropy takes logits, to which it applies the softmax itself: leave out the model's softmax"
    ]
