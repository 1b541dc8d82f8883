"""Tensor parallelism: the matrix products of one model, split over the ranks of an axis."""
