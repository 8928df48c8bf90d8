"""Stores the samples of a run: in memory, in mapped files, or in the user's Dataset, which is read item by item."""
