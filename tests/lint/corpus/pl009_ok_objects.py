import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, list(range(rank)))
