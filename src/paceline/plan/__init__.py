"""Computes what a layout needs, from recipes alone and before any machine is rented."""
