"""Data sets, and how they are partitioned among clients. Nothing here imports torch or Ray."""

from fedray.data.sources.source import Source

__all__ = ["Source"]
