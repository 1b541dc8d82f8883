"""What the numbers of ranks prove about the script."""
