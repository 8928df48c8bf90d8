"""Contract tests: tests that every algorithm, pool of workers, callback, data source, selection, upload step, robust
rule and attack must pass, whether it comes with fedray or is yours."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.extensions import CallbackContract, UploadContract
from fedray.testing.pools import PoolContract
from fedray.testing.robust import AttackContract, RuleContract
from fedray.testing.selections import SelectionContract
from fedray.testing.sources import SourceContract

__all__ = [
    "AlgorithmContract", "AttackContract", "CallbackContract", "PoolContract", "RuleContract", "SelectionContract",
    "SourceContract", "UploadContract",
]  # fmt: skip
