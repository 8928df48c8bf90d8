"""Every algorithm passes the contract tests with compiled gradients too."""

from __future__ import annotations

import pytest
import test_contracts
import test_more_contracts
from small_runs import needs_compiler

from fedray.testing import AlgorithmContract

pytestmark = [pytest.mark.slow, pytest.mark.cpu, needs_compiler]


def compiled(contract: type[AlgorithmContract]) -> type[AlgorithmContract]:
    """The same contract, with runs whose gradients are compiled."""
    return type(contract.__name__, (contract,), {"settings": {**contract.settings, "engine.compile": True}})


for module in (test_contracts, test_more_contracts):
    for name, value in vars(module).items():
        if name.startswith("Test"):
            globals()[name] = compiled(value)
