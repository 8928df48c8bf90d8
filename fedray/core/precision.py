"""What the values of ``train.precision`` mean for a model's passes.

* fp32: everything is float32.
* tf32: as fp32, but GPUs round the factors of matrix products and convolutions to 10 bits. It is a setting of the whole
  process (:func:`fedray.engine.determinism.deterministic`).
* bf16, fp16: torch's autocast on the forward pass.
"""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import Any

import torch

HALF = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
"""The precisions that use autocast, and the types to which it casts."""

TENSOR_CORES = (8, 0)
"""The lowest compute capability of GPUs with TF32 and bf16 (Ampere, 2020)."""


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for a forward pass on ``device`` in ``precision``, a value of ``train.precision``."""
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else contextlib.nullcontext()
