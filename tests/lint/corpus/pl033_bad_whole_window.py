import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def step(model, opt, batches):
    with model.no_sync():
        for x in batches:
            (model(x).mean() / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()  # PL033
    opt.zero_grad()


dist.init_process_group("gloo")
net = DDP(torch.nn.Linear(4, 1))
adam = torch.optim.Adam(net.parameters())
for _ in range(10):
    step(net, adam, [torch.randn(8, 4) for _ in range(4)])
