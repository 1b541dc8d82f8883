"""Compare the memory that a rank needs to load a pretrained model into shards with transformers' own way.

    python benchmarks/pretrained/run.py                       # a Llama of 1.9 GB on 4 ranks
    python benchmarks/pretrained/run.py --layers 4 --nproc 2  # a smaller one

Every way runs in processes of its own, one after the other, from one folder of 5 files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

WAYS = ("paceline", "DistributedConfig")
IDS = torch.arange(24).reshape(2, 12)


def make_folder(folder: Path, layers: int, hidden: int) -> None:
    """Save a Llama with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=f"{total_bytes(model) // 5000}KB")


def total_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(each.numel() * each.itemsize for each in model.parameters())


def read_status() -> dict[str, int]:
    """Return the memory of this process by kind, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return {name: 1024 * int(number) for name, number in re.findall(r"(\w+):\s+(\d+) kB", text)}


class Watch:
    """Records the most anonymous and shared memory of this process, in bytes; pages of files do not count."""

    def __init__(self) -> None:
        self.most, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self.before = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _read(self) -> int:
        status = read_status()
        self.most = max(self.most, status["RssAnon"] + status["RssShmem"])
        return status["RssAnon"] + status["RssShmem"]

    def _run(self) -> None:
        while not self._ends.wait(0.002):
            self._read()


def load(way: str, folder: str) -> tuple[nn.Module, Any]:
    """Load the folder into shards over all ranks, and return the model with what runs it."""
    import transformers

    if way == "paceline":
        import paceline

        trainer = paceline.Trainer(
            paceline.pretrained(transformers.LlamaForCausalLM, folder),
            forward=lambda model, batch: model(**batch),
            loss=lambda output, batch: output.logits.sum(),
            optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
            layout=f"dp_shard={dist.get_world_size()}",
            example={"input_ids": IDS},
        )
        return trainer.model, trainer
    config = transformers.distributed.DistributedConfig(fsdp_size=dist.get_world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32
    )
    return model, None


def measure(way: str, folder: str) -> None:
    """Load and run the model on this rank; rank 0 prints the numbers of all."""

    torch.set_num_threads(1)
    if way == "paceline":
        import paceline

        paceline.start()
    else:
        dist.init_process_group("gloo")
    with Watch() as warming:  # what a way imports and sets up once does not grow with the model
        load(way, f"{folder}/tiny")
    gc.collect()
    dist.barrier()
    began_s = time.perf_counter()
    with Watch() as watch:
        model, _kept = load(way, f"{folder}/model")
        took_s = time.perf_counter() - began_s
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0)  # as an optimizer does: a tensor that is a map of its file gets memory now
        dist.barrier()
    own = sum(
        (each.to_local() if isinstance(each, DTensor) else each).numel() * each.itemsize
        for each in model.parameters()
    )
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
    row = {
        "way": way,
        "rank": dist.get_rank(),
        "share": own,
        "peak": watch.most - watch.before,
        "once": warming.most - warming.before,
        "seconds": round(took_s, 2),
        "logits": torch.hash_tensor(logits.contiguous().view(torch.int32)).item(),
    }
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print("\n".join(map(json.dumps, rows)), flush=True)
    dist.barrier()


def main() -> None:
    """Run every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--folder", help="keep the model here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(args.folder or place)
        for name, layers, hidden in (("model", args.layers, args.hidden), ("tiny", 1, 64)):
            if not (folder / name).exists():
                command = [sys.executable, __file__, "make", str(folder / name), str(layers), str(hidden)]
                subprocess.run(command, check=True)
        for way in args.ways:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(args.nproc), __file__, way, str(folder)]
            single = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=single)
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if not rows:
                sys.exit(done.stdout + done.stderr)
            for row in rows:
                print(
                    f"{row['way']:18} rank {row['rank']}: share {row['share'] / 1e6:7.1f} MB, peak "
                    f"{row['peak'] / 1e6:7.1f} MB = {row['peak'] / row['share']:.2f} of it "
                    f"(and once {row['once'] / 1e6:.0f} MB), "
                    f"{row['seconds']:6.2f} s, logits {row['logits']:x}",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make_folder(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] and sys.argv[1] in WAYS:
        measure(*sys.argv[1:3])
    else:
        main()
