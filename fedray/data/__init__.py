"""Sources, partitioners and the federated data set: numpy and pandas alone, no torch and no Ray."""

from fedray.data.source import Source

__all__ = ["Source"]
