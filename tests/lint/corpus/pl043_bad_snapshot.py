import os

import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, path):
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu)
        snapshot = torch.load(path, weights_only=True)  # PL043
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.model = DDP(self.model, device_ids=[self.gpu])


init_process_group(backend="nccl")
Trainer(torch.nn.Linear(2, 2), "snapshot.pt")
