import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(torch.nn.Linear(4, 4), rank, dist.get_world_size(), torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8 if rank else 4, loss_fn=torch.nn.functional.mse_loss)  # PL009
