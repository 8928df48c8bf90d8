"""Differential privacy of clients (``privacy``): what is added to their sum, and what that promises."""

from __future__ import annotations

from fedray.privacy.accountant import Accountant
from fedray.privacy.mechanism import Mechanism

__all__ = ["Accountant", "Mechanism"]
