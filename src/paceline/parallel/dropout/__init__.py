"""Draws dropout masks that depend on seed, sample, module and position, not on the layout."""
