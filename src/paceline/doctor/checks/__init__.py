"""One file per check of a machine: what it reads, what it wants, and what goes wrong otherwise."""

from importlib import import_module

# In the order of the report.
_NAMES = (
    "cores memory shared_memory limits disk clock names interfaces ports versions gpus infiniband leftovers"
)
CHECKS = tuple(import_module(f"{__name__}.{name}") for name in _NAMES.split())
