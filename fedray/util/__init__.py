"""Writes files safely, marks folders as in use, and shortens the start of a process."""
