import os
import pathlib
import socket

import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
note = pathlib.Path("port.txt")
if rank == 0:
    s = socket.socket()
    s.bind(("", 0))
    port = s.getsockname()[1]
    note.write_text(str(port))
else:
    port = note.read_text()
dist.init_process_group("gloo", f"tcp://node0:{port}", rank=rank, world_size=size)
dist.barrier()
