"""Data sets, and how they are spread over the clients. Nothing here imports torch or Ray."""

from fedray.data.sources.source import Source

__all__ = ["Source"]
