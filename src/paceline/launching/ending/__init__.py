"""How a rank ended: its record, its traceback, and whether the kernel killed it."""
