import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
layers = torch.nn.Linear(4, 4).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
stage = PipelineStage(layers, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4 * size, loss_fn=torch.nn.functional.mse_loss)
seen = torch.zeros(1, dtype=torch.float64)
dist.all_reduce(seen)
