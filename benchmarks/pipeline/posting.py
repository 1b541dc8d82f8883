"""Step time under pp=2 with messages posted in the sender's order, and in one order for all ranks, in turn.

    python benchmarks/pipeline/posting.py LAYERS HIDDEN STEPS        # 4 48 120, or 8 448 32

NCCL needs the second, which commit 90546ae4 introduced. The script takes the code of that commit, and beside
it the transfer of the commit before. Both run in the same two processes: A B B A, step by step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMIT, WARM_UP_STEPS = "90546ae4", 8
MESSAGES, TRANSFER = "src/paceline/pipeline/messages.py", "src/paceline/parallel/stages/transfer.py"


def check_out(folder: Path) -> None:
    """Write the code of the commit, with the two older modules under names of their own."""
    code = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=code, check=True)
    for path in (MESSAGES, TRANSFER):
        show = ["git", "show", f"{COMMIT}^:{path}"]
        old = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        target = (folder / path).with_name(f"old_{Path(path).name}")
        target.write_text(old.replace("paceline.pipeline.messages", "paceline.pipeline.old_messages"))


def run_rank(layers: int, hidden: int, num_steps: int) -> None:
    """Train, and print the medians and the ratio of neighbouring steps; the interval is by bootstrap."""
    import torch
    from torch.nn import functional

    import paceline
    from paceline.models.gpt import Gpt
    from paceline.parallel.stages import old_transfer, transfer
    from paceline.pipeline import messages, old_messages
    from paceline.recipe.schema import GptModel
    from paceline.train.runners.staged_forwards import StagedForwards

    for module in (old_messages, old_transfer):
        module.Message, module.Payload = messages.Message, messages.Payload
    variant = "after"

    def begin(self: Any, schedule: Any, count: int, shared: Any) -> Any:
        module = transfer if variant == "after" else old_transfer

        def describe(message: Any) -> list[Any]:
            return [module.Form(form.shape, form.dtype, form.stride) for form in self._describe(message)]

        rest = (describe, self._precision.device)
        if variant == "after":
            return transfer.StageTransfer(self._pp, schedule, count, shared, *rest, self._orders)
        return old_transfer.StageTransfer(self._pp, schedule.keep_first(count), shared, *rest)

    def sum_losses(output: Any, batch: Any) -> tuple[Any, int]:
        targets = batch["targets"].flatten()
        return functional.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), len(targets)

    StagedForwards._begin_transfer = begin
    times: dict[str, list[float]] = {"before": [], "after": []}
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        torch.manual_seed(0)
        model = Gpt(GptModel(kind="gpt", layers=layers, hidden=hidden, heads=4), 256, 128)
        ids = torch.randint(0, 256, (16, 129))
        trainer = paceline.Trainer(
            model,
            forward=lambda model, batch: model(batch["ids"]),
            loss=sum_losses,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
            layout="pp=2 schedule=1f1b",
            microbatch_size=4,
            reduction="fast",
            example={"ids": ids[:2, :-1]},
        )
        data = [{"ids": row[:-1], "targets": row[1:]} for row in ids] * (num_steps + WARM_UP_STEPS)
        for number, share in enumerate(trainer.loader(data, global_batch_size=16, shuffle=False)):
            variant = ("before", "after", "after", "before")[number % 4]
            torch.distributed.barrier()
            began_s = time.perf_counter()
            float(trainer.step(share).loss)
            if number >= WARM_UP_STEPS:
                times[variant].append(time.perf_counter() - began_s)
        if not world.is_main:
            return
        ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        found: dict[str, Any] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "pairs": len(ratios),
        }
        found |= {f"{name}_ms": round(1e3 * statistics.median(each), 1) for name, each in times.items()}
        found |= {"ratio": round(statistics.median(ratios), 3), "low": round(medians[50], 3)}
        print(json.dumps(found | {"high": round(medians[-51], 3)}), flush=True)


def main() -> int:
    if "RANK" in os.environ:
        run_rank(*map(int, sys.argv[1:4]))
        return 0
    with tempfile.TemporaryDirectory(prefix="paceline-posting-") as scratch:
        check_out(Path(scratch))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "PYTHONPATH": f"{scratch}/src"}
        return subprocess.run([*command, __file__, *sys.argv[1:]], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
