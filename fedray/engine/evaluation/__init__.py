"""Evaluates models on the test set and on clients' shares of it."""
