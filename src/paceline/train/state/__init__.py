"""The state of a run: saves it into a checkpoint and loads it under any layout."""
