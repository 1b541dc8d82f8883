"""The code that runs inside a rank, around the user's script or function."""
