"""Accelerate: every process gathers, and the main one prints."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(load_table("train.csv"), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
best = 0.0
for epoch in range(10):
    hits = []
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            accelerator.backward(torch.nn.functional.cross_entropy(output, y))
            optimizer.step()
            optimizer.zero_grad()
        hits.append(accelerator.gather_for_metrics(output.argmax(1) == y))
    score = torch.cat(hits).float().mean().item()
    accelerator.print(epoch, score)
    if score > best:
        best = score
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
