"""Kills processes of real runs at random instants and compares what comes out with uninterrupted runs."""
