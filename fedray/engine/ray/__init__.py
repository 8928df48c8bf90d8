"""The Ray engine: its cluster, its actors, and the data in its object store."""
