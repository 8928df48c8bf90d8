"""What the values of ``train.precision`` mean for forward and backward passes of a model.

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
"""The values of ``train.precision`` for which forward passes use torch's autocast, and the type to which autocast casts
for each of them."""

TENSOR_CORES = (8, 0)
"""The lowest compute capability of GPUs with TF32 and bf16 (Ampere, 2020)."""


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a forward pass on ``device`` is computed in ``precision``, a value of
    ``train.precision``: with torch's autocast for ``bf16`` and ``fp16``, and without any change for ``fp32`` and
    ``tf32``."""
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else contextlib.nullcontext()
