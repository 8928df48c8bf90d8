"""The command line ``fedray``: a module for each command, and what the commands share."""
