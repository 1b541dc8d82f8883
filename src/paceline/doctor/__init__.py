"""Checks whether a machine, and a cluster link by link, is fit to train, before a job finds out."""
