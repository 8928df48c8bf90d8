"""Robust rules, one in each file."""
