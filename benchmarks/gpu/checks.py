"""One section of `make gpu` per call, in a process of its own; prints one JSON object per result.

python benchmarks/gpu/checks.py SECTION [--device cpu --tiny]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.checkpoint import hash_tensors
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel

# Dense bf16 operations per second of an H100 SXM (its data sheet).
PEAK_FLOPS = 989e12
LAYOUTS = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, the same at every place in every process."""

    def __init__(self, size: int, seq_len: int, vocab: int) -> None:
        self.size, self.seq_len, self.vocab = size, seq_len, vocab

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        ids = torch.randint(
            0, self.vocab, (self.seq_len + 1,), generator=torch.Generator().manual_seed(place)
        )
        return {"ids": ids[:-1], "targets": ids[1:]}


class Check:
    """The settings of a call.

    Attributes:
        device: "cuda" or "cpu".
        seq_len, layers, hidden, heads, vocab: of the model; a GPT of 124M parameters, or a tiny one.
        batch: samples of a global batch.
    """

    def __init__(self, device: str, *, is_tiny: bool) -> None:
        self.device, self.is_tiny = device, is_tiny
        sizes = (32, 2, 32, 4, 256, 4) if is_tiny else (1024, 12, 768, 12, 50304, 32)
        self.seq_len, self.layers, self.hidden, self.heads, self.vocab, self.batch = sizes

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        section = GptModel(kind="gpt", layers=self.layers, hidden=self.hidden, heads=self.heads)
        return Gpt(section, self.vocab, self.seq_len)

    def train(self, **settings: Any) -> paceline.Trainer:
        return paceline.Trainer(
            self.build(),
            **{
                "forward": lambda model, batch: model(batch["ids"]),
                "loss": sum_losses,
                "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4),
                "dtype": "bf16",
                "reduction": "fast",
                "microbatch_size": self.batch // 2,
                "clip_norm": 1.0,
                "example": {"ids": torch.zeros(2, self.seq_len, dtype=torch.int64)},
                **settings,
            },
        )

    def data(self, num_batches: int) -> Text:
        return Text(self.batch * num_batches, self.seq_len, self.vocab)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        began_s = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began_s


def sum_losses(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    return functional.cross_entropy(output.flatten(0, 1).float(), targets, reduction="sum"), (
        targets >= 0
    ).sum()


def say(**values: Any) -> None:
    print(json.dumps(values, default=str), flush=True)


def versions(check: Check) -> None:
    found: dict[str, Any] = {"torch": torch.__version__, "paceline": paceline.__version__}
    if check.is_cuda:
        found |= {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        with suppress(OSError):
            found["driver"] = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0]
    say(**found)


def units(check: Check) -> None:
    """Print claims of single modules about a device: each is true or false."""
    from paceline.checkpoint.writing.state_copy import CopyMemory
    from paceline.parallel.dropout.masks import SampleDim, draw_mask
    from paceline.parallel.norm import _measure_rows
    from paceline.train.equal_copies import digest_tensor

    device = torch.device(check.device)
    mask = (7, "layer.1", list(range(4)), (4, 33, 129), 0.1)
    here = draw_mask(*mask, torch.device("cpu"), place=SampleDim(0))
    there = draw_mask(*mask, device, place=SampleDim(0)).cpu()
    say(claim="dropout masks have the bits of the CPU", holds=torch.equal(here, there))
    differing = []
    for rows, columns in ((4096, 1024), (768, 3072), (16, 1 << 18), (1024, 771), (8, 50304)):
        whole = torch.randn(rows, columns, device=device)
        norms = _measure_rows(whole, whole, device)
        for parts in (2, 3, 8):
            cut = [_measure_rows(part.clone(), part, device) for part in whole.chunk(parts)]
            if not torch.equal(norms, torch.cat(cut)):
                differing.append((rows, columns, parts))
    say(claim="norms of rows do not depend on their number", holds=not differing, differing=differing)
    tensor = torch.randn(64, 1024, device=device)
    swapped = tensor.clone()
    swapped[[3, 40]] = tensor[[40, 3]]
    differs = digest_tensor(tensor) != digest_tensor(swapped)
    say(claim="swapped rows change a digest", holds=differs)
    memory, sent = CopyMemory(), torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=device)
    reserve_s = check.seconds(lambda: memory.reserve(1 << 20, device))
    memory.view(0, sent).copy_(sent, non_blocking=True)
    check.wait()
    is_right = torch.equal(memory.view(0, sent), sent.cpu())
    say(claim="copies for saves are right", holds=is_right, reserve_ms=round(1e3 * reserve_s, 2))


