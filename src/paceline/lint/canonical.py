"""Short names for what torch has under several long ones."""

from __future__ import annotations

from functools import cache

_PREFIXES = (
    ("torch.distributed.elastic.", "elastic."),
    ("torch.distributed.rpc.", "rpc."),
    ("torch.distributed.nn.", "dnn."),
    ("torch.distributed.distributed_c10d.", "dist."),
    ("torch.distributed.fsdp.", "fsdp."),
    ("torch.distributed._composable.", "fsdp."),
    ("torch.distributed.checkpoint.", "dcp."),
    ("torch.distributed.device_mesh.", "mesh."),
    ("torch.distributed._functional_collectives.", "dnn."),
    ("torch.distributed.algorithms.join.", "join."),
    ("torch.distributed.tensor.", "dtensor."),
    ("torch.distributed.", "dist."),
    ("torch.utils.data.", "data."),
    ("torch.nn.parallel.", "parallel."),
    ("torch.nn.utils.", "nnutils."),
    ("torch.nn.functional.", "F."),
    ("torch.nn.", "nn."),
    ("torch.optim.lr_scheduler.", "sched."),
    ("torch.optim.", "optim."),
    ("torch.cuda.amp.", "amp."),
    ("torch.amp.", "amp."),
    ("torch.multiprocessing.", "mp."),
    ("multiprocessing.", "mp."),
)


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
