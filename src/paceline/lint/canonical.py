"""Short names for what torch has under several long ones."""

from __future__ import annotations

from functools import cache

# The first that a name starts with is the one.
_SHORT = """
    distributed.elastic elastic, distributed.rpc rpc, distributed.nn dnn, distributed.distributed_c10d dist,
    distributed.fsdp fsdp, distributed._composable fsdp, distributed.checkpoint dcp,
    distributed._functional_collectives dnn, distributed.algorithms.join join, distributed.tensor dtensor,
    distributed.device_mesh mesh, distributed dist, utils.data data, nn.parallel parallel, nn.utils nnutils,
    nn.functional F, nn nn, optim.lr_scheduler sched, optim optim, cuda.amp amp, amp amp, multiprocessing mp
"""
_PREFIXES = [(f"torch.{long}.", f"{short}.") for long, short in (pair.split() for pair in _SHORT.split(","))]
_PREFIXES.append(("multiprocessing.", "mp."))


@cache
def canonical(name: str) -> str:
    """Return the short name by which the tables below know something of torch."""
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if short == "nn." and rest == "DataParallel":
                return "parallel.DataParallel"
            return short + rest.rpartition(".")[2]
    return name
