"""Tests that every algorithm and every data source must pass, user-defined ones included."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.sources import SourceContract

__all__ = ["AlgorithmContract", "SourceContract"]
