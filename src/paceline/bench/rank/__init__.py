"""Holds what a benchmark does in the ranks of a script or recipe."""
