"""Explains where the time of a step goes: reads traces of all ranks, and names who waits for whom and why."""
