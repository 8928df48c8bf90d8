"""Where the samples of a run lie: in memory, in mapped files, or unread."""
