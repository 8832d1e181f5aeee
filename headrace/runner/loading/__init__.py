"""Files to weights."""
