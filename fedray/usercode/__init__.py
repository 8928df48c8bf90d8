"""User-defined code: how it is imported, and digests of it."""
