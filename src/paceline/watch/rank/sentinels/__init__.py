"""What a rank notes of its own numbers, for comparison with those of other ranks."""
