"""Runs the user's module at models that are flat rows, and computes gradients."""
