"""A rank that finds no whole checkpoint while it is alone, as if the other node had the files."""

import torch
import torch.distributed as dist

from paceline.errors import PacelineError

dist.init_process_group("gloo")
if dist.get_world_size() == 1:
    raise PacelineError("PL550", saw="No checkpoint is whole.", rule="Files are missing.", fix="Wait.")
dist.all_reduce(torch.ones(1))
print(f"runs as {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
