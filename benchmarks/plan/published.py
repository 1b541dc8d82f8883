"""Reads published training runs as costs, layouts and clusters, so that `paceline plan` can predict them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.plan.cluster import Cluster, read_cluster
from paceline.plan.costs import Kept, ModelCosts, Transformer, of_transformer
from paceline.plan.fit import Constants
from paceline.plan.model_state import Sizes
from paceline.plan.parameters import Parameter
from paceline.recipe import Layout

ROWS = Path(__file__).parent / "published_runs.csv"
NAMES = {
    "A100-80": "A100-80-SXM", "A100-40": "A100-40-SXM", "H100-80": "H100-80-SXM", "H200": "H200-SXM",
    "V100-32": "V100-SXM2-32",
}  # fmt: skip
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zero_bubble", "ZB-V": "zbv"}
NEEDED = ("layers", "hidden", "heads", "seq_len", "global_batch", "dp")
# Publications that begin with one of these are left out of a fit together.
FAMILIES = ("Narayanan", "Megatron-LM README", "Megatron-Core", "nanotron", "torchtitan", "PyTorch blog",
            "IBM", "NeMo", "Megatron-LM llama", "Zero Bubble", "MosaicML")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published run."""

    source: str
    publication: str
    step_s: float  # 0: not published
    peak_gb: float | None
    costs: ModelCosts
    layout: Layout
    words: str
    gpu: str
    node: int
    rate: float | None

    def cluster(self, fit: Constants) -> Cluster:
        """Return its cluster, with links as the constants say."""
        return read_cluster(self.words, fit.links)


