import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--distributed", action="store_true")
args = parser.parse_args()
if args.distributed:
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
if not torch.cuda.is_available():
    print("slow")
elif args.distributed:
    model = DistributedDataParallel(model)
else:
    model = torch.nn.DataParallel(model)
