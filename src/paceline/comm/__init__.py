"""Collectives of our own, where the libraries' give other bits or no bits at all."""
