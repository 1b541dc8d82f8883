import argparse
import os

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--master")
args = parser.parse_args()
rank = int(os.environ["RANK"])
host = "127.0.0.1" if rank == 0 else args.master
dist.init_process_group("gloo", f"tcp://{host}:29500", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
