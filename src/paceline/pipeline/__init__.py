"""The schedules of a pipeline as data: made, read from files, checked, simulated and drawn; without torch."""
