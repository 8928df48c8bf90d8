"""The contract tests' small problem as a source that a config can name: data.source=problem:source."""

from fedray.testing.contracts import small_source as source

__all__ = ["source"]
