"""Defines what a rank reports to its launcher, the bytes it travels as, and how it is worded."""
