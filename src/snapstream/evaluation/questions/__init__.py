"""Questions from files: a documented form of our own, and published files in theirs."""
