"""Evaluates models, on the whole test set and on the test samples of single clients."""
