"""Tests that everything of a kind must pass: algorithms, pools, callbacks, sources and upload steps, fedray's and
yours."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.extensions import CallbackContract, UploadContract
from fedray.testing.pools import PoolContract
from fedray.testing.sources import SourceContract

__all__ = ["AlgorithmContract", "CallbackContract", "PoolContract", "SourceContract", "UploadContract"]
