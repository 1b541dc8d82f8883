"""Fails once and goes on from its checkpoint when the launcher starts it again."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

CHECKPOINT = Path("restarts.pt")


@record
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    state = torch.load(CHECKPOINT) if CHECKPOINT.exists() else {"step": 0, "weight": torch.zeros(2)}
    print(f"[{rank}] attempt {attempt} starts at step {state['step']}")
    if rank == 0:
        names = (
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
        )
        names += ("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_MAX_RESTARTS")
        names += ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
        for name in names:
            print(f"[0] attempt {attempt}: {name}={os.environ.get(name)}")
        print(f"[0] error file {Path(os.environ['TORCHELASTIC_ERROR_FILE']).name}")
    for step in range(state["step"], 4):
        total = torch.tensor([1.0, 2.0]) * (rank + 1)
        dist.all_reduce(total)
        state = {"step": step + 1, "weight": state["weight"] + total}
        if rank == 0:
            torch.save(state, CHECKPOINT)
        dist.barrier()
        if attempt == 0 and step == 1 and rank == 1:
            raise RuntimeError("a fault that comes once")
        # Rank 0 waits for the fault here rather than in a step.
        dist.barrier()
    print(f"[{rank}] attempt {attempt}: {state}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
