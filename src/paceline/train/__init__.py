"""Training: one call per optimizer step, the same numbers on any number of ranks."""
