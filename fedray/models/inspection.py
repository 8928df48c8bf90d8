"""What the engine has to know of a module before it trains it: found by trying, not by asking."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.model import Loss, VmapModel, predicting_head
from fedray.core.vectors import Layout
from fedray.errors import UserError
from fedray.importing import blamed


@dataclass(frozen=True)
class ModelFacts:
    """``parameters`` P and float ``buffers`` of a model; ``flops``: one sample's forward pass; ``draws``: whether
    forward draws random numbers (dropout); ``prediction_flops``: a sample's pass through the head's predictor, which
    ``flops`` leaves out."""

    parameters: int
    buffers: int
    flops: float
    draws: bool
    prediction_flops: float = 0.0


def inspect_model(module: nn.Module, loss: Loss, example: Tensor, classes: int, name: str) -> ModelFacts:
    """Facts about ``module`` from trial passes over ``example [b, ...]`` (b >= 2).

    Raises :class:`UserError` if its outputs or the loss are not of the shapes that fedray needs.
    """
    # it imports a compiler, which the processes that train do not need
    from torch.utils.flop_counter import FlopCounterMode

    layout = Layout(module)
    if not layout.parameters:
        raise UserError(f"model {name} has no trainable parameters")
    targets = torch.zeros(len(example), dtype=torch.long)
    module.eval()
    takes = blamed(f"model {name} can't take inputs of shape {list(example.shape[1:])}")
    with takes, torch.random.fork_rng(devices=[]), torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = module(example[:1])
    if not isinstance(logits, Tensor):
        raise UserError(f"model {name} must give logits [b, {classes}], a tensor, not {type(logits).__name__}")
    if logits.shape != (1, classes):
        shape = ", ".join(["b", *map(str, logits.shape[1:])])
        raise UserError(f"model {name} must give logits [b, {classes}], not [{shape}]")
    _check_loss(loss, torch.zeros(2, classes), targets[:2])
    with blamed(f"model {name} failed in training mode"):
        draws = _draws(module, example)
    return ModelFacts(
        parameters=layout.parameters,
        buffers=sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point()),
        flops=float(counter.get_total_flops()),
        draws=draws,
        prediction_flops=_prediction_flops(module),
    )


def _prediction_flops(module: nn.Module) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    head = predicting_head(module)
    if head is None:
        return 0.0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        head.predictor.eval()(torch.zeros(1, head.classifier.in_features))
    return float(counter.get_total_flops())


def _check_loss(loss: Loss, logits: Tensor, targets: Tensor) -> None:
    with blamed("the loss failed on logits [2, classes] and targets [2]"):
        losses = loss(logits, targets)
    if not isinstance(losses, Tensor):
        raise UserError(f"the loss must give one value per sample, a tensor [b], not {type(losses).__name__}")
    if losses.shape != targets.shape:
        raise UserError(
            f"the loss must give one value per sample, [b], not a tensor of shape {list(losses.shape)}: "
            "use reduction='none'"
        )


def _draws(module: nn.Module, example: Tensor) -> bool:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        before = torch.random.get_rng_state()
        module.train()
        module(example)
        after = torch.random.get_rng_state()
        for name, value in module.named_buffers():
            value.copy_(buffers[name])
    return not torch.equal(before, after)


def stackable(module: nn.Module, loss: Loss, example: Tensor) -> bool:
    """Whether torch.func.vmap can batch ``module`` over clients, tried on ``example [b, ...]``. Takes a second: it
    imports torch's compiler."""
    if Layout(module).buffers:
        return False
    targets = torch.zeros(len(example), dtype=torch.long)
    model = VmapModel(copy.deepcopy(module), loss)
    stack = torch.stack([example, example])
    batch: Any = Batch(stack, torch.stack([targets, targets]), 0)
    try:
        model.gradients(model.parameters.expand(2, -1), batch, None)
        model.forward(model.parameters.expand(2, -1), stack)
    except Exception:
        return False
    return True
