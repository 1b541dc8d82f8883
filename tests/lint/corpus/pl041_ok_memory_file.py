import io

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
buffer = io.BytesIO()
torch.save({"step": 3}, buffer)
buffer.seek(0)
print(torch.load(buffer, map_location="cpu"))
