"""Runs the user's module with models that are rows of numbers in one tensor, and computes their gradients."""
