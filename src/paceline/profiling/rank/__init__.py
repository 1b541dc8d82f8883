"""The part of a recording that runs in each rank, beside the user's script."""
