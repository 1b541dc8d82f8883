"""One step of a small model under DDP with AdamW, and when it was done: `first_step.py FOLDER`.

The first of both imports torch._dynamo, as in every script that has an optimizer.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.full((4, 8), float(rank))).square().mean().backward()
optimizer.step()
done_s = time.time()
Path(sys.argv[1], f"rank-{rank}").write_text(repr(done_s), encoding="utf-8")
# gloo's threads may still hold what DDP would drop below them.
dist.barrier()
dist.destroy_process_group()
