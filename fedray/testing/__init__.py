"""Tests that every algorithm must pass, those that come with fedray and your own."""

from fedray.testing.contracts import AlgorithmContract

__all__ = ["AlgorithmContract"]
