"""Measures speed: numbers with a spread, from any recipe."""
