"""Runs the microbatches of an update on a layout, in the rounds in which ranks reduce."""
