"""Tests that every algorithm must pass, including user-defined ones."""

from fedray.testing.contracts import AlgorithmContract

__all__ = ["AlgorithmContract"]
