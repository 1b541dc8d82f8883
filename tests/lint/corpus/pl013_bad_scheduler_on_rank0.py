import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 10)
    for step in range(100):
        opt.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        opt.step()
        if dist.get_rank() == 0:
            schedule.step()  # PL013
            print(schedule.get_last_lr())


if __name__ == "__main__":
    main()
