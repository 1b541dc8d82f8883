import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--sync", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
if args.sync:
    dist.barrier()
t = torch.ones(2)
if dist.is_initialized() and dist.get_world_size() > 1:
    dist.all_reduce(t)
