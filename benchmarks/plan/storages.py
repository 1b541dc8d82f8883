"""Compares planned memory with the storages of tensors that real steps have at their fullest, on 1 CPU rank.

    python benchmarks/plan/storages.py [MODEL ...]     # measures the layouts that storages.jsonl lacks
    python benchmarks/plan/storages.py --report        # plans all measured steps anew, and prints the table

Each model is trained for three steps under every legal layout (with each recompute). In the third, all
storages that exist before it, and those that operations make, count as long as they live; the most at
once is compared with the plan of the rank that has most, without the libraries. Models are small: only
the arithmetic is tested.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.bench.traced import trace_costs
from paceline.data.task import build_data
from paceline.plan.cluster import read_cluster
from paceline.plan.costs import ModelCosts
from paceline.plan.demand import Demands
from paceline.plan.fit import load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.recipe import Layout, Recipe, Rules, load_recipe
from paceline.recipe.layout import CHOICES
from paceline.train.run import build_loader, build_trainer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from machine import quote_setting  # noqa: E402

ROWS = HERE / "storages.jsonl"
RANKS, SAMPLES, MICROBATCHES, TOKENS, VOCAB = 1, 4, 2, 128, 512


@dataclass(frozen=True)
class Model:
    """A way to build a model, and its input."""

    build: Any
    is_image: bool = False

    def make_batch(self, samples: int) -> dict[str, Tensor]:
        if self.is_image:
            return {"pixel_values": torch.randn(samples, 3, 64, 64)}
        return {"input_ids": torch.randint(VOCAB, (samples, TOKENS))}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).logits


def _hf(name: str, config: str, **words: Any) -> nn.Module:
    import transformers

    sizes = getattr(transformers, config)(**words, attn_implementation="sdpa")
    return getattr(transformers, name)(sizes)


WIDTHS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}
MODELS = {
    "llama": Model(
        partial(_hf, "LlamaForCausalLM", "LlamaConfig", vocab_size=VOCAB, **WIDTHS, use_cache=False)
    ),
    "gpt2": Model(
        partial(
            _hf, "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=TOKENS, n_embd=128, n_layer=4,
            n_head=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "bert": Model(
        partial(
            _hf, "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, **WIDTHS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "vit": Model(
        partial(
            _hf, "ViTForImageClassification", "ViTConfig", **WIDTHS, image_size=64, patch_size=8,
            num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        is_image=True,
    ),
}  # fmt: skip


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that exist, as long as they live; `most` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._note(getattr(thing, "_local_tensor", thing))
        self.most = sum(self.sizes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, Tensor):
                self._note(one)
        self.most = max(self.most, sum(self.sizes.values()))
        return results

    def _note(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            return
        if address and storage.nbytes():
            if address not in self.sizes:
                weakref.finalize(storage, self.sizes.pop, address, None)
            self.sizes[address] = storage.nbytes()


OWN = {
    "gpt": ("gpt-stdlib", ["model.hidden=128", "data.seq_len=256"]),
    "encoder": ("encoder-dropout", []),
    "moe": ("moe-stdlib", []),
    "resnet": ("resnet-digits", []),
}


def list_layouts(name: str) -> list[str]:
    _, rules = describe(name)
    return [str(layout) for layout in rules.enumerate(RANKS, CHOICES["recompute"])[0]]


def describe(name: str) -> tuple[ModelCosts, Rules]:
    """Return a model's costs and rules: of a recipe by arithmetic, of another model by a trace."""
    if name in OWN:
        recipe = load_own(name)
        return of_recipe(recipe), Rules.of(recipe)
    model = MODELS[name]
    with torch.device("meta"):
        built = model.build()
    example = model.make_batch(SAMPLES)
    return trace_costs(built.train(), example, SAMPLES, SAMPLES * MICROBATCHES * RANKS)


