"""Evaluates a saved model on any data: ``fedray evaluate`` and :func:`fedray.evaluate`."""

SPLITS = ("test", "train", "validation")
"""The samples on which a model can be evaluated: the test set, those that clients hold, and those held out of them."""
