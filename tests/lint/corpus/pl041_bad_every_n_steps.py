"""A trainer class that saves every thousand steps, on every process."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, optimizer, out_dir="checkpoints"):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model.to(self.local_rank), device_ids=[self.local_rank])
        self.optimizer = optimizer
        self.out_dir = out_dir
        self.step = 0

    def save_checkpoint(self):
        os.makedirs(self.out_dir, exist_ok=True)
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, os.path.join(self.out_dir, "latest.pt"))  # PL041

    def fit(self, batches):
        for x in batches:
            loss = self.model(x.to(self.local_rank)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 1000 == 0:
                self.save_checkpoint()


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = torch.nn.Linear(128, 128)
    trainer = Trainer(net, torch.optim.Adam(net.parameters()))
    trainer.fit(read_stream(dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
