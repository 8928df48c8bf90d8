"""Repeats published tables and figures, and puts measured beside published (``analysis/reproduce.py``)."""
