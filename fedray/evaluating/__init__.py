"""Evaluates a saved model on any data: ``fedray evaluate`` and :func:`fedray.evaluate`."""

SPLITS = ("test", "train", "validation")
"""The sets of samples on which a model can be evaluated: the test set, the samples that clients hold, and the
validation set."""
