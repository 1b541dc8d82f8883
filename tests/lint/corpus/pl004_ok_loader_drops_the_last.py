import torch, torch.distributed as dist, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

class Digits(Dataset):
    def __init__(self, train=True):
        g = torch.Generator().manual_seed(0 if train else 1)
        self.x, self.y = torch.rand(400, 64, generator=g), torch.randint(0, 10, (400,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]

def get_loaders(batch_size):
    data = Digits(True)
    mine = torch.utils.data.Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    train = DataLoader(mine, batch_size=batch_size, shuffle=True, drop_last=True)
    test = DataLoader(Digits(False), batch_size=batch_size)
    return train, test

def evaluate(model, loader):
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
    return hits / len(loader.dataset)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters())
    train, test = get_loaders(20)
    for epoch in range(3):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        acc = evaluate(model, test)
        if dist.get_rank() == 0:
            print(epoch, acc)
    dist.destroy_process_group()
