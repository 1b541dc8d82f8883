import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.data as data
import torchvision
from torch.nn.parallel import DistributedDataParallel


def get_loader(root, batch_size):
    dataset = torchvision.datasets.MNIST(root, transform=torchvision.transforms.ToTensor())
    return data.DataLoader(dataset, batch_size, shuffle=True, num_workers=2)  # PL020


class Trainer:
    def __init__(self, model, loader):
        self.model = DistributedDataParallel(model)
        self.loader = loader
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def epoch(self):
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    trainer = Trainer(net, get_loader("data", 64))
    for _ in range(5):  # PL024
        trainer.epoch()


if __name__ == "__main__":
    main()
