"""What the state of a run is, and how it gets into a checkpoint and back under any layout."""
