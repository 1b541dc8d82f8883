"""One file per check of a machine: what it reads, what it wants, and what goes wrong otherwise."""

from paceline.doctor.checks import (
    clock,
    cores,
    disk,
    gpus,
    infiniband,
    interfaces,
    leftovers,
    limits,
    memory,
    names,
    ports,
    shared_memory,
    versions,
)

CHECKS = (
    cores,
    memory,
    shared_memory,
    limits,
    disk,
    clock,
    names,
    interfaces,
    ports,
    versions,
    gpus,
    infiniband,
    leftovers,
)
