"""Implements collectives for cases in which the libraries' would change bits, or do not exist."""
