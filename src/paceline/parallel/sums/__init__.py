"""Sums gradients over microbatches and ranks."""
