"""The user's own code: how it is imported, and digests of it."""
