"""Runs beside the ranks: listens to their reports and decides when a verdict is due."""
