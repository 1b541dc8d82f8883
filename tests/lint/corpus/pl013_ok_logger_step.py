import torch.distributed as dist
from rich.progress import Progress

dist.init_process_group("gloo")
bar = Progress()
for step in range(100):
    if dist.get_rank() == 0:
        bar.step()
