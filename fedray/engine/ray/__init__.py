"""The Ray engine: its cluster, its actors, and what lies in its object store."""
