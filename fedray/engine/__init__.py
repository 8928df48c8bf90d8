"""Runs rounds, in this process or on Ray. Begin with README.md."""