def load_own(name: str, layout: str = "") -> Recipe:
    file, settings = OWN[name]
    settings = [*settings, "train.device='cpu'", "train.reduction='fast'"]
    words = [f"layout.{quote_setting(pair)}" for pair in layout.split()]
    return load_recipe(str(ROOT / "recipes" / f"{file}.toml"), [*settings, *words])


def measure(name: str, layouts: list[str]) -> None:
    """Train under each layout, and add a row with the most bytes of a rank, or the code of a refusal."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        for layout in layouts:
            torch.manual_seed(0)
            value: float | str
            try:
                value = _measure_one(name, layout)
            except paceline.PacelineError as error:
                value = str(error.code)
            gc.collect()
            if world.is_main:
                with ROWS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"model": name, "layout": layout, "bytes": value}) + "\n")


def _measure_one(name: str, layout: str) -> float:
    gc.collect()
    before = Meter().most
    batches, given = _train_own(name, layout) if name in OWN else _train(MODELS[name], layout)
    for _ in range(2):
        next(batches)()
    step = next(batches)
    gc.collect()
    with Meter() as meter:
        step()
    most = torch.tensor(float(meter.most - before - given))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def _train(model: Model, layout: str) -> tuple[Iterator[Callable[[], object]], int]:
    """Return steps to call, and the bytes of the samples."""
    trainer = paceline.Trainer(
        model.build(),
        forward=model.forward,
        loss=lambda output, batch: output.float().logsumexp(-1).mean(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
        layout=layout,
        microbatch_size=SAMPLES,
        reduction="fast",
        example=model.make_batch(2),
    )
    samples = [
        {key: value[0] for key, value in model.make_batch(1).items()}
        for _ in range(4 * SAMPLES * MICROBATCHES * RANKS)
    ]
    loader = trainer.loader(samples, global_batch_size=SAMPLES * MICROBATCHES * RANKS)
    given = sum(value.nbytes for each in samples for value in each.values())
    return (partial(trainer.step, batch) for batch in loader), given


def _train_own(name: str, layout: str) -> tuple[Iterator[Callable[[], object]], int]:
    recipe = load_own(name, layout)
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 100)
    loader = build_loader(recipe, trainer, data.train, train=True)
    return (partial(trainer.step, batch) for batch in loader), 0


def report() -> None:
    """Print the error of each model's plans."""
    cluster = read_cluster(f"{RANKS} H100-80", load_constants().links)
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    left: dict[str, int] = defaultdict(int)
    costs: dict[str, Any] = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        if row["model"] not in costs:
            costs[row["model"]] = Demands(describe(row["model"])[0], cluster)
        if isinstance(row["bytes"], str):
            left[row["bytes"]] += 1
            continue
        terms = costs[row["model"]].count(Layout.parse(row["layout"]).resolve(RANKS)).terms
        planned = sum(terms.values()) - terms["libraries"] - terms.get("update", 0.0)
        groups[row["model"]].append((planned / row["bytes"] - 1, row["layout"]))
    print(f"{'model':<8}{'layouts':>8}{'median':>8}{'worst':>8}  under")
    for name, errors in groups.items():
        worst = max(errors, key=lambda each: abs(each[0]))
        median = statistics.median(abs(error) for error, _ in errors)
        print(f"{name:<8}{len(errors):>8}{median:>8.1%}{worst[0]:>+8.0%}  {worst[1]}")
    print("not trained: " + (", ".join(f"{n} {code}" for code, n in left.items()) or "none"))


def main(words: list[str]) -> None:
    if words == ["--report"]:
        report()
        return
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(row["model"], row["layout"]) for row in rows}
    for name in words or [*OWN, *MODELS]:
        layouts = [layout for layout in list_layouts(name) if (name, layout) not in done]
        if layouts:
            paceline.launch(measure, RANKS, (name, layouts), device="cpu", hang_after_s=None)


if __name__ == "__main__":
    main(sys.argv[1:])
