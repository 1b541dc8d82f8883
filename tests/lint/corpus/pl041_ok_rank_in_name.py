import torch
import torch.distributed as dist

dist.init_process_group("gloo")
state = {"rng": torch.get_rng_state()}
torch.save(state, f"rng_{dist.get_rank():04d}.pt")
