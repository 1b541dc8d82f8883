"""Arithmetic over recipes: what a layout needs, before anyone rents a machine."""
