"""Where data sets come from: their publishers' files, the user's own, and what was handed over from Python."""
