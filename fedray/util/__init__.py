"""Writes files safely, marks folders as in use, shortens the start of a process, and draws for notebooks."""
