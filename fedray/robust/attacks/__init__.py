"""Attacks, one in each file."""
