"""Writes files safely, and shortens the start of a process."""
