"""Divides parameters, gradients and optimizer state over the ranks of `dp_shard`."""
