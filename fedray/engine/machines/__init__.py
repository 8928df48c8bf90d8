"""Examines the machines on which runs compute, and finds what runs have left there."""
