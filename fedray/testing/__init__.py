"""Contract tests that every algorithm must pass, fedray's and yours."""

from fedray.testing.contracts import AlgorithmContract

__all__ = ["AlgorithmContract"]
