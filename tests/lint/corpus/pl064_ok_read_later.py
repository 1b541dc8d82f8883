import os

import torch
import torch.distributed as dist

os.environ["NCCL_DEBUG"] = "INFO"
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
