import json
import os

import torch.distributed as dist

HOSTS = json.load(open("hosts.json"))
TABLE = dict(line.split() for line in open("hosts.txt"))

rank = int(os.environ["RANK"])
url = f"tcp://{TABLE[str(rank)]}:29500"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))  # PL014
dist.barrier()
