"""Runs rounds: on this process, or on Ray. README.md is the place to begin."""
