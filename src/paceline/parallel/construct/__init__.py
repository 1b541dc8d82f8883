"""Builds a factory's model on rank 0 alone, and hands its tensors out to all ranks, one by one."""
