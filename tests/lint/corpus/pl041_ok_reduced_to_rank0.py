import torch
import torch.distributed as dist

from mine import model, score, settings

dist.init_process_group("gloo")
best = torch.zeros(1)
total = torch.tensor(score(model))
dist.reduce(total, 0)
if total > best:
    torch.save(model.state_dict(), "best.pt")
if getattr(settings, "number") == 0:
    torch.save(model.state_dict(), "last.pt")
