"""Verifies that a layout gives the numbers of one process, and locates where it does not (`check.verify`)."""
