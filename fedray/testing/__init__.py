"""Tests that every algorithm and every data source must pass, those that come with fedray and your own."""

from fedray.testing.contracts import AlgorithmContract
from fedray.testing.sources import SourceContract

__all__ = ["AlgorithmContract", "SourceContract"]
