"""Contract tests, which every algorithm, pool, callback, data source and upload step must pass, both fedray's and
yours."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.extensions import CallbackContract, UploadContract
from fedray.testing.pools import PoolContract
from fedray.testing.sources import SourceContract

__all__ = ["AlgorithmContract", "CallbackContract", "PoolContract", "SourceContract", "UploadContract"]
