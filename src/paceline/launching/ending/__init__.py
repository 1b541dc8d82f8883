"""The end of a rank: its record, its traceback, and whether the kernel killed it."""
