"""Tests that everything of a kind must pass: algorithms, pools, callbacks, sources and upload steps, fedray's and
yours."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.extensions import CallbackContract, SourceContract, UploadContract
from fedray.testing.pools import PoolContract

__all__ = ["AlgorithmContract", "CallbackContract", "PoolContract", "SourceContract", "UploadContract"]
