"""Products of few rows, and what stands beside them in a decode step, on a GPU."""
