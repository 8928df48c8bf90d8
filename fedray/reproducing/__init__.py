"""Repeats published tables and figures, and puts measured beside published (``fedray reproduce``)."""
