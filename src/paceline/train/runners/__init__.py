"""Runners: how the microbatches of an update run on a layout, and the rounds in which ranks reduce."""
