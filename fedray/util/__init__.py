"""Files, and the start of a process."""
