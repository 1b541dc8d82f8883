"""Explains why ranks hang, differ, fail or are slow, from their reports alone."""
