"""Partitions a data set among clients."""