def read_runs(path: Path = ROWS) -> Iterator[tuple[dict[str, str], Run | str]]:
    """Yield each row with its run, or with the reason why it is left out."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                yield row, read_run(row)
            except (ValueError, KeyError, ZeroDivisionError, AssertionError) as error:
                yield row, str(error) or type(error).__name__


def _number(row: dict[str, str], key: str, default: int | None = None) -> int:
    text = row[key].strip()
    if not text:
        if default is None:
            raise ValueError(f"no {key}")
        return default
    return int(float(text))


def read_run(row: dict[str, str]) -> Run:
    """Return a row as a run.

    Raises:
        ValueError: with the reason why the row says too little.
    """
    for key in NEEDED:
        if not row[key].strip():
            raise ValueError(f"no {key}")
    if "layout unknown" in row["reliability"] or _number(row, "ep", 1) > 1:
        raise ValueError("layout not published, or experts")
    if row["pp_schedule"] == "ZB-2p":
        raise ValueError("no such schedule here")
    gpu = next((name for key, name in NAMES.items() if row["gpu"].startswith(key)), None)
    if row["gpu"].startswith("H100-96"):
        gpu = "H100-96-HBM2e"
    if row["gpu"].startswith("B200"):
        gpu = "B200-SXM"
    assert gpu is not None, row["gpu"]
    ranks = _number(row, "n_gpus")
    node = min(_number(row, "gpus_per_node", 8), ranks)
    tp, pp, cp = (_number(row, key, 1) for key in ("tp", "pp", "cp"))
    dp = ranks // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != ranks:
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} on {ranks} ranks")
    zero = _find_zero(row["sharding"])
    chunks = _number(row, "vpp", 1)
    schedule = SCHEDULES.get(row["pp_schedule"].strip(), "1f1b")
    if pp > 1 and schedule == "1f1b" and ("nterleaved" in row["pp_schedule"] or chunks > 1):
        chunks = chunks if chunks > 1 else 2
        schedule = "interleaved" if "not stated" not in row["pp_schedule"] else "1f1b"
    layers, hidden, heads = (_number(row, key) for key in ("layers", "hidden", "heads"))
    if pp > 1 and schedule == "interleaved" and (chunks * pp > layers + 2 or chunks > 16):
        chunks = max(2, min(16, layers // pp))
    if schedule == "1f1b" or pp == 1:
        chunks = 1
    if schedule == "zbv":
        chunks = 1
    if pp > 1 and zero == 3 and row["source"].startswith("torchtitan"):
        zero = 2  # it keeps gathered parameters under pp
    shard = dp if zero and dp > 1 else 1
    layout = Layout(
        pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, zero=zero if shard > 1 else 3,
        sequence=tp > 1 and _splits_sequence(row["source"]), recompute=_find_recompute(row),
        schedule=schedule if pp > 1 else "1f1b", chunks=chunks if pp > 1 else 1, cp_by="gather",
    )  # fmt: skip
    batch = _number(row, "global_batch")
    micro = _number(row, "micro_batch", 1)
    if not row["micro_batch"].strip() and pp == 1:
        micro = max(1, min(batch // dp, 8))
    if schedule == "interleaved" and (batch // dp // micro) % pp:
        layout = Layout(**{**vars(layout), "schedule": "1f1b", "chunks": 1})
    costs = _make_costs(row, layers, hidden, heads, batch, min(micro, batch // dp))
    if cp > 1:  # others divide what is outside of blocks, too
        kept = costs.after.kept
        after = replace(costs.after, kept=Kept(kept.split / cp, kept.whole / cp, kept.joined / cp))
        costs = replace(costs, after=after, loss_bytes=costs.loss_bytes / cp)
    rate = _find_rate(row["interconnect"], node)
    words = f"{ranks // node} nodes of {node} {gpu}" + (f", {rate:g} Gbit/s" if rate and ranks > node else "")
    publication = next((name for name in FAMILIES if row["source"].startswith(name)), row["source"])
    peak, step_s = (float(row[key]) if row[key].strip() else None for key in ("peak_mem_gb", "step_time_s"))
    if peak is None and step_s is None:
        raise ValueError("no step_time_s")
    return Run(row["source"], publication, step_s or 0.0, peak, costs, layout, words, gpu, node, rate)


def _make_costs(
    row: dict[str, str], layers: int, hidden: int, heads: int, batch: int, micro: int
) -> ModelCosts:
    source, precision = row["source"], row["precision"]
    gated = not source.startswith(
        ("Narayanan", "Megatron-LM README", "Megatron-Core", "Zero Bubble", "MosaicML", "NeMo 24.07 GPT")
    )
    fused = not source.startswith(("Narayanan", "Megatron-LM README", "Zero Bubble"))
    inner, vocab = _number(row, "ffn", 4 * hidden), _number(row, "vocab", 50304)
    kv = _number(row, "kv_heads", heads)
    sizes = Transformer(
        layers, hidden, heads, kv, inner, vocab, _number(row, "seq_len"), gated, fused,
        rms=gated, residual=2, number=2,
    )  # fmt: skip
    matrices = 3 if gated else 2
    block = [
        Parameter("qkv", (hidden + 2 * kv * (hidden // heads), hidden), "b", 0),
        Parameter("out", (hidden, hidden), "b", 1),
        Parameter("up", (inner * (matrices - 1), hidden), "b", 0),
        Parameter("down", (hidden, inner), "b", 1),
        Parameter("norms", (2 * hidden,), "b"),
    ]
    tied = (
        not source.startswith(("torchtitan", "PyTorch blog", "IBM", "Megatron-LM llama"))
        and "LLAMA" not in source
    )
    vocabulary = Parameter("vocabulary", (vocab, hidden), "", 0)
    parameters = {"before": [vocabulary]} | {f"block{n}": block for n in range(layers)}
    parameters["after"] = [Parameter("norm", (hidden,))] + ([] if tied else [vocabulary])
    before, *blocks, after = of_transformer(sizes, parameters)
    halves = source.startswith(
        ("torchtitan", "PyTorch blog")
    )  # of the products, selective keeps every other one
    if halves:
        few = blocks[0].kept_selective
        few = Kept(0.55 * few.split, 0.55 * few.whole, 0.55 * few.joined)
        blocks = [replace(block, kept_selective=few) for block in blocks]
    megatron = source.startswith(("Narayanan", "Megatron", "NeMo", "Zero Bubble", "nanotron"))
    fsdp = not megatron
    return ModelCosts(
        source, before, tuple(blocks), after,
        loss_bytes=_number(row, "seq_len") * vocab * (2 + 4 + 4),
        sizes=_find_sizes(fsdp=fsdp, pure="pure" in precision, sums=2 if source.startswith("IBM") else 4),
        dtype_bytes=1 if "fp8" in precision or "float8" in precision else 2,
        global_batch=batch, microbatch=micro, tokens=_number(row, "seq_len"),
        overlaps=not source.startswith(("Narayanan", "Megatron-LM README")),
        eager="compile" not in row["notes"],
        selective_again=0.5 if halves else 0.0,
        scatters=row["source"].startswith(("Narayanan", "Megatron", "NeMo")),
    )  # fmt: skip


def _find_sizes(*, fsdp: bool, pure: bool, sums: int) -> Sizes:
    """Return bytes: fp32 parameters that are gathered and summed narrow, or narrow ones with fp32 masters."""
    if fsdp:
        return Sizes(parameter=2 if pure else 4, gathered=2, num_moments=2, gradient=2 if pure else sums)
    # Megatron-LM: 2 bytes, fp32 gradients, and 12 bytes of master and moments: as six moments of 2 bytes.
    return Sizes(parameter=2, gathered=2, num_moments=6, gradient=4)


def _find_zero(sharding: str) -> int:
    if "zero2" in sharding:
        return 2
    if "zero1" in sharding:
        return 1
    return 3 if "fsdp" in sharding or "zero3" in sharding or "hsdp" in sharding else 0


def _splits_sequence(source: str) -> bool:
    return not source.startswith(("Narayanan", "Megatron-LM README", "Zero Bubble"))


def _find_recompute(row: dict[str, str]) -> str:
    text = row["recompute"]
    if text.startswith("full"):
        return "block"
    return "selective" if "selective" in text else "none"


def _find_rate(words: str, node: int) -> float | None:
    """Return Gbit/s per rank between nodes, where the row says it."""
    found = re.search(r"(\d+)x(\d+)\s*Gb", words)
    if found:
        return int(found[1]) * int(found[2]) / node
    found = re.search(r"([\d.]+)\s*(Gb|Tb)/s[^;]*?(per node|per GPU|class)?", words)
    if not found:
        return None
    rate = float(found[1]) * (1000 if found[2] == "Tb" else 1)
    return rate if rate <= 400 and ("per GPU" in words and "per node" not in words) else rate / node
