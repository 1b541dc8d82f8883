"""Checks a cluster link by link: every node reaches every other, links and nodes are alike, collectives are
right."""
