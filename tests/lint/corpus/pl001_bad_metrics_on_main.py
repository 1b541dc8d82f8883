"""Image classification with Accelerate; the accuracy is computed on the main process."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def evaluate(accelerator, model, loader):
    model.eval()
    correct, total = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))  # PL001
        correct += (predictions == labels).sum().item()
        total += labels.numel()
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator()
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    train_data, valid_data = build_datasets()
    train_loader = DataLoader(train_data, batch_size=64, shuffle=True)
    valid_loader = DataLoader(valid_data, batch_size=64)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: accuracy {evaluate(accelerator, model, valid_loader):.3f}")


if __name__ == "__main__":
    main()
