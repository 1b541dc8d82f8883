"""Verifies nanoGPT's published model, read from its own file, under nine layouts, and prints a table.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/foreign_models/published.py nanoGPT/model.py    # writes published.txt

Nothing of the file is changed or copied here. A row is a layout, what `paceline.verify` says of it, and the
worst difference in tolerances (below 1 is the same as one process). Exit code 1 where a layout is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline

HERE = Path(__file__).parent
LAYOUTS = (
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "tp=2 sequence=true",
    "dp_shard=2 tp=2",
    "pp=2",
    "pp=2 schedule=zero_bubble",
    "pp=2 dp_shard=2",
    "cp=2",
)
_VOCABULARY, _LENGTH, _SAMPLES = 64, 32, 8


def build_model(path: str) -> nn.Module:
    """Build a small GPT with dropout by the classes of the file."""
    name = "published_nanogpt"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    sizes = {"block_size": _LENGTH, "vocab_size": _VOCABULARY, "n_layer": 4, "n_head": 4, "n_embd": 32}
    model: nn.Module = module.GPT(module.GPTConfig(**sizes, dropout=0.1, bias=True))
    return model


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Make the global batch of a step: tokens and targets (int64, samples x length)."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, _VOCABULARY, (_SAMPLES, _LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def compute_own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run the model on tokens and targets; it returns logits and its own loss."""
    loss: Tensor = model(*batch)[1]
    return loss


def take_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the model's own loss."""
    return output


def main(path: Path) -> int:
    """Verify all layouts; return the exit code."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{path.name}, SHA-256 {digest[:16]}, torch {torch.__version__}"]
    verified = paceline.verify(
        partial(build_model, str(path.resolve())),
        make_batch,
        take_loss,
        forward=compute_own_loss,
        layouts=LAYOUTS,
    )
    for text, result in zip(LAYOUTS, verified.results, strict=True):
        worst = "" if result.worst is None else f"{result.worst:.3f}"
        lines.append(f"{text:<28} {result.status:<8} {worst}")
    lines += [str(finding) for finding in verified.findings]
    (HERE / "published.txt").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    return int(any(result.status != "ok" for result in verified.results))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("python benchmarks/foreign_models/published.py PATH/TO/nanoGPT/model.py")
    sys.exit(main(Path(sys.argv[1])))
