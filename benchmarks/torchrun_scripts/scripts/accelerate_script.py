"""Training with Hugging Face Accelerate, with gradient accumulation and gathered metrics."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(250, 10, generator=generator)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = DataLoader(make_dataset(), batch_size=16, shuffle=True)
    evaluation = DataLoader(make_dataset(), batch_size=32)
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(
        model, optimizer, loader, evaluation, schedule
    )
    state = accelerator.state
    print(f"[{state.process_index}] of {state.num_processes}: {state.distributed_type}, {state.device}")

    for epoch in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for x, y in evaluation:
            with torch.no_grad():
                guesses = model(x).argmax(dim=1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))
            right, count = right + int((guesses == y).sum()), count + len(y)
        accelerator.print(
            f"[0] epoch {epoch}: {right} of {count} right, last lr {schedule.get_last_lr()[0]:.5f}"
        )

    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"[0] last loss {mean.item():.4f}")
    accelerator.save_model(model, "accelerated")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
