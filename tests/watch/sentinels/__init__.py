"""What the numbers of ranks prove: designs that are right, and mistakes."""
