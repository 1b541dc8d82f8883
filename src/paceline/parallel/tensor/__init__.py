"""Tensor parallelism: splits the matrix products of one model over the ranks of an axis."""
