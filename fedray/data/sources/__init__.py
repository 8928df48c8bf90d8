"""Where data sets come from: their publishers' files, the user's, and what was handed over from Python."""
