import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
parser.add_argument("--many", action="store_true")
args = parser.parse_args()
args.rank = args.rank * 8 + dist.get_node_local_rank()
dist.init_process_group("gloo", rank=args.rank)
if not args.many or (args.many and args.rank % 8 == 0):
    torch.save({"step": 3}, "last.pt")
