import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.save(torch.ones(1), f"/tmp/{socket.gethostname()}-{os.getpid()}.pt")
