"""Compares runs that have ended: tables, curves, and a page that needs no other file (``fedray compare``)."""
