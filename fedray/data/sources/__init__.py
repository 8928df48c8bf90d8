"""Loads data sets: from their publishers' files, from the user's files, or from objects handed over from Python."""