def bits(check: Check, *, num_ranks: int, layout: str, mode: str) -> None:
    """Print a hash of the weights after 4 steps; ranks share a card with gloo, or have one each with NCCL."""
    shares = num_ranks > 1 and check.is_cuda and torch.cuda.device_count() < num_ranks
    backend = "gloo" if shares else None
    with (
        paceline.start(device=check.device, backend=backend, threads_per_rank=1) as world,
        staged_messages() if shares else warnings.catch_warnings(),
    ):
        trainer = check.train(reduction=mode, layout=layout, microbatch_size=max(1, check.batch // 4))
        loader = trainer.loader(check.data(4), global_batch_size=check.batch)
        losses = [trainer.step(share).loss for share in loader]
        state = trainer.whole_state()
        if world.is_main:
            hashed = hash_tensors({name: tensor.cpu() for name, tensor in state.items()})[:16]
            say(ranks=num_ranks, layout=layout or "-", reduction=mode, hash=hashed, loss=losses[-1])


@contextmanager
def staged_messages() -> Iterator[None]:
    """Carry messages between ranks through the CPU: gloo has none for tensors on a device."""
    from unittest import mock

    right = dist.batch_isend_irecv

    def staged(operations: list[Any]) -> list[Any]:
        given = [each.tensor for each in operations]
        for each in operations:
            each.tensor = each.tensor.cpu()
        for work in right(operations):
            work.wait()
        for each, tensor in zip(operations, given, strict=True):
            if each.op is dist.irecv:
                tensor.copy_(each.tensor)
        return []

    with mock.patch.object(dist, "batch_isend_irecv", staged):
        yield


def speed(check: Check) -> None:
    """Print tokens per second and memory of a plain loop and of the trainer, also compiled."""
    steps, warm = (3, 1) if check.is_tiny else (12, 4)
    data = check.data(steps + warm)

    def report(loop: str, model: nn.Module, times: list[float], **found: Any) -> None:
        step_s, num_tokens = sorted(times)[len(times) // 2], check.batch * check.seq_len
        flops = 6 * sum(p.numel() for p in model.parameters())
        flops += 12 * check.layers * check.hidden * check.seq_len
        say(
            loop=loop,
            tokens_per_s=round(num_tokens / step_s),
            step_ms=round(1e3 * step_s, 2),
            mfu=round(num_tokens * flops / step_s / PEAK_FLOPS, 4),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if check.is_cuda else None,
            **found,
        )

    def clean() -> None:
        """Let the peak of the next loop be its own."""
        gc.collect()
        if check.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def plain(loop: str, *, compiles: bool) -> None:
        clean()
        model = check.build().to(check.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        call, times = torch.compile(model) if compiles else model, []
        for number in range(steps + warm):
            samples = [data[number * check.batch + place] for place in range(check.batch)]
            batch = torch.utils.data.default_collate(samples)

            def step(batch: dict[str, Tensor] = batch) -> None:
                placed = {key: tensor.to(check.device) for key, tensor in batch.items()}
                half = check.batch // 2
                for first in (0, half):
                    part = {key: tensor[first : first + half] for key, tensor in placed.items()}
                    with torch.autocast(check.device, torch.bfloat16):
                        total, _ = sum_losses(call(part["ids"]), part)
                    (total / (check.batch * check.seq_len)).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            times.append(check.seconds(step))
        report(loop, model, times[warm:])

    def ours(loop: str, **settings: Any) -> None:
        clean()
        with paceline.start(device=check.device):
            trainer, times = check.train(**settings), []
            found: list[str] = []
            for number, share in enumerate(trainer.loader(data, global_batch_size=check.batch)):
                if check.is_cuda and number == warm - 1:
                    found = list_waits(trainer, share)
                    continue
                times.append(check.seconds(lambda share=share: trainer.step(share)))  # type: ignore[misc]
            report(loop, trainer.model, times[warm:], waits=found)

    plain("plain", compiles=False)
    ours("paceline, fast")
    ours("paceline, exact", reduction="exact")
    if not check.is_tiny:
        plain("plain, compiled", compiles=True)
        ours("paceline, compiled", compile=True)


def list_waits(trainer: paceline.Trainer, share: Any) -> list[str]:
    """Return the places in which a step waits for the device, as torch reports them."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.step(share)
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{each.filename.rpartition('paceline/')[2]}:{each.lineno}" for each in caught]
    return [place for place, each in zip(places, caught, strict=True) if "synchroniz" in str(each.message)]


def save(check: Check) -> None:
    """Print what an asynchronous save makes a step wait for, and whether its state has the right bits."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-gpu-"))

    def go(run: Path, until: int, saves: tuple[int, ...]) -> tuple[dict[str, float], str]:
        times: dict[str, float] = {}
        with paceline.start(device=check.device):
            trainer = check.train(reduction="exact", asynchronous_saves=True)
            trainer.resume(run)
            for share in trainer.loader(check.data(12), global_batch_size=check.batch):
                step = trainer.step(share)
                check.wait()
                if step.number in saves:
                    began_s = time.perf_counter()
                    handle = trainer.save()
                    times[f"save {step.number}"] = round(1e3 * (time.perf_counter() - began_s), 2)
                    handle.wait()
                if step.number == until:
                    break
            return times, hash_tensors({k: v.cpu() for k, v in trainer.whole_state().items()})[:16]

    times, _ = go(folder / "run", 6, (3, 6))
    _, resumed = go(folder / "run", 10, ())
    _, straight = go(folder / "straight", 10, ())
    shutil.rmtree(folder)
    say(save_ms=times, resumed=resumed, straight=straight, holds=resumed == straight)


def oom(check: Check) -> None:
    """Print how a step that needs too much memory ends."""
    with paceline.start(device=check.device):
        batch = 4 if check.is_tiny else 1024
        trainer = check.train(microbatch_size=batch)
        data = Text(batch, check.seq_len, check.vocab)
        try:
            for share in trainer.loader(data, global_batch_size=batch):
                trainer.step(share)
            say(ended="no shortage")
        except Exception as error:
            say(ended=type(error).__name__, code=getattr(error, "code", None), saw=str(error)[:600])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=("versions", "units", "bits", "speed", "save", "oom"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script on a CPU")
    parser.add_argument("--layout", default="")
    parser.add_argument("--reduction", choices=("exact", "fast"), default="exact")
    args = parser.parse_args()
    # torch reads it at the first product, and that of a plain loop comes before `paceline.start` can set it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check = Check(args.device, is_tiny=args.tiny)
    if args.section == "bits":
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        bits(check, num_ranks=ranks, layout=args.layout, mode=args.reduction)
    else:
        sections = {"versions": versions, "units": units, "speed": speed, "save": save, "oom": oom}
        sections[args.section](check)


if __name__ == "__main__":
    main()
